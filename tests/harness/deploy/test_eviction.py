"""Room is made by evicting what was used longest ago, never what is in use."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.deploy.deploy import deploy, evict, remove_run, store_usage
from harness.deploy.store import EvictionPolicy
from harness.devices.device import Device
from harness.errors import DeviceFullError
from plugins.virtual_android.manager import VirtualDevice
from tests.command_line import Started

RandomFile = Callable[[int], Path]
MakeDevice = Callable[..., tuple[VirtualDevice, Device]]

_MIB = 1 << 20


def _held(device: Device) -> set[str]:
    return {entry.sha256 for entry in store_usage(device).entries}


def _fill(device: Device, random_file: RandomFile, names: str) -> dict[str, str]:
    """A content of 6 MiB for each letter, used in this order long ago; gives their hashes."""
    held = {}
    for number, name in enumerate(names):
        deployment = deploy(device, {name: random_file(6 * _MIB)}, run_id=name)
        held[name] = deployment.files[0].sha256
        remove_run(device, name)
        when = 1_600_000_000 + number
        device.shell(f"touch -d @{when} {device.work_root}/store/.memo/{held[name]}")
    return held


def test_least_recently_used_content_is_evicted_first(
    make_virtual_device: MakeDevice, random_file: RandomFile
) -> None:
    _, device = make_virtual_device(storage_bytes=40 * _MIB)
    held = _fill(device, random_file, "abcd")
    deployment = deploy(device, {"new": random_file(8 * _MIB)}, run_id="r")
    assert deployment.evicted_bytes == 6 * _MIB
    assert _held(device) == {*held.values(), deployment.files[0].sha256} - {held["a"]}


def test_use_makes_young(make_virtual_device: MakeDevice, random_file: RandomFile) -> None:
    _, device = make_virtual_device(storage_bytes=40 * _MIB)
    first = random_file(6 * _MIB)
    held = {"first": deploy(device, {"f": first}, run_id="f").files[0].sha256}
    device.shell(f"touch -d @1500000000 {device.work_root}/store/.memo/{held['first']}")
    held |= _fill(device, random_file, "ab")
    assert [entry.sha256 for entry in store_usage(device).entries] == list(held.values())
    remove_run(device, "f")
    deploy(device, {"f": first}, run_id="f")
    usage = store_usage(device)
    assert usage.entries[-1].sha256 == held["first"]
    assert usage.entries[-1].used_at > 1_700_000_000
    assert usage.entries[-1].size == 6 * _MIB
    remove_run(device, "f")
    deploy(device, {"new": random_file(20 * _MIB)}, run_id="r")
    assert held["first"] in _held(device)


def test_content_linked_by_a_run_stays(
    make_virtual_device: MakeDevice, random_file: RandomFile
) -> None:
    _, device = make_virtual_device(storage_bytes=40 * _MIB)
    used = deploy(device, {"in/use": random_file(6 * _MIB)}, run_id="run")
    sha256 = used.files[0].sha256
    device.shell(f"touch -d @1500000000 {device.work_root}/store/.memo/{sha256}")
    held = _fill(device, random_file, "abc")
    with pytest.raises(DeviceFullError) as caught:
        deploy(device, {"new": random_file(30 * _MIB)}, run_id="r")
    assert caught.value.needed_bytes == 38 * _MIB
    assert caught.value.evictable_bytes == 18 * _MIB
    assert _held(device) == {sha256, *held.values()}, "nothing goes where it does not help"
    deploy(device, {"new": random_file(20 * _MIB)}, run_id="r")
    assert sha256 in _held(device)
    found = device.shell(["sha256sum", f"{used.run_dir}/in/use"]).stdout
    assert found.startswith(sha256)


def test_a_limit_for_the_store(make_virtual_device: MakeDevice, random_file: RandomFile) -> None:
    _, device = make_virtual_device()
    held = _fill(device, random_file, "abc")
    policy = EvictionPolicy(max_store_bytes=13 * _MIB)
    deployment = deploy(device, {"new": random_file(6 * _MIB)}, run_id="r", policy=policy)
    assert _held(device) == {held["c"], deployment.files[0].sha256}
    with pytest.raises(DeviceFullError) as caught:
        deploy(device, {"big": random_file(14 * _MIB)}, run_id="r2", policy=policy)
    assert caught.value.free_bytes == 1 * _MIB
    room = evict(device, EvictionPolicy(max_store_bytes=0))
    assert (room.met, room.evicted_files, room.evictable_bytes) == (False, 0, 6 * _MIB)
    remove_run(device, "r")
    room = evict(device, EvictionPolicy(max_store_bytes=0))
    assert (room.met, room.evicted_files, room.store_bytes) == (True, 2, 0)
    assert _held(device) == set()


def test_rubbish_of_the_dead_goes_where_room_lacks(
    make_virtual_device: MakeDevice, random_file: RandomFile
) -> None:
    _, device = make_virtual_device(storage_bytes=40 * _MIB)
    deploy(device, {"a": random_file(10)}, run_id="r1")
    partial = f"{device.work_root}/incoming/dead/partial"
    device.push(random_file(20 * _MIB), partial)
    device.shell(f"touch -d @1600000000 {partial}")
    deploy(device, {"b": random_file(20 * _MIB)}, run_id="r2")
    assert device.shell(f"ls -A {device.work_root}/incoming").stdout == ""


_DEPLOY_OFTEN = """
import random, sys
from pathlib import Path
from harness.deploy.deploy import deploy, remove_run
from harness.deploy.store import EvictionPolicy
from harness.devices.adb.discovery import open_device

device = open_device(sys.argv[1])
paths = [Path(path) for path in sys.argv[3:]]
for number in range(4):
    chosen = random.Random(f"{sys.argv[2]}-{number}").sample(paths, 3)
    run_id = f"{sys.argv[2]}-{number}"
    policy = EvictionPolicy(max_store_bytes=9 << 20)
    files = {path.name: path for path in chosen}
    run_dir = deploy(device, files, run_id=run_id, policy=policy).run_dir
    print(device.shell(f"cd {run_dir} && sha256sum *").stdout, end="")
    remove_run(device, run_id)
"""


def test_deployments_that_evict_at_the_same_time(
    make_virtual_device: MakeDevice, random_file: RandomFile
) -> None:
    """Each finds all its files in its run, although what fits is less than what all want."""
    _, device = make_virtual_device()
    paths = [random_file(_MIB) for _ in range(12)]
    expected = subprocess.run(["sha256sum", *paths], capture_output=True, text=True, check=True)
    right = {line.split()[0] for line in expected.stdout.splitlines()}
    running = [
        Started("-c", _DEPLOY_OFTEN, device.serial, name, *paths)
        for name in ("one", "two", "three")
    ]
    for process in running:
        output, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        found = [line.split()[0] for line in output.splitlines()]
        assert len(found) == 12
        assert set(found) <= right
    # Each asks for room for itself, so together they may pass the limit; nothing stays in use.
    evict(device, EvictionPolicy(max_store_bytes=9 << 20))
    assert store_usage(device).total_bytes <= 9 * _MIB
    assert device.shell(f"ls -A {device.work_root}/incoming").stdout == ""
