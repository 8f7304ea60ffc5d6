"""Leases that are lost in the middle: to a person, to time, and to another ledger."""

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.errors import DeviceCommandError, LeaseLostError, LeaseTimeoutError
from harness.pool.lease import Lease, LeasedDevice
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from plugins.virtual_android import manager
from tests.command_line import Started
from tests.device_echo import echo_on
from tests.harness.pool.conftest import close, pool_of

ANY = Requirement()
OpenPool = Callable[[str], Pool]
_PATIENCE_S = 60


@pytest.fixture
def name(two_devices: tuple[manager.VirtualDevice, ...]) -> str:
    first: str = two_devices[0].name
    return first


@pytest.fixture
def open_pool(name: str, tmp_path: Path) -> Iterator[OpenPool]:
    """Opens pools of the device, by the names of their ledgers."""
    opened = []

    def make(ledger: str) -> Pool:
        quick = "recovery: {backoff_s: 0.2, max_backoff_s: 0.2}"
        pool = pool_of(f"virtual:{name}", tmp_path / f"{ledger}.db", quick, name=name)
        opened.append(pool)
        return pool

    yield make
    for pool in opened:
        close(pool)


def begun(device: LeasedDevice, path: str) -> None:
    device.unleased.shell(f"until [ -e {path} ]; do sleep 0.02; done; rm {path}", timeout_s=60)


def held_elsewhere(pool: Pool, device: LeasedDevice) -> bool:
    """Return whether a probe found that this process holds the device by another ledger."""
    holder = re.compile(rf"is held by .*\(pid {os.getpid()}\), since .*, through another ledger")
    return any(holder.search(event.text) for event in pool.history(device.member))


def _shell(device: LeasedDevice, script: str) -> object:
    return device.shell(script, timeout_s=60)


def _unchecked(device: LeasedDevice, script: str) -> object:
    return device.shell(script, timeout_s=60, check=False)


def _stream(device: LeasedDevice, script: str) -> object:
    return device.stream(script, on_output=lambda _: None, timeout_s=60)


@pytest.mark.parametrize(
    ("run", "script"),
    [
        (_shell, "sleep 50; exit 3"),
        (_unchecked, "sleep 50 & wait; true"),
        (_stream, "sleep 50"),
    ],
)
def test_a_command_under_a_lease_that_is_taken_fails_as_a_lost_lease(
    open_pool: OpenPool, run: Callable[[LeasedDevice, str], object], script: str
) -> None:
    pool = open_pool("one")
    lease = pool.acquire(ANY, timeout_s=_PATIENCE_S)
    device, flag = lease.device, f"{lease.device.work_root}/begun"
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run, device, f": >{flag}; {script}")
        begun(device, flag)
        assert pool.admin.release(device.member)
        with (
            pool.acquire(ANY, timeout_s=_PATIENCE_S),
            pytest.raises(LeaseLostError, match=r"\(pid \d+\) took it back, at \d\d:"),
        ):
            running.result(timeout=_PATIENCE_S)
    lease.release()
    assert pool.members()[0].failures == ()


def test_success_under_a_lost_lease_does_not_count(open_pool: OpenPool) -> None:
    pool = open_pool("one")
    lease = pool.acquire(ANY, timeout_s=_PATIENCE_S)
    device, flag = lease.device, f"{lease.device.work_root}/begun"
    with ThreadPoolExecutor(1) as threads:
        end = f"until [ -e {flag}.end ]; do sleep 0.02; done; rm {flag}.end"
        running = threads.submit(device.shell, f": >{flag}; {end}")
        begun(device, flag)
        assert pool.admin.release(device.member)
        device.unleased.shell(f": >{flag}.end")
        with pytest.raises(LeaseLostError, match="took it back"):
            running.result(timeout=_PATIENCE_S)
    lease.release()


def test_a_failure_under_a_lease_that_holds_is_the_commands_own(open_pool: OpenPool) -> None:
    with open_pool("one").acquire(ANY, timeout_s=_PATIENCE_S) as lease:
        with pytest.raises(DeviceCommandError, match="status 137"):
            lease.device.shell("kill -9 $$")
        assert lease.device.shell("exit 3", check=False).exit_status == 3
        lease.verify()


