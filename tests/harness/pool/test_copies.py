"""Ledgers that went back, or have a copy: never two holders, and few losses.

The device is a folder with the real `fence.sh`. Its witness is a lock of the kernel that each
holder's work takes there: who finds it taken has met another holder. `make copies` takes 2,000
leases (`QNNFARM_LEASES`); `QNNFARM_SEED` draws others.
"""

import os
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import Connection, delete, insert, select

from harness.devices.device import Device
from harness.devices.local import LocalTransport
from harness.devices.spec import DeviceSpec
from harness.errors import DeviceHeldError, HarnessError, LeaseLostError, LedgerError
from harness.pool import records
from harness.pool.context import Heartbeat, PoolContext
from harness.pool.database import place_of
from harness.pool.fence import claim
from harness.pool.lease import Lease
from harness.pool.members import Member
from harness.pool.opener import identify
from harness.pool.records import Facts, LeaseRow
from tests.harness.pool.conftest import TTL_S, Bench, on_each_database, process

LEASES = int(os.environ.get("QNNFARM_LEASES", "10"))
SEED = int(os.environ.get("QNNFARM_SEED", "4"))
MEMBER = Member("a", DeviceSpec("local", ""))
Rows = dict[str, list[dict[str, object]]]


class FolderDevice(Device):
    """This machine as a device, with a work root of its own."""

    def __init__(self, root: Path) -> None:
        super().__init__(LocalTransport())
        self._work_root = str(root)


@dataclass
class OneDevice:
    """Opens the same device under each address."""

    device: Device

    def open(self, _: Member) -> Device:
        return self.device


class HandHeartbeat(Heartbeat):
    """Beats when a test says so."""

    def start(self, rows: object) -> None:
        (row,) = cast("list[LeaseRow]", rows)
        self._terms[row.grant] = 1, row.until

    def beat(self) -> None:
        with self._changed:
            for grant, until in self._ledger.renew(dict.fromkeys(self._terms, 1)).items():
                if until:
                    self._terms[grant] = 1, until
                else:
                    del self._terms[grant]


@dataclass
class Side:
    """A ledger, and how its holders use the device."""

    bench: Bench
    device: Device
    context: PoolContext = field(init=False)

    def __post_init__(self) -> None:
        bench = self.bench
        self.context = bench.context(OneDevice(self.device), HandHeartbeat(bench.ledger))
        bench.ledger.ledger_id()
        self.key = identify(MEMBER, self.device, bench.ledger, timeout_s=60).key
        bench.ledger.record_found(self.key, "a", str(MEMBER.spec), Facts("SM8750"))

    def acquire(self) -> Lease | None:
        """Lease the device if it is free; raise what its claim raises."""
        ledger = self.bench.ledger
        ticket = ledger.enqueue(process(1), [self.key], 1)
        rows = ledger.try_grant(ticket)
        ledger.withdraw(ticket)
        if rows is None:
            return None
        try:
            fence = claim(self.context, rows[0], MEMBER)
        except HarnessError:
            ledger.release(rows[0].grant, [self.key], "it could not be claimed")
            raise
        self.context.heartbeat.start(rows)
        return Lease(self.context, rows[0].grant, [fence])


def saved(bench: Bench) -> Rows:
    """Copy a ledger's state."""

    def read(db: Connection) -> Rows:
        tables = records.METADATA.sorted_tables
        return {t.name: [dict(row) for row in db.execute(select(t)).mappings()] for t in tables}

    return bench.database.read(read)


def put_back(bench: Bench, rows: Rows, **counters: int) -> None:
    """Bring a ledger to a state that was saved."""

    def write(db: Connection) -> None:
        for table in records.METADATA.sorted_tables:
            db.execute(delete(table))
            if rows[table.name]:
                db.execute(insert(table), rows[table.name])
        for name, value in counters.items():
            of_name = records.counters.c.name == name
            db.execute(records.counters.update().where(of_name).values(value=value))

    bench.database.write(write)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[FolderDevice]:
    device = FolderDevice(tmp_path / "root")
    yield device
    device.shell(f"rm -rf {shlex.quote(str(tmp_path / 'root'))}", timeout_s=60)


@on_each_database
def test_ledger_that_went_back_waits_for_the_holder_that_it_forgot(
    bench: Bench, device: FolderDevice
) -> None:
    side = Side(bench, device)
    before = saved(bench)
    first = side.acquire()
    assert first is not None
    put_back(bench, before)
    with pytest.raises(DeviceHeldError, match=r"pytest.*went back to an earlier state"):
        side.acquire()
    assert first.device.unleased.shell(first.device.fence.guarded("echo ours")).stdout == "ours\n"
    cast("HandHeartbeat", side.context.heartbeat).beat()
    with pytest.raises(LeaseLostError, match="knows no such lease: it went back"):
        first.check()
    first.release()
    second = side.acquire()
    assert second is not None
    assert second.token > first.token
    told = [entry.what for entry in bench.ledger.history(side.key)]
    assert "went back" in told
    second.release()


def test_copy_of_a_ledger_asks_for_an_id_of_its_own(bench: Bench, tmp_path: Path) -> None:
    bench.ledger.ledger_id()
    copy = Bench(tmp_path / "copy.db")
    put_back(copy, saved(bench))
    with pytest.raises(LedgerError, match="`qnnfarm pool new-id`"):
        copy.ledger.ledger_id()
    copy.ledger.renew_id()
    assert copy.ledger.ledger_id() != bench.ledger.ledger_id()
    copy.database.close()


