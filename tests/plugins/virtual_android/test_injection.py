"""Faults as `adb` sees them, and their events."""

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import adbutils
import pytest

from harness.deploy.scripts import intact
from harness.devices.device import Device
from harness.devices.spec import DeviceSpec
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from plugins.virtual_android import manager
from plugins.virtual_android.events import EventFile, EventLog, LoggedEvent
from plugins.virtual_android.faults import parse_fault
from plugins.virtual_android.injection import Effects, Injector
from plugins.virtual_android.manager import VirtualDevice
from plugins.virtual_android.namespace import NamespaceKind
from tests.plugins.virtual_android.helpers import Adb, RunAndLose, Worker
from tests.waiting import PATIENCE_S, wait_for

_TO = "/data/local/tmp/file"
_RUN = "sh run.sh folder 9 log -- true; sleep 60"
"""A run for the device, although the script is missing."""


@pytest.fixture(scope="module")
def struck(start_device: Callable[..., VirtualDevice]) -> VirtualDevice:
    return start_device("struck")


@pytest.fixture
def on_struck(struck: VirtualDevice, adb: Adb) -> Iterator[Adb]:
    def run(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return adb("-s", struck.serial, *arguments, stdin=stdin)

    yield run
    manager.control(struck.name).clear()
    wait_for(lambda: _answers(struck, adb))


def _answers(device: VirtualDevice, adb: Adb) -> bool:
    adb("connect", device.serial)
    return adb("-s", device.serial, "shell", "echo here").stdout == b"here\n"


def _inject(device: VirtualDevice, *texts: str) -> None:
    manager.control(device.name).inject(*map(parse_fault, texts))


def _strikes(device: VirtualDevice) -> list[LoggedEvent]:
    events = manager.control(device.name).events()
    last_armed = max(index for index, event in enumerate(events) if event.kind == "armed")
    return [event for event in events[last_armed:] if event.kind == "struck"]


def test_a_drop_breaks_a_push_and_strikes_once(
    struck: VirtualDevice, on_struck: Adb, adb: Adb, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    _inject(struck, "drop:bytes=1000000,when=push")
    before = time.time()
    assert on_struck("push", tmp_path / "file", _TO).returncode != 0
    wait_for(lambda: _answers(struck, adb))
    assert on_struck("shell", "ls $TMPDIR").stdout == b""
    [event] = _strikes(struck)
    assert event.fault == "drop:bytes=1000000,when=push"
    assert before <= event.at <= time.time()
    assert event.detail.endswith("/data/local/tmp/file")
    assert on_struck("push", tmp_path / "file", _TO).returncode == 0
    assert manager.control(struck.name).faults() == ()
    on_struck("shell", "rm $TMPDIR/file")


def test_a_shell_is_dropped_and_leaves_nothing(
    struck: VirtualDevice, on_struck: Adb, adb: Adb, run_and_lose: RunAndLose
) -> None:
    _inject(struck, "drop:bytes=100,when=shell")
    babble = "echo $$ >$TMPDIR/pid; while :; do echo something; done"
    run_and_lose(struck.serial, babble)
    wait_for(lambda: _answers(struck, adb))
    alive = 'read -r pid <$TMPDIR/pid; kill -0 "$pid" 2>/dev/null && echo alive; rm -f $TMPDIR/pid'
    wait_for(lambda: on_struck("shell", alive.partition("; rm")[0]).stdout == b"")
    on_struck("shell", "rm $TMPDIR/pid")


def test_a_stall_for_ever_ends_by_command(struck: VirtualDevice, on_struck: Adb, adb: Adb) -> None:
    _inject(struck, "stall:when=shell")
    with subprocess.Popen(
        [adbutils.adb_path(), "-s", struck.serial, "shell", "echo at-last"], stdout=subprocess.PIPE
    ) as waiting:
        wait_for(lambda: len(_strikes(struck)) == 1)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.3)
        manager.control(struck.name).clear()
        assert waiting.communicate(timeout=PATIENCE_S)[0] == b"at-last\n"


def test_the_second_file_is_corrupted_repeatably(
    struck: VirtualDevice, on_struck: Adb, tmp_path: Path
) -> None:
    right = bytes(range(256)) * 100
    (tmp_path / "file").write_bytes(right)
    received = []
    for _ in range(2):
        _inject(struck, "corrupt:file=2,flips=3,seed=5")
        for number in range(3):
            assert on_struck("push", tmp_path / "file", f"{_TO}{number}").returncode == 0
        files = [on_struck("exec-out", f"cat $TMPDIR/file{n}").stdout for n in range(3)]
        assert (files[0], files[2]) == (right, right)
        assert len(files[1]) == len(right)
        differing = [a ^ b for a, b in zip(files[1], right, strict=True) if a != b]
        assert len(differing) == 3
        assert all(bit.bit_count() == 1 for bit in differing)
        received.append(files[1])
    assert received[0] == received[1]
    on_struck("shell", "rm $TMPDIR/file*")


def test_a_full_device_refuses_pushes_until_files_are_deleted(
    struck: VirtualDevice, on_struck: Adb, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    assert on_struck("push", tmp_path / "file", f"{_TO}1").returncode == 0
    _inject(struck, "full:free=500000")
    refused = on_struck("push", tmp_path / "file", f"{_TO}2")
    assert b"No space left on device" in refused.stdout + refused.stderr
    assert len(_strikes(struck)) == 1
    free = int(on_struck("shell", "df -k /data/local/tmp").stdout.split()[-3])
    assert free <= 500
    on_struck("shell", "rm $TMPDIR/file1")
    assert on_struck("push", tmp_path / "file", f"{_TO}2").returncode == 0
    manager.control(struck.name).clear()
    assert on_struck("push", tmp_path / "file", f"{_TO}1").returncode == 0
    on_struck("shell", "rm $TMPDIR/file*")


def test_a_full_disk_is_a_write_error_and_kills_nothing(
    struck: VirtualDevice, on_struck: Adb
) -> None:
    _inject(struck, "full:free=0")
    done = on_struck("shell", "echo text >$TMPDIR/file; echo $?; dd if=/dev/zero of=$TMPDIR/file")
    assert done.stdout == b"1\n"
    assert done.returncode == 1
    assert b"File too large" in done.stderr
    on_struck("shell", "rm $TMPDIR/file")


def test_a_reboot_in_the_middle_of_a_run(
    struck: VirtualDevice, on_struck: Adb, adb: Adb, run_and_lose: RunAndLose
) -> None:
    _inject(struck, "reboot:after=0.2,when=run")
    before = on_struck("shell", "getprop ro.runtime.firstboot").stdout
    run_and_lose(struck.serial, _RUN)
    wait_for(lambda: _answers(struck, adb))
    assert on_struck("shell", "getprop ro.runtime.firstboot").stdout != before
    assert on_struck("shell", "getprop ro.boot.bootreason").stdout == b"reboot\n"
    assert [event.fault for event in _strikes(struck)] == ["reboot:after=0.2,when=run"]


def test_a_power_cut_loses_what_was_not_synced(
    struck: VirtualDevice, on_struck: Adb, adb: Adb, run_and_lose: RunAndLose
) -> None:
    synced = str(struck.root / "state" / "synced")
    if struck.namespace is not NamespaceKind.NONE:
        synced = "/.device/state/synced"
    # File times have the grain of the kernel's clock tick.
    write = f"until [ fresh -nt {synced} ]; do echo lost >fresh; done"
    on_struck("shell", f"cd $TMPDIR; echo kept >synced; sync; {write}")
    _inject(struck, "power:off=inf,unsynced=60,when=run")
    run_and_lose(struck.serial, _RUN)
    wait_for(lambda: manager.control(struck.name).events()[-1].kind == "off")
    assert b"connected to" not in adb("connect", struck.serial).stdout
    manager.control(struck.name).power_on()
    wait_for(lambda: _answers(struck, adb))
    output = on_struck(
        "shell", "cat $TMPDIR/synced; wc -c <$TMPDIR/fresh; getprop ro.boot.bootreason"
    )
    assert output.stdout.split() == [b"kept", b"0", b"power"]
    assert manager.control(struck.name).events()[-2].detail == "lost local/tmp/fresh"
    on_struck("shell", "rm $TMPDIR/*")


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_the_runner_is_struck_and_its_shell_is_not(
    struck: VirtualDevice, on_struck: Adb, signal: str
) -> None:
    _inject(struck, f"runner:signal={signal},match=61.5")
    script = "sh run.sh folder 9 log -- true; sleep 61.5 & pid=$!; "
    if signal == "KILL":
        done = on_struck("shell", f"{script} wait $pid; echo ended $?")
        assert done.stdout == b"ended 137\n"
    else:
        look = "while ! grep -q 'State:.T' /proc/$pid/status; do sleep 0.05; done"
        done = on_struck("shell", f"{script} {look}; echo hangs; kill -9 $pid")
        assert done.stdout == b"hangs\n"
    [event] = _strikes(struck)
    assert event.fault.startswith(f"runner:signal={signal}" if signal == "STOP" else "runner:")


def test_a_babbling_device_prints_garbage_for_matching_commands(
    struck: VirtualDevice, on_struck: Adb
) -> None:
    _inject(struck, "babble:bytes=70000,match=uptime,count=always")
    for _ in range(2):
        said = on_struck("shell", "echo uptime")
        assert (len(said.stdout), said.returncode) == (70000, 0)
    assert on_struck("shell", "echo other").stdout == b"other\n"
    assert len(_strikes(struck)) == 2


def test_throttled_processes_get_their_share_of_a_processor(
    struck: VirtualDevice, on_struck: Adb
) -> None:
    worker = Worker(lambda line: on_struck("shell", line))
    assert not worker.is_stopped()
    _inject(struck, "throttle:factor=10")
    assert len(manager.control(struck.name).faults()) == 1
    wait_for(worker.is_stopped)
    assert worker.speed() < 0.15
    manager.control(struck.name).clear()
    wait_for(lambda: not worker.is_stopped())
    worker.end()


def test_sync_saves_the_files_that_it_is_given(
    struck: VirtualDevice, on_struck: Adb, adb: Adb, run_and_lose: RunAndLose
) -> None:
    script = (
        "cd $TMPDIR; for name in one two three; do echo $name >$name; done; sync one two;"
        " mv one moved; echo more >>two"
    )
    assert on_struck("shell", script).returncode == 0
    assert b"No such file" in on_struck("shell", "sync $TMPDIR/no").stderr
    _cut_power(struck, adb, run_and_lose)
    sizes = on_struck("shell", "cd $TMPDIR; wc -c moved two three | head -3").stdout.split()
    assert sizes == [b"4", b"moved", b"0", b"two", b"0", b"three"]
    on_struck("shell", "rm $TMPDIR/*")


@pytest.mark.variant
def test_files_of_an_earlier_boot_survive_a_power_cut(
    struck: VirtualDevice, on_struck: Adb, adb: Adb, run_and_lose: RunAndLose
) -> None:
    on_struck("shell", "echo kept >$TMPDIR/kept; reboot; sleep 60")
    wait_for(lambda: _answers(struck, adb))
    _cut_power(struck, adb, run_and_lose)
    assert on_struck("shell", "cat $TMPDIR/kept").stdout == b"kept\n"
    on_struck("shell", "rm $TMPDIR/*")


def _cut_power(device: VirtualDevice, adb: Adb, run_and_lose: RunAndLose) -> None:
    _inject(device, "power:off=0.1,unsynced=600,when=run")
    run_and_lose(device.serial, _RUN)
    wait_for(lambda: _answers(device, adb))


class StallRecorder:
    """Effects that only record a stall."""

    frozen = False

    def stall(self) -> None:
        self.frozen = True

    def resume(self) -> None:
        self.frozen = False

    def limit_free(self, free: int | None) -> None: ...

    def throttle(self, factor: float) -> None: ...


async def _pass(injector: Injector, kind: str) -> None:
    async with injector.activity(kind):
        pass


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    file = EventFile(tmp_path)
    yield EventLog(file.write, lambda _: None)
    file.close()


def test_the_end_of_one_stall_does_not_end_another(events: EventLog) -> None:
    """A reboot ended the first before its time; the second is to last until it is cleared."""

    async def play() -> None:
        effects = StallRecorder()
        injector = Injector(cast("Effects", effects), events)
        injector.arm(parse_fault("stall:seconds=0.2,when=push"))
        first = asyncio.create_task(_pass(injector, "push"))
        await asyncio.sleep(0)
        assert effects.frozen
        injector.release()
        await first
        injector.arm(parse_fault("stall:when=shell"))
        second = asyncio.create_task(_pass(injector, "shell"))
        await asyncio.sleep(0.5)
        assert effects.frozen
        assert not second.done()
        injector.clear()
        await second
        assert not effects.frozen

    asyncio.run(play())


def test_a_stall_lasts_for_its_seconds(events: EventLog) -> None:
    async def play() -> None:
        effects = StallRecorder()
        injector = Injector(cast("Effects", effects), events)
        injector.arm(parse_fault("stall:seconds=0.05,count=2"))
        for _ in range(2):
            await _pass(injector, "push")
            assert not effects.frozen

    asyncio.run(play())


def test_a_fault_of_runs_spares_claims(
    make_virtual_device: Callable[..., tuple[VirtualDevice, Device]],
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
            assert len(_strikes(virtual)) == 0
            run = ["sh", f"{scripts}/run.sh", "-o", "out", run_dir, "20", "log", "--", "echo", "x"]
            assert "exit=0" in device.shell(run).stdout
            assert len(_strikes(virtual)) == 1
    assert len(manager.control(virtual.name).faults()) == 1  # it is slow until it is cleared
