"""Recovery of real virtual devices, step by step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.adb.server import ensure_server, resolve_server
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.devices.spec import DeviceSpec
from harness.errors import AdbServerError, DeviceError, DeviceLostError, DeviceTimeoutError
from harness.pool.members import Member
from harness.pool.opener import Opener
from harness.pool.owner import this_process
from harness.pool.pool import Pool
from harness.pool.records import Facts
from harness.pool.requirement import Requirement
from harness.pool.states import MemberState
from harness.pool.upkeep import Recovery
from plugins.virtual_android import manager
from plugins.virtual_android.faults import Reboot
from tests.conftest import kill_server
from tests.harness.pool.conftest import close, pool_of

if TYPE_CHECKING:
    from tests.conftest import MakeDevice

ANY = Requirement()


class HungUntilReboot(Opener):
    """Opens a device whose properties time out until it was rebooted."""

    boot: str | None = None

    def open(self, member: Member) -> Device:
        device = super().open(member)
        if self.boot is None or device.boot_id() != self.boot:
            return device
        return _Hung(device)  # type: ignore[return-value]


class _Hung:
    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def properties(self, *, timeout_s: float = 30.0) -> DeviceProperties:
        raise DeviceTimeoutError(self._device.serial, "properties", timeout_s)


@pytest.fixture
def virtual(make_virtual_device: "MakeDevice") -> manager.VirtualDevice:
    return make_virtual_device()[0]


MakePool = Callable[..., Pool]


@pytest.fixture
def make_pool(virtual: manager.VirtualDevice, tmp_path: Path) -> Iterator[MakePool]:
    made = []

    def make(text: str = "", opener: type[Opener] = Opener, *, kind: str = "") -> Pool:
        spec = f"android:{virtual.serial}" if kind == "android" else f"virtual:{virtual.name}"
        pool = pool_of(spec, tmp_path / "p.db", text, opener)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        close(pool)


@contextmanager
def hung(boot: str) -> Iterator[None]:
    """Let the device hang until it has booted again."""
    HungUntilReboot.boot = boot
    try:
        yield
    finally:
        HungUntilReboot.boot = None


def check_it_is_back(pool: Pool) -> None:
    with pool.acquire(ANY, timeout_s=280) as lease:
        assert lease.device.shell("echo back").stdout == "back\n"


def steps(pool: Pool) -> list[str]:
    return [e.what for e in pool.history("dut") if e.what.startswith("recovery: ")]


def use(pool: Pool, act: Callable[[], object]) -> None:
    with pool.acquire(ANY, timeout_s=120) as lease:
        lease.device.shell("true")
        act()
        lease.device.shell("true")


def lose(pool: Pool, act: Callable[[], object]) -> None:
    with pytest.raises(DeviceError):
        use(pool, act)


def test_a_lost_connection_is_restored(
    make_pool: MakePool, virtual: manager.VirtualDevice, adb_server: AdbServer
) -> None:
    pool = make_pool(kind="android")
    lose(pool, lambda: adb_server.disconnect(virtual.serial))
    assert pool.members()[0].state is MemberState.RECOVERING
    check_it_is_back(pool)
    assert steps(pool)


def test_a_device_that_lost_power_is_started_again(
    make_pool: MakePool, virtual: manager.VirtualDevice
) -> None:
    pool = make_pool()
    lose(pool, lambda: manager.stop(virtual.name))
    assert pool.admin.recover("dut") is MemberState.READY
    check_it_is_back(pool)


def test_a_device_that_boots_gets_the_time_for_it(
    make_pool: MakePool, virtual: manager.VirtualDevice
) -> None:
    pool = make_pool("adb_server: {ours: true}", kind="android")
    lose(pool, lambda: manager.control(virtual.name).inject(Reboot(when="shell")))
    assert pool.admin.recover("dut") is MemberState.READY
    assert steps(pool) in (["recovery: look"], ["recovery: reconnect"])


def test_an_adb_server_of_ours_is_restarted_unless_others_use_it(
    monkeypatch: pytest.MonkeyPatch,
    free_adb_port: int,
    make_pool: MakePool,
    make_virtual_device: "MakeDevice",
) -> None:
    monkeypatch.setenv("ADB_SERVER_SOCKET", f"tcp:127.0.0.1:{free_adb_port}")
    bystander, _ = make_virtual_device()
    ensure_server().connect(bystander.serial)
    text = "{adb_server: {ours: true}, recovery: {steps: [adb_server], return_timeout_s: 0.2}}"
    pool = make_pool(text, HungUntilReboot)
    with pool.acquire(ANY, timeout_s=120) as lease:
        boot = lease.device.boot_id()
        lease.report(DeviceLostError(lease.device.serial, "a run", "offline"))
    with hung(boot):
        assert pool.admin.recover("dut") is MemberState.ABSENT
        assert "took longer" in pool.members()[0].reason
        assert resolve_server().state(bystander.serial) == "device"
        pool.ledger.record_found("other", "other", "android:other", Facts())
        ticket = pool.ledger.enqueue(this_process(), ["other"], 1)
        assert pool.ledger.try_grant(ticket)
        assert pool.admin.recover("dut") is MemberState.ABSENT
        assert "devices that are in use" in pool.members()[0].reason
    assert pool.admin.recover("dut") is MemberState.READY


def test_a_device_that_hangs_is_rebooted(make_pool: MakePool) -> None:
    text = "recovery: {steps: [reconnect, adb_server, reboot], return_timeout_s: 1}"
    pool = make_pool(text, HungUntilReboot)
    with pool.acquire(ANY, timeout_s=120) as lease:
        boot = lease.device.boot_id()
        lease.report(DeviceTimeoutError(lease.device.serial, "a run", 1))
    with hung(boot):
        assert pool.admin.recover("dut") is MemberState.READY
    assert steps(pool) == [f"recovery: {s}" for s in ("reconnect", "adb_server", "reboot")]
    said = {e.what: e.text for e in pool.history("dut")}
    assert "does not say that it is ours" in said["recovery: adb_server"]
    with pool.acquire(ANY, timeout_s=120) as lease:
        assert lease.device.boot_id() != boot


def test_a_users_command_cycles_the_power_and_failures_back_off(
    make_pool: MakePool, virtual: manager.VirtualDevice, tmp_path: Path
) -> None:
    log = tmp_path / "cycled"
    text = f"""