def test_two_ledgers_wait_for_each_other(open_pool: OpenPool) -> None:
    one, two = open_pool("one"), open_pool("two")
    with one.acquire(ANY, timeout_s=_PATIENCE_S, purpose="first") as lease:
        device = lease.device
        with pytest.raises(LeaseTimeoutError):
            two.acquire(ANY, timeout_s=0.3)
        assert held_elsewhere(two, device)
        assert two.members()[0].failures == ()
        assert device.shell("echo here").stdout == "here\n"
    with two.acquire(ANY, timeout_s=_PATIENCE_S) as other:
        assert other.device.shell("echo there").stdout == "there\n"


def test_a_person_takes_a_device_from_another_ledger_whose_holder_learns_of_it(
    open_pool: OpenPool,
) -> None:
    one, two = open_pool("one"), open_pool("two")
    lease = one.acquire(ANY, timeout_s=_PATIENCE_S)
    device = lease.device
    assert two.admin.recover(device.member) == "absent"
    assert two.admin.recover(device.member, take=True) == "ready"
    with two.acquire(ANY, timeout_s=_PATIENCE_S) as other:
        for touch in (
            lambda: device.shell("true"),
            lambda: device.forward("tcp:1"),
            lease.check,
        ):
            with pytest.raises(LeaseLostError) as caught:
                touch()
            assert f"(pid {os.getpid()}), since " in str(caught.value)
            assert "has the device through another ledger" in str(caught.value)
        lease.release()
        assert other.device.shell("echo mine").stdout == "mine\n"
        with pytest.raises(LeaseTimeoutError):
            one.acquire(ANY, timeout_s=0.3)
        assert held_elsewhere(one, device)
    lost = [event.text for event in one.history(device.member) if event.what == "lost its lease"]
    assert len(lost) == 1
    assert "through another ledger" in lost[0]
    taken = [event.text for event in two.history(device.member) if event.what == "taken"]
    assert [f"(pid {os.getpid()})" in text for text in taken] == [True]


_HOLDER = """
import sys
from harness.pool.requirement import Requirement
from tests.harness.pool.conftest import pool_of

name, ledger = sys.argv[1:]
pool = pool_of("virtual:" + name, ledger)
device = pool.acquire(Requirement(), timeout_s=60).device
device.shell("setsid sleep 600 >/dev/null 2>&1 </dev/null &")
print("holds", flush=True)
device.shell("sleep 500", timeout_s=600)
"""


def test_a_killed_holder_of_another_ledger_on_this_host_is_gone_at_once(
    name: str, open_pool: OpenPool, tmp_path: Path
) -> None:
    with Started("-c", _HOLDER, name, tmp_path / "other.db") as holder:
        assert holder.stdout.readline() == "holds\n"
        pool = open_pool("one")
        with pytest.raises(LeaseTimeoutError):
            pool.acquire(ANY, timeout_s=0.3)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with pool.acquire(ANY, timeout_s=_PATIENCE_S) as lease:
            assert lease.device.shell("echo mine").stdout == "mine\n"


def _release(pool: Pool, lease: Lease) -> None:
    lease.release()


def _take(pool: Pool, lease: Lease) -> None:
    assert pool.admin.release(lease.device.member)


@pytest.mark.parametrize("end", [_release, _take])
def test_a_forward_ends_with_its_lease(
    open_pool: OpenPool, end: Callable[[Pool, Lease], None]
) -> None:
    pool = open_pool("one")
    lease = pool.acquire(ANY, timeout_s=_PATIENCE_S)
    with (
        echo_on(lease.device.unleased) as port,  # it does not end with the lease
        lease.device.forward(f"tcp:{port}") as address,
        socket.create_connection(address, _PATIENCE_S) as link,
    ):
        link.sendall(b"ping")
        assert link.recv(4) == b"ping"
        end(pool, lease)
        assert link.recv(4) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, _PATIENCE_S)
    lease.release()
