"""Faults with `when=run` under a lease: claims name run.sh too, but only runs start it."""

from collections.abc import Callable

from harness.deploy.scripts import intact
from harness.devices.adb.device import AdbDevice
from harness.devices.spec import DeviceSpec
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from harness.virtual_device import manager
from harness.virtual_device.faults import parse_fault
from harness.virtual_device.manager import VirtualDevice


def test_a_fault_of_runs_spares_claims(
    make_virtual_device: Callable[..., tuple[VirtualDevice, AdbDevice]],
) -> None:
    virtual, _ = make_virtual_device()
    requirement = Requirement()
    with Pool.of([DeviceSpec("android", virtual.serial)]) as pool:
        with pool.acquire(requirement, timeout_s=60) as lease:
            lease.device.shell(":")
        manager.control(virtual.name).inject(parse_fault("slow:ms=1,when=run"))
        with pool.acquire(requirement, timeout_s=60) as lease:
            device = lease.device
            scripts, run_dir = device.fence.scripts, f"{device.work_root}/runs/one"
            device.shell(f"{intact(scripts)} && mkdir -p {run_dir}")
            assert _strikes(virtual) == 0
            run = ["sh", f"{scripts}/run.sh", "-o", "out", run_dir, "20", "log", "--", "echo", "x"]
            assert "exit=0" in device.shell(run).stdout
            assert _strikes(virtual) == 1


def _strikes(device: VirtualDevice) -> int:
    return sum(event.kind == "struck" for event in manager.control(device.name).events())
