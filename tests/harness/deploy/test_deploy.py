"""Deployment by content, on a virtual device behind the real adb server."""

import secrets
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.deploy.deploy import deploy, remove_run
from harness.deploy.deployment import DeployFile
from harness.deploy.scripts import installed_scripts
from harness.devices.device import Device
from harness.errors import DeviceCommandError, HostFileError
from tests.system import program

RandomFile = Callable[[int], Path]

_HOSTILE = 'sub dir/it\'s "a" $(name) `of` -ü 漢字 \\n *'


def _store(device: Device, sha256: str) -> str:
    return f"{device.work_root}/store/{sha256}"


def test_a_run_folder_is_links_into_the_store(
    virtual_device: Device, run_id: str, random_file: RandomFile
) -> None:
    data, program = random_file(100_001), random_file(0)
    program.write_text("#!/bin/sh\necho $1\n")
    seen: list[tuple[int, int]] = []
    deployment = deploy(
        virtual_device,
        {_HOSTILE: data, "again.bin": data, "bin/say": DeployFile(program, executable=True)},
        run_id=run_id,
        on_progress=lambda sent, total: seen.append((sent, total)),
    )
    run_dir = deployment.run_dir
    assert run_dir == f"{virtual_device.work_root}/runs/{run_id}"
    size = 100_001 + program.stat().st_size
    assert (deployment.pushed_bytes, deployment.reused_bytes) == (size, 0)
    assert seen[-1] == (size, size)
    first = deployment.files[0]
    assert (first.name, first.size, first.pushed) == (_HOSTILE, 100_001, True)
    found = virtual_device.shell(["sha256sum", f"{run_dir}/{_HOSTILE}", f"{run_dir}/again.bin"])
    assert found.stdout.count(first.sha256) == 2
    assert virtual_device.shell([f"{run_dir}/bin/say", "hello"]).stdout == "hello\n"
    link = virtual_device.shell(["readlink", f"{run_dir}/again.bin"]).stdout.strip()
    assert link == _store(virtual_device, first.sha256)
    incoming = virtual_device.shell(f"ls -A {virtual_device.work_root}/incoming").stdout
    assert incoming == ""


def test_the_second_deployment_pushes_nothing(
    virtual_device: Device, run_id: str, random_file: RandomFile
) -> None:
    files = {"a": random_file(70_000), "empty": random_file(0)}
    deploy(virtual_device, files, run_id=run_id)
    remove_run(virtual_device, run_id)
    second = deploy(virtual_device, files, run_id=run_id)
    assert second.pushed == ()
    assert (second.pushed_bytes, second.reused_bytes) == (0, 70_000)
    changed = deploy(virtual_device, {**files, "c": random_file(5)}, run_id=f"{run_id}.2")
    assert (changed.pushed, changed.pushed_bytes) == (("c",), 5)
    remove_run(virtual_device, f"{run_id}.2")


_TAMPERS = [
    "printf X | dd of=$F bs=1 seek=10 conv=notrunc 2>/dev/null",
    "printf X | dd of=$F bs=1 seek=10 conv=notrunc 2>/dev/null; touch -d @1600000000 $F",
    ": > $F",
    "rm $F",
    "rm $F; ln -s /etc/passwd $F",
    "rm $F; mkdir $F; echo x > $F/x",
]


def test_tampered_contents_are_detected_and_replaced(
    virtual_device: Device, run_id: str, random_file: RandomFile
) -> None:
    files = {f"{number}": random_file(50_000) for number in range(len(_TAMPERS))}
    hashes = {file.name: file.sha256 for file in deploy(virtual_device, files, run_id=run_id).files}
    remove_run(virtual_device, run_id)
    for number, tamper in enumerate(_TAMPERS):
        path = shlex.quote(_store(virtual_device, hashes[f"{number}"]))
        virtual_device.shell(f"F={path}; {tamper}")
    again = deploy(virtual_device, files, run_id=run_id)
    assert set(again.pushed) == set(files)
    lines = virtual_device.shell(f"cd {again.run_dir} && sha256sum *").stdout.splitlines()
    assert {line.split()[1]: line.split()[0] for line in lines} == hashes


def test_tampered_scripts_are_replaced(
    virtual_device: Device, run_id: str, random_file: RandomFile
) -> None:
    folder = deploy(virtual_device, {"a": random_file(1)}, run_id=run_id).scripts_dir
    virtual_device.shell(f"echo 'echo ok; exit 0' > {folder}/verify.sh; rm {folder}/link.sh")
    remove_run(virtual_device, run_id)
    deploy(virtual_device, {"a": random_file(1)}, run_id=run_id)
    found = virtual_device.shell(f"cd {folder} && sha256sum *.sh").stdout
    assert {line.split()[1]: line.split()[0] for line in found.splitlines()} == dict(
        installed_scripts().hashes
    )


@pytest.mark.parametrize(
    "name",
    ["", "/etc/x", "../x", "a/../x", "a//b", "./a", "a\nb", ".qnnfarm/marker", "a/" + "x" * 256,
     "x/" * 512 + "x", "\ud800"],
)  # fmt: skip
def test_names_that_leave_the_run_folder(
    virtual_device: Device, random_file: RandomFile, name: str
) -> None:
    with pytest.raises(HostFileError, match="inside a run folder"):
        deploy(virtual_device, {name: random_file(1)}, run_id="never")


def test_a_run_that_exists_is_not_touched(
    virtual_device: Device, run_id: str, random_file: RandomFile
) -> None:
    deployment = deploy(virtual_device, {"a": random_file(1)}, run_id=run_id)
    with pytest.raises(DeviceCommandError, match="is there already"):
        deploy(virtual_device, {"b": random_file(1)}, run_id=run_id)
    assert virtual_device.shell(["ls", deployment.run_dir]).stdout == "a\n"


@pytest.mark.parametrize("bad", ["", "../x", "a b", "$(reboot)"])
def test_run_ids_that_are_none(virtual_device: Device, random_file: RandomFile, bad: str) -> None:
    with pytest.raises(DeviceCommandError, match="not a run id"):
        deploy(virtual_device, {"a": random_file(1)}, run_id=bad)


def _commands(device: Device) -> set[str]:
    """The command lines of what runs there."""
    return set(device.shell("ps -eo args").stdout.splitlines())


def test_removing_a_run_ends_what_runs_in_it(
    virtual_device: Device, run_id: str, random_file: RandomFile
) -> None:
    program("ps")  # the device's own, where it has no toybox
    deployment = deploy(virtual_device, {"a": random_file(1)}, run_id=run_id)
    mark = f"sleep {10**6 + secrets.randbelow(10**6)}.25"
    run = f"sh {deployment.scripts_dir}/run.sh {deployment.run_dir} 3600 log -- {mark}"
    virtual_device.shell(f"{run} >/dev/null 2>&1 </dev/null &")
    while mark not in _commands(virtual_device):
        time.sleep(0.05)
    remove_run(virtual_device, run_id)
    assert mark not in _commands(virtual_device)
    assert run_id not in virtual_device.shell(f"ls {virtual_device.work_root}/runs").stdout
    remove_run(virtual_device, run_id)
