"""`qnnfarm rehearse` on a container for a phone, with a virtual device of its SoC."""

import json
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.targets import find_soc
from harness.devices.device import Device
from harness.runtimes.bundles.sources import FOLDERS_VARIABLE, SDK_PROGRAMS, qnn_libraries
from plugins.diagnosis.rehearse import check_bundle
from tests.harness.cli.conftest import Run


@pytest.mark.variant
def test_a_phones_container_runs_without_the_phone(
    qnnfarm: Run, small_model: Path, small_bundle: Path, tmp_path: Path
) -> None:
    shape = ("--ar", "1,32", "--cl", "192", "--splits", "1", "--target", "SM8750")
    built = qnnfarm("build", small_model, *shape, "--out", tmp_path / "phone")
    assert built.returncode == 0, built.stderr
    few = ("--prompts", "2", "--max-tokens", "3", "--json")
    done = qnnfarm("rehearse", tmp_path / "phone", *few)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    found = {check["subject"]: check for check in answer["checks"]}
    assert "1 compiled from the same DLCs" in found["binaries"]["detail"]
    assert found["genie"]["holds"]
    assert found["graph"]["detail"] == "gives Genie's tokens, 2 of 2 answers"
    assert [len(tokens) for tokens in answer["tokens"]["genie"]] == [3, 3]
    assert found["bundle"]["holds"] is None  # no SDK here
    assert "share weights" in answer["only_a_phone"][0]
    assert "rehearse-sm8750" in qnnfarm("device", "ls").stdout
    refused = qnnfarm("rehearse", small_bundle)
    assert refused.returncode == 2
    assert "for the emulator already" in refused.stderr


def test_a_bundle_that_a_phone_would_refuse_is_wrong(
    small_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    virtual_device: Device,
) -> None:
    folder = tmp_path / "arm64-v8a"
    folder.mkdir()
    container = GenAIContainer.load(small_bundle)
    genie = ("libGenie.so", "libQnnHtpNetRunExtensions.so", *SDK_PROGRAMS)
    for name in (*qnn_libraries("arm64-v8a", find_soc("SM8750")), *genie):
        (folder / name).write_text("no library")
    monkeypatch.setenv(FOLDERS_VARIABLE, str(tmp_path))
    check = check_bundle(container, "arm64-v8a")
    assert check.holds is False
    assert "libGenie.so is no library" in check.detail
    board = check_bundle(container, "aarch64")
    assert board.holds is None  # the folder has nothing for it
    assert "aarch64" in board.detail
    device = check_bundle(container, "arm64-v8a", virtual_device.serial)
    assert device.holds, device.detail
