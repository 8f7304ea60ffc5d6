"""`qnnfarm compare` on a real container, and what its exit code says."""

import json
from pathlib import Path

from harness.devices.adb import AdbDevice
from harness.exit_codes import NO_ANSWER
from suites.models import tiny_llama
from tests.harness.cli.conftest import Run
from tests.harness.cli.test_commands import SHAPE


def test_a_pair_of_sessions_is_no_answer(
    qnnfarm: Run, tmp_path: Path, virtual_device: AdbDevice, reference_outputs: object
) -> None:
    container = tmp_path / "container"
    target = ("--target", "SM8750:emulator")
    built = qnnfarm("build", tiny_llama.folder(), *target, *SHAPE, "--out", container)
    assert built.returncode == 0, built.stderr
    little = ("--sessions", "1", "-p", "8", "-n", "2", "-r", "1", "-w", "0", "--no-gate", "--json")
    where = ("--device", virtual_device.serial, "--db", tmp_path / "r.db")
    done = qnnfarm("compare", container, container, *where, *little, timeout_s=600)
    assert done.returncode == NO_ANSWER, done.stderr
    answer = json.loads(done.stdout)
    assert answer["verdict"] == "not enough data"
    assert [run["label"] for run in answer["sessions"]] == ["A", "B"]
    assert "pair 1, A on " in done.stderr
    assert "repetition 1, at most 1: " in done.stderr
