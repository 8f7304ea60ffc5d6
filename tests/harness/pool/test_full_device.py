"""A device whose disk is full, for real: one of the test's own, in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.pool.conftest import on_a_small_disk

_POOL = "devices: [{name: bench, type: local}]\nrecovery: {backoff_s: 1}\n"
_PROGRAM = """
import json, sys, threading
from pathlib import Path
from harness.errors import LeaseTimeoutError
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement

cache = Path(sys.argv[1])
with Pool.open() as pool:
    with pool.acquire(Requirement(), timeout_s=60) as lease:
        fence = Path(lease.device.work_root, "fence")
        first = lease.token
    over = threading.Event()
    def fill():
        with open(cache / "filler", "wb", buffering=0) as file:
            while not over.is_set():
                try:
                    file.write(bytes(4096))
                except OSError:  # what the first lease left may be freed late
                    full.set()
                    over.wait(0.05)
    full = threading.Event()
    filling = threading.Thread(target=fill)
    filling.start()
    full.wait()
    try:
        pool.acquire(Requirement(), timeout_s=1)
    except LeaseTimeoutError as error:
        told = str(error)
    over.set()
    filling.join()
    held = sorted(path.name.partition("-")[0] for path in fence.glob("[0-9]*"))
    (cache / "filler").unlink()
    with pool.acquire(Requirement(), timeout_s=60) as lease:
        last = lease.token
    failures = pool.members()[0].failures
print(json.dumps([told, held == [str(first)], last - first, failures]))
"""
_PLAN = """
name: full
devices: [{name: bench}]
workloads: [{kind: command, command: ["true"]}]
conditions: none
"""


def _run(tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command whose cache, with the work root of its device, is 3 MB large."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (tmp_path / "pool.yaml").write_text(_POOL)
    environment = {
        **os.environ,
        "QNNFARM_POOL": str(tmp_path / "pool.yaml"),
        "QNNFARM_STATE_DIR": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(cache),
        "HOME": str(tmp_path),
        "TMPDIR": "",  # a user's own would be the first place for the work root
    }
    return subprocess.run(
        on_a_small_disk(cache, "3m", *words), env=environment, cwd=tmp_path, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.needs("namespaces")
def test_a_claim_on_a_full_disk_ends_in_time_and_burns_no_tokens(tmp_path: Path) -> None:
    done = _run(tmp_path, sys.executable, "-c", _PROGRAM, str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    told, is_alone, tokens, failures = json.loads(done.stdout)
    assert "bench is " in told
    assert "is full at " in told
    assert told.isprintable()
    assert is_alone
    assert tokens < 20
    assert failures == []


@pytest.mark.variant
@pytest.mark.needs("namespaces")
def test_a_plan_on_a_full_device_ends_at_sigterm(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(_PLAN)
    run = f"{sys.executable} -m harness.cli run {tmp_path}/plan.yaml --db {tmp_path}/r.db"
    fill = f"head -c 9000000 /dev/zero >>{tmp_path}/cache/filler 2>/dev/null"
    script = f"""
    {run} || exit
    {fill}
    until [ -e over ]; do {fill}; sleep 0.1; done &  # what the first run left may be freed late
    {run} --fresh 2>told & running=$!
    until grep -q 'is full at' told || ! kill -0 $running; do sleep 0.2; done
    kill -TERM $running; wait $running; echo status $?
    touch over
    """
    done = _run(tmp_path, "sh", "-c", script)
    assert done.stdout.splitlines()[-1:] == ["status 130"], done.stdout + done.stderr
