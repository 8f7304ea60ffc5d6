"""Pools of real virtual devices behind the real adb server."""

import os
import pwd
import secrets
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.base import CommandResult
from harness.devices.device import Device
from harness.devices.spec import DeviceSpec
from harness.errors import (
    DeviceCommandError,
    DeviceTimeoutError,
    HostUnreachableError,
    LeaseLostError,
    LeaseTimeoutError,
    PoolError,
    PromptTooLongError,
    RequirementError,
    RunnerError,
    UnknownMemberError,
)
from harness.pool.config import DeviceEntry, PoolConfig, parse_config
from harness.pool.lease import Lease, LeasedDevice
from harness.pool.members import Member
from harness.pool.opener import Opener
from harness.pool.pool import Pool
from harness.pool.records import Facts, FenceRecord
from harness.pool.requirement import Requirement
from harness.pool.states import MemberState
from plugins.virtual_android import manager
from plugins.virtual_android.faults import ALWAYS, Stall
from plugins.virtual_android.folder import DeviceRecord, new_record
from tests.command_line import Started
from tests.harness.pool.conftest import close

ANY = Requirement()
OpenPool = Callable[..., Pool]


@pytest.fixture
def names(two_devices: tuple[manager.VirtualDevice, ...]) -> tuple[str, str]:
    first, second = two_devices
    return first.name, second.name


@pytest.fixture
def open_pool(names: tuple[str, str], tmp_path: Path) -> Iterator[OpenPool]:
    """Opens pools that share a ledger of the test's own."""
    opened = []

    def make(config: str = "", *, count: int = 2, ledger: Path | None = None) -> Pool:
        loaded = parse_config(config)
        members = [
            Member(name, DeviceSpec("virtual", name), frozenset({f"tag{number}", "all"}))
            for number, name in enumerate(names[:count])
        ]
        pool = Pool(members, loaded, Opener(loaded), ledger=ledger or tmp_path / "pool.db")
        opened.append(pool)
        return pool

    yield make
    for pool in opened:
        close(pool)


@pytest.fixture
def pool(open_pool: OpenPool) -> Pool:
    return open_pool()


def count_marked(device: Device, mark: str) -> int:
    """Count the processes on a device that carry the mark of a lease."""
    script = f"grep -lsF lease:{mark} /proc/[0-9]*/environ | wc -l"
    return int(device.shell(script, check=False).stdout)


def states(pool: Pool) -> list[str]:
    return [member.state.value for member in pool.members()]


def test_a_lease_is_a_device_for_one_holder(pool: Pool, open_pool: OpenPool) -> None:
    wanted = Requirement(soc="SM8750", hexagon="v79", type="virtual", tags=frozenset({"tag0"}))
    with pool.acquire(wanted, timeout_s=60, purpose="a test") as lease:
        device = lease.device
        assert device.shell(["echo", "a b"]).stdout == "a b\n"
        assert device.type == "virtual"
        first = pool.members()[0]
        assert (first.state, first.token) == (MemberState.LEASED, lease.token)
        assert first.holder.endswith(f"(pid {os.getpid()}): a test")
        assert first.name == device.member
        with pytest.raises(LeaseTimeoutError, match="a test") as caught:
            open_pool().acquire(wanted, timeout_s=0.1)
        assert str(caught.value).isprintable()
    assert states(pool) == ["ready", "ready"]
    with pytest.raises(LeaseLostError, match="it was released"):
        device.shell("true")
    lease.release()


def test_one_device_under_two_names_is_leased_once(
    names: tuple[str, str], adb_server: AdbServer
) -> None:
    serial = manager.get(names[0]).serial
    with (
        Pool.of([DeviceSpec("virtual", names[0])]) as by_name,
        Pool.of([DeviceSpec("android", serial)]) as by_serial,
        by_name.acquire(ANY, timeout_s=60),
        pytest.raises(LeaseTimeoutError),
    ):
        by_serial.acquire(ANY, timeout_s=0.1)
    with (
        Pool.of([DeviceSpec("virtual", names[0]), DeviceSpec("android", serial)]) as both,
        pytest.raises(RequirementError, match="one and the same"),
    ):
        both.acquire(Requirement(count=2), timeout_s=1)