recovery:
  steps: [power_cycle]
  power_cycle: [sh, -c, 'echo "$1 $2" >>{log}', sh, "{{name}}", "{{serial}}"]
  return_timeout_s: 0.5
  backoff_s: 1000
"""
    pool = make_pool(text, kind="android")
    lose(pool, lambda: manager.stop(virtual.name))
    assert pool.admin.recover("dut") is MemberState.ABSENT
    assert log.read_text() == f"dut {virtual.serial}\n"
    assert pool.members()[0].reason.startswith("power_cycle: ")
    row = pool.ledger.rows([f"android:{virtual.serial}", *_keys(pool)])
    assert {found.attempts for found in row.values()} == {1}
    pool.upkeep.repair(Member("dut", DeviceSpec("android", virtual.serial)), _keys(pool)[0])
    assert log.read_text() == f"dut {virtual.serial}\n"  # it is not due


def test_a_recovery_that_was_cut_off_begins_its_step_again(
    make_pool: MakePool, virtual: manager.VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_of = "steps: [reconnect, adb_server, power_cycle], power_cycle: ['false']"
    text = f"recovery: {{{steps_of}, return_timeout_s: 0.001, backoff_s: 1000}}"
    pool = make_pool(text, kind="android")
    lose(pool, lambda: manager.stop(virtual.name))

    def interrupt(_: Recovery) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recovery, "_restart_server", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.admin.recover("dut")
    (status,) = pool.overview()
    assert status.state is MemberState.RECOVERING
    assert "(adb_server was begun)" in status.reason
    assert "`qnnfarm pool recover dut`" in status.reason
    pool.upkeep.repair(Member("dut", DeviceSpec("android", virtual.serial)), _keys(pool)[0])
    (row,) = pool.ledger.rows(_keys(pool)).values()
    assert (str(row.state), row.attempts, row.step) == ("absent", 1, "")
    assert row.reason.startswith("power_cycle: ")
    assert pool.ledger.due_repairs() == []
    assert steps(pool) == [f"recovery: {s}" for s in ("reconnect", "adb_server", "power_cycle")]


def _keys(pool: Pool) -> list[str]:
    return list(pool.ledger.keys_of([str(pool.members()[0].spec)]).values())


def test_the_death_of_the_adb_server_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
    free_adb_port: int,
    virtual: manager.VirtualDevice,
    make_pool: MakePool,
) -> None:
    monkeypatch.setenv("ADB_SERVER_SOCKET", f"tcp:127.0.0.1:{free_adb_port}")
    pool = make_pool()
    with pytest.raises(AdbServerError):
        use(pool, lambda: kill_server(resolve_server().address))
    (member,) = pool.members()
    assert (member.state, member.failures) == (MemberState.RECOVERING, ())
    assert "adb server" in member.reason
    check_it_is_back(pool)
