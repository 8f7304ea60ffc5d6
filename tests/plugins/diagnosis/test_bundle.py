"""The files that a run would push."""

import json
from pathlib import Path

from harness.devices.device import Device
from tests.harness.cli.conftest import Run


def test_a_bundle_with_files_of_the_user(
    qnnfarm: Run, tmp_path: Path, virtual_device: Device, small_bundle: Path
) -> None:
    on_device = (small_bundle, "--device", virtual_device.serial)
    (tmp_path / "notes.txt").write_text("of mine")
    push = ("--push", tmp_path / "notes.txt", "--push", f"{tmp_path}/notes.txt:libX.so")
    shown = qnnfarm("bundle", "show", *on_device, *push, "--json")
    assert shown.returncode == 1
    bundle = json.loads(shown.stdout)
    (fault,) = bundle["faults"]
    assert fault.startswith("libX.so is no library")
    origins = {file["name"]: file["origin"] for file in bundle["files"]}
    assert origins["notes.txt"] == origins["libX.so"] == "--push"
    assert origins["libGenie.so"].startswith("onnxruntime-qnn ")
    assert origins["tokenizer.json"] == "container"
