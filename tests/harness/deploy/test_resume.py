"""What an interrupted push had brought whole is not pushed again."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.deploy.deploy import deploy, store_usage
from harness.devices.device import Device
from tests.command_line import Started
from tests.tcp_meter import TcpMeter

RandomFile = Callable[[int], Path]
Metered = tuple[Device, TcpMeter]

_PART = 4 << 20

_DEPLOY_AND_DIE = """
import os, signal, sys
from pathlib import Path
from harness.deploy.deploy import deploy
from harness.devices.adb.discovery import open_device

def die(sent, total):
    if sent > 5 * (4 << 20):
        os.kill(os.getpid(), signal.SIGKILL)

files = {path.name: path for path in map(Path, sys.argv[2:])}
deploy(open_device(sys.argv[1]), files, run_id="dead", on_progress=die)
"""


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_host_that_is_killed_in_the_middle(metered: Metered, random_file: RandomFile) -> None:
    device, meter = metered
    paths = [random_file(_PART) for _ in range(6)]
    assert Started("-c", _DEPLOY_AND_DIE, device.serial, *paths).wait(200) == -9
    before = meter.total_bytes
    deployment = deploy(device, {path.name: path for path in paths}, run_id="second")
    sent = meter.total_bytes - before
    # Four files had been confirmed by the device; the fifth was on its way.
    assert deployment.pushed_bytes <= 2 * _PART
    assert deployment.pushed_bytes + deployment.reused_bytes == 6 * _PART
    # What the first had sent of them, up to its end, may still have been in the buffers.
    assert sent < deployment.pushed_bytes + 1.5 * _PART
    found = device.shell(f"cd {deployment.run_dir} && sha256sum *").stdout
    for path in paths:
        assert f"{_sha256(path)}  {path.name}" in found


def test_contents_pushed_by_a_dead_deployment_are_adopted(
    virtual_device: Device, run_id: str, random_file: RandomFile
) -> None:
    whole, half, other, new = (random_file(20_000 + number) for number in range(4))
    area = f"{virtual_device.work_root}/incoming/dead"
    virtual_device.push(whole, f"{area}/{_sha256(whole)}")
    (cut := random_file(0)).write_bytes(half.read_bytes()[:10_000])
    virtual_device.push(cut, f"{area}/{_sha256(half)}")
    virtual_device.push(random_file(20_002), f"{area}/{_sha256(other)}")
    files = {"whole": whole, "half": half, "other": other, "new": new}
    deployment = deploy(virtual_device, files, run_id=run_id)
    assert set(deployment.pushed) == {"half", "other", "new"}
    assert deployment.resumed_bytes == 20_000
    found = virtual_device.shell(f"cd {deployment.run_dir} && sha256sum *").stdout
    assert {line.split()[0] for line in found.splitlines()} == set(map(_sha256, files.values()))
    virtual_device.shell(["rm", "-rf", area])


def test_ctrl_c_keeps_what_has_arrived_whole(
    make_virtual_device: Callable[..., tuple[object, Device]], random_file: RandomFile
) -> None:
    _, device = make_virtual_device()
    files = {f"{number}": random_file(_PART) for number in range(6)}

    def interrupt(sent: int, _total: int) -> None:
        if sent > 4.5 * _PART:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deploy(device, files, run_id="r", on_progress=interrupt)
    assert ".wants" not in device.shell(f"find {device.work_root}/incoming").stdout
    deployment = deploy(device, files, run_id="r")
    assert deployment.pushed_bytes <= 2 * _PART
    assert store_usage(device).total_bytes == 6 * _PART
    assert device.shell(f"find {device.work_root}/incoming -type f").stdout == ""
