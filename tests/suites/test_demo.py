"""The demo as a newcomer runs it, and as an impatient one interrupts it."""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from harness.clock import Deadline
from harness.devices.adb.connection import ServerAddress, query
from harness.devices.base import ServerUnreachable
from harness.results.store import ResultsStore
from tests.command_line import Started, qnnfarm
from tests.suites.user_pytest import PYTHON

pytestmark = [pytest.mark.first, pytest.mark.timeout(3600)]


_OF_ONE_SOC = (
    "import suites.demo; suites.demo.SOCS = ('SM8750',); from harness.cli.app import main; main()"
)


@contextmanager
def demo(folder: Path, *options: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    command = [PYTHON, "-m", "harness.cli", "demo", "--out", str(folder), *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        cwd=folder.parent,
    )
    killer = threading.Timer(1700, process.kill)
    killer.start()
    try:
        with process:
            yield process
    finally:
        killer.cancel()


@pytest.fixture
def environment(tmp_path: Path, build_cache: Path, free_adb_port: int) -> dict[str, str]:
    """An adb server address where nothing runs, and device state of the test's own."""
    return {
        "ADB_SERVER_SOCKET": f"tcp:127.0.0.1:{free_adb_port}",
        "HOME": str(tmp_path),
        "QNNFARM_STATE_DIR": str(tmp_path / "state"),
        "QNNFARM_CACHE_DIR": str(build_cache),
    }


def leftovers(environment: dict[str, str]) -> list[str]:
    """Command lines of processes that know the demo's state folder."""
    marker = environment["QNNFARM_STATE_DIR"].encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def server_runs(environment: dict[str, str]) -> bool:
    port = int(environment["ADB_SERVER_SOCKET"].rpartition(":")[2])
    try:
        query(ServerAddress("127.0.0.1", port), "host:version", Deadline(10))
    except ServerUnreachable:
        return False
    return True


@pytest.mark.slow
def test_the_demo_does_the_main_job_twice(tmp_path: Path, environment: dict[str, str]) -> None:
    out = tmp_path / "out"
    with demo(out, **environment) as process:
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "[8/8]" in stderr
    assert "Emulator speed is not hardware speed" in stdout
    assert "SM8650:emulator" in stdout
    page = (out / "report.html").read_text()
    assert "SM8750:emulator" in page
    with ResultsStore.open(out / "results.db", create=False) as store:
        runs = store.list_runs()
    assert [run.status for run in runs] == ["done"] * 4
    assert {run.device.soc for run in runs} == {"SM8650", "SM8750"}
    for run in runs:
        if run.kind == "perplexity":
            (device,), (floating,) = run.values("perplexity"), run.values("perplexity_float")
            (quantized,) = run.values("perplexity_quantized_cpu")
            assert device == pytest.approx(floating, rel=0.03)
            assert device == pytest.approx(quantized, rel=0.01)
        else:
            assert len(run.values("decode_tokens_per_s")) == 3
            assert run.generated_text
    assert leftovers(environment) == []
    assert not server_runs(environment)

    with demo(out, "--json", **environment) as process:
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert re.findall(r"pushed ([0-9.]+) MiB", stderr) == ["0.0", "0.0"]
    assert json.loads(stdout)["report"] == str(out / "report.html")
    assert "compile part 1 of 2: from the cache" in stderr


@pytest.mark.needs("plugins.virtual_android")
def test_a_second_demo_waits_for_nobody(tmp_path: Path, environment: dict[str, str]) -> None:
    state = Path(environment["QNNFARM_STATE_DIR"])
    state.mkdir()
    with FileLock(state / "demo.lock"):
        done = qnnfarm("demo", "--out", tmp_path / "out", env=os.environ | environment)
    assert done.returncode == 2
    assert done.stderr == "qnnfarm: another demo is running: wait until it is done\n"


@pytest.mark.needs("libatomic1")
@pytest.mark.slow
def test_an_interrupted_demo_kills_what_it_started(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    words = ("demo", "--out", tmp_path / "out")
    with Started("-c", _OF_ONE_SOC, *words, env=os.environ | environment) as process:
        for line in process.stderr:
            if "repetition 1/" in line:
                process.send_signal(signal.SIGINT)
                break
        _, rest = process.communicate(timeout=250)
    assert process.returncode == 130, rest
    assert leftovers(environment) == []
    assert not server_runs(environment)
