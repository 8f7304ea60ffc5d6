from dataclasses import dataclass
from pathlib import Path

import pytest

import device_scripts
from harness.clock import Deadline
from harness.deploy.scripts import ensure_scripts
from harness.devices.device import Device
from harness.devices.local import LocalTransport
from tests.harness.telemetry.phone import make_sysfs


@dataclass(frozen=True)
class Here:
    """This machine as a device that has a phone's sysfs."""

    device: Device
    sysfs: Path
    scripts_dir: str
    run_dir: str


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    temporary = tmp_path / "temporary folder"
    run_dir = temporary / "qnnfarm" / "runs" / "run 1"
    run_dir.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(temporary))
    sysfs = make_sysfs(tmp_path / "a sysfs")
    monkeypatch.setenv("QNNFARM_SYS_ROOT", str(sysfs))
    scripts = Path(device_scripts.__file__).parent
    return Here(Device(LocalTransport()), sysfs, str(scripts), str(run_dir))


def scripts_on(device: Device) -> str:
    """The folder with our scripts on a device."""
    device.shell(["mkdir", "-p", f"{device.work_root}/scripts"])
    return ensure_scripts(device, Deadline.for_device(device.serial, "test", 60))