@dataclass
class Holder:
    """A holder, and its work on the device."""

    side: Side
    lease: Lease
    work: "subprocess.Popen[str] | None" = None
    sleeps: bool = False


def holds(holder: Holder) -> bool:
    """Return whether a lease holds by its own clock, by its ledger and on the device."""
    device = holder.lease.device
    with suppress(LeaseLostError):
        holder.lease.check_ledger(device.key)
        return device.unleased.shell(device.fence.guarded(":"), check=False).exit_status == 0
    return False


@dataclass
class Campaign:
    """Two ledgers of one id over one device, whose holders stop and go on."""

    sides: tuple[Side, Side]
    folder: Path
    choose: random.Random
    holders: list[Holder] = field(default_factory=list)
    states: list[tuple[Side, Rows]] = field(default_factory=list)
    granted: int = 0
    refused: int = 0
    met: int = 0

    def step(self) -> None:
        steps = [self.acquire] * 4 + [self.work] * 3 + [self.release] * 3
        steps += [self.beat] * 2 + [self.stop, self.go_back, self.pass_time]
        self.choose.choice(steps)()
        self.states = self.states[-12:]

    def keep(self, side: Side) -> None:
        self.states.append((side, saved(side.bench)))

    def acquire(self) -> None:
        side = self.choose.choice(self.sides)
        self.keep(side)
        keepers = list(filter(holds, self.holders))
        try:
            lease = side.acquire()
        except (DeviceHeldError, LeaseLostError):
            self.refused += 1
            return
        if lease is not None:
            assert not keepers, f"it was taken from its holder: QNNFARM_SEED={SEED}"
            self.granted += 1
            self.holders.append(Holder(side, lease))
            self.keep(side)

    def work(self) -> None:
        """Begin the work of a holder, if its lease still holds."""
        for holder in self.some_holder():
            device = holder.lease.device
            try:
                holder.lease.check_ledger(device.key)
            except LeaseLostError:
                self.end(holder)
                return
            if holder.work is None:
                lock, meetings = (shlex.quote(str(self.folder / n)) for n in ("lock", "met"))
                script = (
                    f"exec 9>>{lock}; flock -n 9 || echo met >>{meetings}; echo in; exec sleep 600"
                )
                holder.work = subprocess.Popen(
                    ["sh", "-c", device.fence.guarded(script)],
                    env=os.environ | device.fence.env, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, text=True,
                )  # fmt: skip
                assert holder.work.stdout is not None
                holder.work.stdout.readline()

    def release(self) -> None:
        for holder in self.some_holder():
            self.end(holder)

    def end(self, holder: Holder) -> None:
        if holder.work is not None:
            holder.work.kill()
            holder.work.communicate()
        holder.lease.release()
        self.keep(holder.side)
        self.holders.remove(holder)

    def some_holder(self) -> list[Holder]:
        awake = [holder for holder in self.holders if not holder.sleeps]
        return [self.choose.choice(awake)] if awake else []

    def stop(self) -> None:
        """Suspend a holder, or let one go on."""
        if self.holders:
            holder = self.choose.choice(self.holders)
            holder.sleeps = not holder.sleeps

    def beat(self) -> None:
        for side in self.sides:
            if not any(h.sleeps for h in self.holders if h.side is side):
                cast("HandHeartbeat", side.context.heartbeat).beat()

    def go_back(self) -> None:
        """Lose the last transactions of a ledger."""
        if self.states:
            side, rows = self.choose.choice(self.states)
            put_back(side.bench, rows)

    def pass_time(self) -> None:
        seconds = self.choose.choice([1.0, TTL_S / 3, TTL_S])
        for side in self.sides:
            side.bench.clock.time += seconds

    def finish(self) -> None:
        """Let everybody go on and end; the device then goes to each ledger."""
        for holder in list(self.holders):
            self.end(holder)
        for side in self.sides:
            side.bench.clock.time += 2 * TTL_S
            side.bench.ledger.reconcile()


@contextmanager
def two_sides(folder: Path, device: Device) -> Iterator[tuple[Side, Side]]:
    first = Side(Bench(folder / "first.db"), device)
    second = Side(Bench(folder / "second.db"), device)
    place = place_of(folder / "second.db")  # as on the clone of a machine
    put_back(second.bench, saved(first.bench), place=place)
    try:
        yield first, second
    finally:
        first.bench.database.close()
        second.bench.database.close()


def test_device_never_has_two_holders_whatever_its_ledgers_lose(
    device: FolderDevice, tmp_path: Path
) -> None:
    with two_sides(tmp_path, device) as sides:
        campaign = Campaign(sides, tmp_path, random.Random(SEED))  # noqa: S311
        try:
            while campaign.granted < LEASES:
                campaign.step()
                assert not (tmp_path / "met").exists(), f"two holders met: QNNFARM_SEED={SEED}"
        finally:
            campaign.finish()
        for side in sides:
            lease = side.acquire()
            assert lease is not None, f"nobody gets it any more: QNNFARM_SEED={SEED}"
            lease.release()
    sys.stdout.write(f"{campaign.granted} leases, {campaign.refused} refused\n")
