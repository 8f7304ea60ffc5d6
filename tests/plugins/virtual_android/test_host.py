"""Many devices in few processes, separate from each other."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buildlib.errors import BuildError
from harness.errors import VirtualDeviceError
from plugins.virtual_android.faults import parse_fault
from plugins.virtual_android.host import hosted_control, hosted_devices
from tests.command_line import Started
from tests.plugins.virtual_android.helpers import Adb, RunAndLose, new_marker, running
from tests.waiting import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosted")


@pytest.fixture(scope="module")
def serials(folder: Path, adb: Adb, connect: Callable[[str], None]) -> Iterator[list[str]]:
    with hosted_devices(5, "SM8650", folder, processes=2, unconfined=True) as found:
        for serial in found:
            connect(serial)
        yield found
    for serial in found:
        adb("disconnect", serial)


def test_each_has_a_folder_and_properties_of_its_own(
    folder: Path, serials: list[str], adb: Adb, tmp_path: Path
) -> None:
    assert len(set(serials)) == 5
    assert len(running(str(folder))) == 2
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    output = []
    for number, serial in enumerate(serials):
        to = f"/data/local/tmp/file{number}"
        assert adb("-s", serial, "push", tmp_path / "file", to).returncode == 0
        command = "ls $TMPDIR; getprop ro.soc.model; getprop ro.serialno; pwd"
        output.append(adb("-s", serial, "shell", command).stdout.decode().split())
    assert [lines[0] for lines in output] == [f"file{n}" for n in range(5)]
    assert {(lines[1], lines[3]) for lines in output} == {("SM8650", "/")}
    assert len({lines[2] for lines in output}) == 5


def test_a_fault_strikes_one_and_spares_its_neighbours(
    folder: Path, serials: list[str], adb: Adb, run_and_lose: RunAndLose
) -> None:
    first, second = serials[:2]
    marks = [new_marker() for _ in range(3)]
    daemon = "setsid sh -c 'setsid sleep {} & sleep {}' </dev/null >/dev/null 2>&1 &"
    adb("-s", first, "shell", daemon.format(marks[0], marks[1]))
    adb("-s", second, "shell", daemon.format(marks[2], marks[2]))
    wait_for(lambda: all(map(running, marks)))
    commands = hosted_control(folder, 0)
    commands.inject(parse_fault("power:off=inf,when=shell"))
    run_and_lose(first, "sleep 60")
    wait_for(lambda: commands.events()[-1].kind == "off")
    assert [bool(running(mark)) for mark in marks] == [False, False, True]
    assert adb("-s", second, "shell", "echo here").stdout == b"here\n"
    assert [event.kind for event in hosted_control(folder, 1).events()] == ["booted"]
    commands.power_on()
    wait_for(lambda: b"connected" in adb("connect", first).stdout)
    wait_for(lambda: adb("-s", first, "shell", "echo back").stdout == b"back\n")


def test_heat_counts_the_work_of_its_own_device(folder: Path, serials: list[str], adb: Adb) -> None:
    both = [hosted_control(folder, number) for number in (3, 4)]
    for commands in both:
        # With such a resistance it keeps the heat, however late it is looked at.
        commands.heat(
            temperature_c=25, idle_w=0, time_scale=100, resistance_k_per_w=1000, capacity_j_per_k=5
        )
    adb("-s", serials[3], "shell", "i=0; while [ $i -lt 60000 ]; do i=$((i + 1)); done")
    worked, rested = (commands.heat() for commands in both)
    assert worked is not None
    assert rested is not None
    assert worked.soc_c > 25.3
    assert rested.soc_c == pytest.approx(25)
    for commands in both:
        commands.heat_off()


def test_they_keep_files_and_ports_and_leave_nothing(
    tmp_path: Path, adb: Adb, connect: Callable[[str], None]
) -> None:
    mark = new_marker()
    with hosted_devices(1, "SM8750", tmp_path, processes=4, unconfined=True) as [serial]:
        connect(serial)
        leave = f"echo kept >$TMPDIR/kept; setsid sleep {mark} >/dev/null 2>&1 &"
        adb("-s", serial, "shell", leave)
        wait_for(lambda: running(mark))
    assert not running(mark)
    assert running(str(tmp_path)) == []
    with hosted_devices(1, "SM8750", tmp_path, unconfined=True) as [again]:
        assert again == serial
        connect(serial)
        wait_for(lambda: adb("-s", serial, "shell", "cat $TMPDIR/kept").stdout == b"kept\n")
    adb("disconnect", serial)


_THEIR_HOST = """
import os, sys
from pathlib import Path
from plugins.virtual_android.host import hosted_devices
with hosted_devices(2, "SM8750", Path(sys.argv[1]), unconfined=True) as serials:
    print(*serials, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_hosts_end_with_their_starter(tmp_path: Path) -> None:
    starter = Started("-c", _THEIR_HOST, tmp_path)
    output = starter.communicate(timeout=PATIENCE_S)
    assert starter.wait() == -signal.SIGKILL, output
    assert len(output[0].split()) == 2
    wait_for(lambda: running(str(tmp_path)) == [])


def test_a_failed_start_gives_its_reason(tmp_path: Path) -> None:
    with (
        pytest.raises(VirtualDeviceError, match="unconfined"),
        hosted_devices(1, "SM8750", tmp_path),
    ):
        pass
    with (
        pytest.raises(BuildError, match="unknown SoC"),
        hosted_devices(1, "SM1", tmp_path, unconfined=True),
    ):
        pass
    (tmp_path / "h000").mkdir()
    (tmp_path / "h000" / "device.json").write_text("{}")
    with (
        pytest.raises(VirtualDeviceError) as caught,
        hosted_devices(2, "SM8750", tmp_path, unconfined=True),
    ):
        pass
    assert "device.json" in str(caught.value)
    assert str(caught.value).isprintable()
    assert running(str(tmp_path)) == []