def test_two_devices_with_one_serial_number_do_not_share_an_entry(
    adb_server: AdbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(name: str, soc: str, size: int | None, *, unconfined: bool) -> DeviceRecord:
        record = new_record(name, soc, size, unconfined=unconfined)
        return replace(record, serial_number="SAME4711")

    monkeypatch.setattr(manager, "new_record", drawn)
    names = [f"twin{number}{secrets.token_hex(3)}" for number in range(2)]
    serials = [manager.start(name, "SM8750").serial for name in names]
    try:
        for serial in serials:
            adb_server.connect(serial)
        members = [
            Member(name, DeviceSpec("android", serial))
            for name, serial in zip("ab", serials, strict=True)
        ]

        def states() -> dict[str, str]:
            opener = Opener(PoolConfig())
            with Pool(members, PoolConfig(), opener, ledger=tmp_path / "pool.db") as pool:
                return {status.name: status.reason for status in pool.probe()}

        with closing(Opener(PoolConfig())) as opener:
            found = opener.discover(DeviceEntry(discover="adb"))
        assert {DeviceSpec("virtual", name) for name in names} <= {*found}, "by name, not by port"
        before = states()
        (absent,) = (name for name, reason in before.items() if "SAME4711" in reason)
        (ready,) = {"a", "b"} - {absent}
        assert f"is also that of {ready}" in before[absent]
        assert states() == before
        manager.stop(names["ab".index(ready)])
        assert "SAME4711" not in states()[absent]
    finally:
        for name, serial in zip(names, serials, strict=True):
            manager.remove(name)
            adb_server.disconnect(serial)


def test_several_devices_all_or_none(pool: Pool) -> None:
    with pool.acquire(Requirement(count=2), timeout_s=60) as lease:
        assert {device.shell("echo x").stdout for device in lease.devices} == {"x\n"}
        assert len({device.serial for device in lease.devices}) == 2
        assert states(pool) == ["leased", "leased"]
    with (
        pool.acquire(Requirement(tags=frozenset({"tag1"})), timeout_s=60),
        pytest.raises(LeaseTimeoutError),
    ):
        pool.acquire(Requirement(count=2), timeout_s=0.2)
    assert states(pool) == ["ready", "ready"]
    with pytest.raises(RequirementError, match="there are 2"):
        pool.acquire(Requirement(count=3))


def test_threads_of_a_process_wait_for_each_other(open_pool: OpenPool) -> None:
    pool = open_pool(count=1)
    inside, worst = [], []

    def work() -> None:
        with pool.acquire(ANY, timeout_s=240) as lease:
            inside.append(lease.token)
            worst.append(len(inside))
            lease.device.shell("true")
            inside.remove(lease.token)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == [1] * 5


class _Sleeper:
    """A lease whose holder slept and has not noticed its loss."""

    def check(self) -> None:
        pass

    def check_ledger(self, key: str) -> None:
        pass

    def lose_device(self, device: LeasedDevice, refusal: str) -> LeaseLostError:
        return LeaseLostError("sleeper", 0, device.fence.describe_loss(refusal, 0))


def asleep(device: LeasedDevice) -> LeasedDevice:
    return LeasedDevice(device.fence, cast("Lease", _Sleeper()))


def test_a_late_holder_is_refused_by_the_device(open_pool: OpenPool, tmp_path: Path) -> None:
    old, new = open_pool(count=1), open_pool(count=1)
    late = old.acquire(ANY, timeout_s=60)
    device = asleep(late.device)
    root = device.work_root
    device.shell(["mkdir", "-p", f"{root}/late"])
    local = tmp_path / "file"
    local.write_bytes(b"x" * 1000)
    assert new.admin.release(late.device.member)
    with new.acquire(ANY, timeout_s=60) as lease:
        assert lease.token > late.token
        said: list[bytes] = []
        for touch in (
            lambda: device.shell(f"echo late >{root}/late/shell"),
            lambda: device.stream("echo late", on_output=said.append, timeout_s=20),
            lambda: device.push(local, f"{root}/late/push"),
            lambda: device.push_many([]),
            lambda: device.forward("tcp:1"),
            device.reboot,
        ):
            with pytest.raises(LeaseLostError, match="went to another"):
                touch()
        assert b"late" not in b"".join(said)
        with pytest.raises(LeaseLostError, match=r"\(pid \d+\) took it back, at \d\d:"):
            late.device.shell("true")
        assert lease.device.shell(["ls", f"{root}/late"]).stdout == ""
        boot = lease.device.boot_id()
        late.release()
        assert old.ledger.holds(lease.grant, lease.device.key)
        assert lease.device.boot_id() == boot


_HOLDER = """
import sys
from harness.errors import LeaseLostError
from harness.pool.requirement import Requirement
from tests.harness.pool.conftest import pool_of

name, ledger, ttl = sys.argv[1:]
pool = pool_of("virtual:" + name, ledger, "lease: {ttl_s: " + ttl + "}")
lease = pool.acquire(Requirement(), timeout_s=60, purpose="holder")
device = lease.device
device.shell("mkdir -p " + device.work_root + "/runs/held")
print(lease.token, flush=True)
if sys.stdin.readline().strip() == "run":
    device.shell("echo started >" + device.work_root + "/started; sleep 120", timeout_s=200)
try:
    device.shell("echo late >" + device.work_root + "/late-write")
    print("wrote", flush=True)
except LeaseLostError as error:
    print("lost", flush=True)
"""


_LONG_S = 3600
"""No test waits for so long; however slow the machine is, no heartbeat is late."""


def let_pass(ledger: Path, seconds: float) -> None:
    """Let all leases age by so many seconds."""
    with closing(sqlite3.connect(ledger)) as db, db:
        db.execute("UPDATE pool_leases SET beat = beat - ?", (seconds,))


def hold(name: str, ledger: Path, ttl: int) -> Started:
    return Started("-c", _HOLDER, name, ledger, str(ttl))


def test_a_suspended_holder_loses_the_device_and_finds_out(
    names: tuple[str, str], open_pool: OpenPool, tmp_path: Path
) -> None:
    holder = hold(names[0], tmp_path / "pool.db", _LONG_S)
    assert holder.stdout is not None
    token = int(holder.stdout.readline())
    pool = open_pool(count=1)
    os.kill(holder.pid, signal.SIGSTOP)
    let_pass(tmp_path / "pool.db", _LONG_S)
    with pool.acquire(ANY, timeout_s=60) as lease:
        assert lease.token > token
        assert lease.device.shell(["ls", f"{lease.device.work_root}/runs"]).stdout == ""
        os.kill(holder.pid, signal.SIGCONT)
        said, _ = holder.communicate("go\n", timeout=200)
        assert said == "lost\n"
        gone = f"[ ! -e {lease.device.work_root}/late-write ]"
        assert lease.device.shell(gone).exit_status == 0


def test_kill_9_frees_the_device_and_ends_what_ran_on_it(
    names: tuple[str, str], open_pool: OpenPool, tmp_path: Path
) -> None:
    holder = hold(names[0], tmp_path / "pool.db", _LONG_S)
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdout.readline()
    holder.stdin.write("run\n")
    holder.stdin.flush()
    device = Opener(PoolConfig()).open(Member("x", DeviceSpec("virtual", names[0])))
    started = f"until [ -e {device.work_root}/started ]; do sleep 0.1; done"
    device.shell(f"{started}; rm {device.work_root}/started", timeout_s=120)
    holder.kill()
    holder.communicate()
    with open_pool(count=1).acquire(ANY, timeout_s=60) as lease:
        assert count_marked(lease.device.unleased, f"{lease.device.fence.id}.") == 0


def test_a_wiped_device_is_known_again(open_pool: OpenPool) -> None:
    pool = open_pool(count=1)
    with pool.acquire(ANY, timeout_s=60) as lease:
        device, root = lease.device.unleased, lease.device.work_root
        before = lease.device.fence.id
        device.shell(["rm", "-rf", root])
        with pytest.raises(LeaseLostError):
            lease.device.shell("true")
    with pool.acquire(ANY, timeout_s=60) as lease:
        assert lease.device.fence.id != before
        assert lease.device.shell("echo y").stdout == "y\n"


def test_a_device_claimed_before_is_claimed_in_one_command(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_pool(count=1).acquire(ANY, timeout_s=60) as lease:
        assert lease.device.shell("echo used").stdout == "used\n"
    asked: list[object] = []
    shell = Device.shell

    def counted(device: Device, command: str, **options: object) -> CommandResult:
        asked.append(command)
        return shell(device, command, **options)  # type: ignore[arg-type]

    other = open_pool(count=1)
    monkeypatch.setattr(Device, "shell", counted)
    with other.acquire(ANY, timeout_s=60) as lease:
        assert len(asked) == 1
        assert lease.device.work_root == lease.device.unleased.work_root


def test_changed_scripts_are_found_before_they_run(open_pool: OpenPool) -> None:
    pool = open_pool(count=1)
    with pool.acquire(ANY, timeout_s=60) as lease:
        device, root = lease.device.unleased, lease.device.work_root
        script = f"{lease.device.fence.scripts}/fence.sh"
        device.shell(f"echo ': >{root}/owned' >>{script}")
    with pool.acquire(ANY, timeout_s=60) as lease:
        assert "owned" not in device.shell(["ls", root]).stdout
        assert "owned" not in device.shell(["cat", script]).stdout


def test_only_a_lease_that_used_nothing_is_quiet(open_pool: OpenPool) -> None:
    pool = open_pool(count=1)
    with pool.acquire(ANY, timeout_s=60) as lease:
        key, quiet = lease.device.key, f"{lease.token}-{lease.grant}"
    assert pool.ledger.fence_of(key).quiet == quiet
    with pool.acquire(ANY, timeout_s=60) as used:
        used.device.shell("setsid sleep 73 >/dev/null 2>&1 &")
    assert pool.ledger.fence_of(key).quiet == quiet
    with pool.acquire(ANY, timeout_s=60) as lease:
        mark = f"{lease.device.fence.id}.{used.token}-"
        assert count_marked(lease.device.unleased, mark) == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_cannot_use_the_lease(open_pool: OpenPool) -> None:
    with open_pool(count=1).acquire(ANY, timeout_s=60) as lease:
        child = os.fork()
        if not child:
            try:
                lease.device.shell("true")
            except LeaseLostError as error:
                os._exit("forked" in error.reason)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert lease.device.shell("echo mine").stdout == "mine\n"


def test_a_waiting_request_keeps_its_place_until_it_is_cancelled(open_pool: OpenPool) -> None:
    pool = open_pool(count=1)
    given_up = threading.Event()

    def wait() -> str:
        try:
            pool.acquire(ANY, cancelled=given_up.is_set)
        except LeaseTimeoutError as error:
            return str(error)
        return "granted"

    with pool.acquire(ANY, timeout_s=60, purpose="first"), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        while not pool.ledger.waiting():
            time.sleep(0.01)
        given_up.set()
        assert "first" in waiting.result(timeout=200)
    assert pool.ledger.waiting() == []
    assert states(pool) == ["ready"]


def test_errors_of_the_holder_do_not_count(open_pool: OpenPool) -> None:
    pool = open_pool(count=1)
    for _ in range(3):
        with pytest.raises(DeviceCommandError) as caught, pool.acquire(ANY, timeout_s=60) as lease:
            lease.device.shell("exit 3")
        assert caught.value.command == "exit 3"
    with pool.acquire(ANY, timeout_s=60) as lease:
        lease.report(PromptTooLongError(10, 5, 3, 8))
    assert (states(pool), pool.members()[0].failures) == (["ready"], ())


def test_a_script_that_hangs_is_ended_and_does_not_count_against_a_device_that_answers(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.pool.lease._PROBE_S", 300.0)  # however slow the machine is
    pool = open_pool(count=1)
    for _ in range(4):
        with pytest.raises(DeviceTimeoutError), pool.acquire(ANY, timeout_s=60) as lease:
            lease.device.shell("setsid sleep 73", timeout_s=0.5)
    assert count_marked(lease.device.unleased, f"{lease.device.fence.id}.") == 0
    (member,) = pool.members()
    assert (member.state, member.failures) == (MemberState.READY, ())
    told = [e.text for e in pool.history(member.name) if e.what.startswith("not counted: ")]
    assert len(told) == 4
    assert all("`setsid sleep 73` took longer" in text for text in told)
    assert all("; the device answered a probe within" in text for text in told)


def test_a_device_that_hangs_counts(
    open_pool: OpenPool, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.pool.lease._PROBE_S", 0.5)
    monkeypatch.setattr("harness.pool.lease._ASK_S", 0.2)
    monkeypatch.setattr("harness.devices.device._KILL_TIMEOUT_S", 0.2)
    pool = open_pool(count=1)
    with pool.acquire(ANY, timeout_s=60) as lease:
        manager.control(names[0]).inject(Stall(when="shell", count=ALWAYS))
        try:
            with pytest.raises(DeviceTimeoutError) as caught:
                lease.device.shell("sleep 73", timeout_s=0.5)
            lease.report(caught.value)
        finally:
            manager.control(names[0]).clear()
    (told,) = [e.text for e in pool.history(names[0]) if e.what == "counted: DeviceTimeoutError"]
    assert told.endswith("; it weighs 1")
    assert pool.members()[0].weight == 1
    assert pool.members()[0].state is MemberState.RECOVERING
    assert pool.admin.recover(names[0]) is MemberState.READY


def test_errors_name_our_own_actions_on_a_device(open_pool: OpenPool) -> None:
    pool = open_pool(count=1)
    with pool.acquire(ANY, timeout_s=60) as lease:
        device, root = lease.device.unleased, lease.device.work_root
        ours = f"sh {lease.device.fence.scripts}/verify.sh {root}"
        with pytest.raises(DeviceCommandError) as caught:
            lease.device.shell(f"{ours} /nowhere/at/all; exit 9")
        assert caught.value.command == "checking its files"
        named = f"device {lease.device.member} ({lease.device.serial}): checking its files failed"
        assert str(caught.value).startswith(named)
        failure = RunnerError(lease.device.serial, "genie", "crashed", 139, "")
        lease.report(failure)
        assert str(failure).startswith(f"device {lease.device.member} ({lease.device.serial}): ")
    device.shell(f"mv {root}/fence {root}/kept; echo >{root}/fence")
    try:
        with pytest.raises(LeaseTimeoutError):
            pool.acquire(ANY, timeout_s=0.5)
        told = [e.text for e in pool.history(pool.members()[0].name)]
    finally:
        close(pool)  # its repairs connect to the device anew
        device.shell(f"rm -f {root}/fence; mv {root}/kept {root}/fence", timeout_s=200)
    assert any("claiming its lease" in text for text in told), told
    assert not [text for text in told if ".sh" in text or "exec" in text]


def test_failures_name_a_device_by_its_name_in_the_pool(
    open_pool: OpenPool, names: tuple[str, str]
) -> None:
    pool = open_pool()
    device = pool.members()[0]
    key, other = (pool.ledger.keys_of([str(m.spec)])[str(m.spec)] for m in pool.members())
    # Since it was last seen, another device took its place.
    pool.ledger.record_found(other, names[0], str(device.spec), Facts("SM8750", "v79"))
    pool.ledger.set_fence(other, FenceRecord())
    with pool.acquire(Requirement(name=names[0]), timeout_s=60) as lease:
        assert lease.device.key == key
    (told,) = [e.text for e in pool.ledger.history(other) if "no adb device" in e.text]
    assert f"no adb device '{names[0]}'" in told
    assert "hardware:" not in told
    assert key.removeprefix("hardware:") in told


def test_quarantine_ends_with_a_probation_run(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.pool.upkeep._BYTES", 100_000)
    pool = open_pool("quarantine: {backoff_s: 1000}", count=1)
    for _ in range(3):
        with pool.acquire(ANY, timeout_s=60) as lease:
            lease.report(RunnerError(lease.device.serial, "genie", "crashed", 139, ""))
    (member,) = pool.members()
    assert member.state is MemberState.QUARANTINED
    assert (len(member.failures), member.weight, member.limit) == (3, 3.0, 3.0)
    passing = pool.upkeep.probation

    def corrupting(device: Device) -> None:
        device.shell("echo 0 >nowhere/at/all")

    def cut_off(device: Device) -> None:
        pool.upkeep.probation = passing
        raise HostUnreachableError("board", "no answer")

    pool.upkeep.probation = corrupting
    assert pool.admin.unquarantine(member.name) is MemberState.QUARANTINED
    assert "its probation run failed" in pool.members()[0].reason
    with pytest.raises(LeaseTimeoutError, match="quarantined"):
        pool.acquire(ANY, timeout_s=0.2)
    pool.upkeep.probation = cut_off
    assert pool.admin.unquarantine(member.name) is MemberState.QUARANTINED
    assert "host board cannot be reached" in pool.members()[0].reason
    with pool.acquire(ANY, timeout_s=60):  # which tries again at once, not after the backoff
        pass
    assert states(pool) == ["ready"]
    said = [entry.text for entry in pool.history(member.name)]
    assert "probation -> ready: it passed its probation run" in said
    with pytest.raises(PoolError, match="not in quarantine"):
        pool.admin.unquarantine(member.name)


def test_administration_drains_releases_and_refuses_unknown_names(open_pool: OpenPool) -> None:
    pool = open_pool(count=1)
    name = pool.members()[0].name
    lease = pool.acquire(ANY, timeout_s=60)
    assert pool.admin.drain(name, "swollen\nbattery") is MemberState.DRAINING
    lease.check()
    assert pool.admin.release(name, token=lease.token + 1) is False
    lease.device.shell("true")
    lease.release()
    user = pwd.getpwuid(os.getuid()).pw_name
    assert pool.members()[0].reason == f"swollen battery ({user})"
    with pytest.raises(LeaseTimeoutError, match="swollen battery"):
        pool.acquire(ANY, timeout_s=0.1)
    with pytest.raises(PoolError, match="undrain it instead"):
        pool.admin.recover(name)
    assert pool.admin.undrain(name) is MemberState.READY
    with pytest.raises(PoolError):
        pool.admin.undrain(name)
    assert pool.admin.release(name) is False
    hand = pool.admin
    for act in (hand.undrain, hand.release, hand.recover, hand.unquarantine, pool.history):
        with pytest.raises(UnknownMemberError, match="nobody"):
            act("nobody")


def test_devices_that_are_not_there_are_absent_and_waited_for(
    adb_server: AdbServer, tmp_path: Path
) -> None:
    specs: Sequence[DeviceSpec] = [DeviceSpec("android", "nosuch"), DeviceSpec("virtual", "nosuch")]
    config = PoolConfig()
    members = [Member(str(spec.type), spec) for spec in specs]
    with Pool(members, config, Opener(config), ledger=tmp_path / "p.db") as pool:
        assert states(pool) == ["absent", "absent"]
        with pytest.raises(LeaseTimeoutError, match=r"absent|recovering"):
            pool.acquire(ANY, timeout_s=0.2)


def test_lack_of_free_space_does_not_count(open_pool: OpenPool) -> None:
    pool = open_pool(count=1)
    spec = str(pool.members()[0].spec)
    key = pool.ledger.keys_of([spec])[spec]
    pool.ledger.set_free_bytes(key, 1 << 62)
    with pytest.raises(RequirementError, match="free bytes"):
        pool.acquire(Requirement(min_free_bytes=1 << 60), timeout_s=60)
    (member,) = pool.members()
    assert (member.state, member.failures) == (MemberState.READY, ())
    assert member.free_bytes is not None
    assert member.free_bytes < 1 << 60
