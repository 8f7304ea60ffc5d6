"""A test that waits for its devices says for which, and who holds them since when."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from harness.devices.spec import DeviceSpec
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from tests.harness.pytest_plugin.conftest import command

_WAITS = """
import pytest

pytestmark = pytest.mark.device(soc="SM8750")

def test_before(): print("nobody sees this")

@pytest.mark.parametrize("n", range({tests}))
def test_needs_it(capfd, device, n):
    device.shell(["true"])

def test_after(): pass
"""
_PATIENCE_S = 250


class _Lines:
    """What a process prints, as it comes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.told: list[str] = []
        self._process = process
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            self.told.extend(stream)

    def waits(self) -> list[str]:
        return [text for text in self.told if " waits for " in text]

    def end(self) -> str:
        self._process.wait(timeout=_PATIENCE_S)
        self._reader.join(timeout=_PATIENCE_S)
        return "".join(self.told)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [("-pno:xdist",), pytest.param(("-n2", "-v"), marks=pytest.mark.variant)],
    ids="".join,
)
def test_it_is_said_once_while_it_lasts(
    tmp_path: Path, two_devices: tuple[str, str], options: tuple[str, ...]
) -> None:
    tests = 2 if "-n2" in options else 1
    spec = DeviceSpec("virtual", two_devices[0])
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(_WAITS.format(tests=tests))
    with Pool.of([spec]) as pool, pool.acquire(Requirement(), purpose="by hand") as lease:
        process = subprocess.Popen(
            command(tmp_path, f"--device={spec}", *options),
            cwd=tmp_path, env=os.environ | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            lines = _Lines(process)
            deadline = time.monotonic() + _PATIENCE_S
            while len(lines.waits()) < tests and time.monotonic() < deadline:
                time.sleep(0.05)
            said = lines.waits()
            time.sleep(1.0)  # it would be said again by now
            lease.release()
            output = lines.end()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert lines.waits() == said, output
    assert process.returncode == 0, output
    assert len(said) == tests, output
    for number, text in enumerate(sorted(said)):
        start = f"qnnfarm: test_it.py::test_needs_it[{number}] waits for soc=SM8750: "
        assert text.startswith(f"{start}{two_devices[0]} is held by "), text
        assert f"(pid {os.getpid()}): by hand since " in text
    assert f"{tests + 2} passed" in output
    assert "nobody sees this" not in output
    counts = (tmp_path / "junit.xml").read_text()
    assert f'tests="{tests + 2}"' in counts, counts
