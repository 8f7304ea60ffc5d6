"""Disks that are full for a while, in the middle of a plan: nothing is lost, and it goes on.

A disk is a tmpfs of the test's own; a file takes what space is left on it.
"""

import contextlib
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.devices.device import Device
from harness.results.store import ResultsStore
from tests.command_line import Started, qnnfarm
from tests.plugins.lab.hosts import Host, Lab
from tests.postgresql_server import running_postgresql_server
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("namespaces", "root"),
    pytest.mark.timeout(1200),
]

CELLS = 8
BENCH = {
    "kind": "bench", "prompt_tokens": 16, "new_tokens": 3, "repetitions": 1, "warmup": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Disk:
    """A small disk."""

    path: Path

    def fill(self) -> None:
        """Take all that is left of it."""
        with contextlib.suppress(OSError), (self.path / "filler").open("wb", 0) as file:
            for size in (1 << 16, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        """Give it back."""
        (self.path / "filler").unlink(missing_ok=True)


@pytest.fixture
def disk() -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(prefix="qnnfarm-disk-", dir="/tmp") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=48m,mode=0755", "small", folder]
        subprocess.run(mount, check=True)
        try:
            yield Disk(Path(folder))
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def done(db: Path) -> int:
    """Return the number of results."""
    if not db.exists():
        return 0
    with ResultsStore.open(db) as store:
        return sum(run.status == "done" for run in store.list_runs())


@pytest.mark.parametrize("what", ["results", "state"])
def test_plan_whose_disk_is_full_ends_in_a_line_and_goes_on(
    tmp_path: Path, disk: Disk, virtual_device: Device, tiny_bundle: Path, what: str
) -> None:
    db = (disk.path if what == "results" else tmp_path) / "results.db"
    state = (disk.path if what == "state" else tmp_path) / "state"
    environment = os.environ | {"QNNFARM_STATE_DIR": str(state), "COLUMNS": "120"}
    pool = {"devices": [{"type": "android", "identifier": virtual_device.serial, "name": "dut"}]}
    (tmp_path / "pool.yaml").write_text(json.dumps(pool))
    plan = tmp_path / "plan.yaml"
    plan.write_text(json.dumps({
        "name": "full", "db": str(db), "pool": "pool.yaml", "conditions": "none",
        "containers": [{"path": str(tiny_bundle)}], "workloads": [BENCH | {"sessions": CELLS}],
    }))  # fmt: skip
    with Started("run", plan, cwd=tmp_path, env=environment) as process:
        wait_for(lambda: done(db) >= 2)
        disk.fill()
        answer, remarks = process.communicate(timeout=300)
    assert process.returncode not in {0, None}
    assert f"no space is left on the disk of {disk.path}" in remarks
    assert "Traceback" not in answer + remarks
    disk.free()
    again = qnnfarm("run", plan, cwd=tmp_path, env=environment)
    assert again.returncode == 0, again.stderr
    with ResultsStore.open(db) as store:
        runs = store.list_runs()
    sessions = Counter(run.session for run in runs if run.status == "done")
    assert sorted(sessions.values()) == [1] * CELLS
    assert {run.status for run in runs} <= {"done", "interrupted"}


def test_lab_whose_tablespace_is_full_waits_until_there_is_space(
    tmp_path: Path, disk: Disk, new_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_postgresql_server(new_port) as server:
        place = disk.path / "tables"
        place.mkdir()
        owner = (server.folder / "data").stat()
        os.chown(place, owner.st_uid, owner.st_gid)
        server.ask("postgres", f"CREATE TABLESPACE small LOCATION '{place}'")
        server.ask("postgres", "CREATE DATABASE lab TEMPLATE template0 TABLESPACE small")
        lab = Lab(tmp_path, server)
        host = Host("h1", tmp_path / "h1", lab.url, new_port(), boots=True)
        monkeypatch.setenv("QNNFARM_LEDGER", lab.url)
        lab.hosts = [host]
        try:
            host.start()
            wide = "sleep 0.2; head -c 900 /dev/urandom | base64 -w0"
            process = lab.submit(lab.plan(*(f"{wide} # {n}" for n in range(60))))
            wait_for(lambda: lab.statuses()["succeeded"] >= 3, lambda: host.log)
            disk.fill()
            before = host.log
            wait_for(lambda: "space" in host.log[len(before) :], lambda: host.log)
            disk.free()
            answer, remarks = lab.finish(process, succeeded=60)
            once = lab.ask("SELECT status, count(*) FROM plan_cells GROUP BY status")
            assert once == [("done", 60)]
            assert "Traceback" not in answer + remarks + host.log
        finally:
            host.kill()
