"""A pool of devices: who may use which, across the processes of this host."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.clock import Clock, SystemClock
from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec
from harness.devices.types import device_types
from harness.errors import one_line
from harness.pool.acquisition import Acquisition, Changes
from harness.pool.admin import ByHand
from harness.pool.config import PoolConfig
from harness.pool.config_file import load_config
from harness.pool.database import Database, default_path
from harness.pool.fence import Claims
from harness.pool.heartbeat import Heart
from harness.pool.lease import Lease
from harness.pool.ledger import HistoryEntry, Ledger
from harness.pool.members import Member, Roster, left_alone, members_from, members_of
from harness.pool.opening import DeviceOpener, Opener
from harness.pool.owner import this_process
from harness.pool.prober import Lookout
from harness.pool.records import DeviceRow
from harness.pool.requirement import Requirement
from harness.pool.states import MemberState
from harness.pool.status import MemberStatus, Tell, silent
from harness.pool.upkeep import Upkeep

VARIABLE = "QNNFARM_POOL"
FILE_NAME = "pool.yaml"


def config_in_use(config: Path | None) -> tuple[Path | None, PoolConfig]:
    """The file that `Pool.open` reads, and what it says; `None` where there is none.

    Raises:
        PoolConfigError: the file cannot be used.
    """
    named = os.environ.get(VARIABLE)
    path = config or (Path(named) if named else None)
    if path is None and Path(FILE_NAME).is_file():
        path = Path(FILE_NAME)
    if path is None:
        return None, PoolConfig()
    return path, load_config(path, soc_of=_known_soc)


def _known_soc(spec: DeviceSpec) -> str | None:
    return device_types()[spec.type].preview(spec).soc


class Pool:
    """Devices, and the ledger that all pools of this user on this host share.

    Programs lease devices by `acquire`; what people do to them is in `by_hand`. It may be used by
    several threads. Use it as a context manager, or call `close`; leases that are still held then
    go on until they are released or the process ends.
    """

    def __init__(
        self,
        members: Sequence[Member],
        config: PoolConfig,
        opener: Opener,
        *,
        clock: Clock | None = None,
        ledger_path: Path | None = None,
        look: bool = True,
        tell: Tell = silent,
    ) -> None:
        """See `open` and `of`. The opener is closed with the pool, and when no pool comes about."""
        self.config = config
        self._opener = opener
        self._clock = clock or SystemClock()
        self._database = Database(ledger_path or default_path())
        self.ledger = Ledger(
            self._database, self._clock, ttl_s=config.lease.ttl_s, rule=config.quarantine.rule
        )
        self._roster = Roster(self.ledger.devices, members)
        self._heart = Heart(self.ledger.leases)
        self._changes = Changes()
        self._claims = Claims(self.ledger.devices, opener, timeout_s=config.lease.claim_timeout_s)
        self.upkeep = Upkeep(
            self.ledger,
            self._clock,
            self._heart,
            opener,
            config,
            self._claims,
            self._changes.notify,
        )
        self.by_hand = ByHand(self._roster, self.ledger, self.upkeep, self._changes.notify)
        self._lookout = Lookout(self._roster, self.ledger.devices, opener, tell)
        try:
            self.ledger.reconcile()
            if look:
                self.survey()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, config: Path | None = None, *, look: bool = True, tell: Tell = silent) -> Self:
        """The pool of a file: `config`, `$QNNFARM_POOL`, or `pool.yaml` in the working folder.

        Where there is none, all devices of the adb server.

        Args:
            look: whether devices that are not known to be there are looked for, and virtual ones
                made and started for that. Without, those that nobody has looked at are not leased.
            tell: told in words which devices are waited for, where looking for them lasts.

        Raises:
            PoolConfigError: the file cannot be used.
            AdbServerError: the adb server cannot be reached or started.
            LedgerError: the ledger cannot be used.
        """
        path, loaded = config_in_use(config)
        opener = DeviceOpener(loaded)
        try:
            members = members_of(loaded, opener.discover, str(path or "the adb server"))
        except BaseException:
            opener.close()
            raise
        return cls(members, loaded, opener, look=look, tell=tell)

    @classmethod
    def of(
        cls, specs: Sequence[DeviceSpec], *, devices: Devices | None = None, tell: Tell = silent
    ) -> Self:
        """A pool of just these devices, with nothing configured.

        Args:
            devices: with the connections to use; closed with the pool.
            tell: see `open`.

        Raises:
            DeviceSpecError: one is given twice.
            LedgerError: the ledger cannot be used.
        """
        config = PoolConfig()
        return cls(members_from(specs), config, DeviceOpener(config, devices), tell=tell)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop what runs in the background, and let go of connections."""
        self.upkeep.close()
        self._opener.close()
        if not self._heart.beating:
            self._database.close()

    def members(self) -> list[MemberStatus]:
        """All devices as they are now, in the order of the configuration."""
        self.ledger.reconcile()
        return self._roster.statuses(self.config.quarantine.limit)

    def overview(self) -> list[MemberStatus]:
        """The same, with what is known of stopped devices without starting any."""
        statuses, rows = self.members(), self._roster.rows()
        return [self._from_outside(status, rows.get(status.name)) for status in statuses]

    def survey(self) -> None:
        """Look for the devices that are not known to be there, and ask them who they are."""
        rows = self._roster.rows()
        unsure = [
            member
            for name, member in self._roster.members.items()
            if name not in rows or rows[name].state is MemberState.ABSENT
        ]
        self._lookout.look(unsure)

    def probe(self) -> list[MemberStatus]:
        """Ask every device that nobody holds who it is, then give all as `members` does."""
        rows = self._roster.rows()
        self._lookout.look(
            [
                member
                for name, member in self._roster.members.items()
                if name not in rows or rows[name].lease is None
            ]
        )
        return self.members()

    def acquire(
        self,
        requirement: Requirement,
        *,
        timeout_s: float | None = None,
        purpose: str = "",
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Lease:
        """Wait for devices, first come first served.

        Args:
            timeout_s: how long; `None` waits for ever.
            purpose: for people who look who holds a device.
            cancelled: whether to give up; asked by this thread several times a second while it
                waits, which keeps its place in the queue.

        Raises:
            RequirementError: no device of the pool could ever meet it.
            LeaseTimeoutError: none was free in time, or before it was cancelled.
            LedgerError: the ledger cannot be used.
        """
        acquisition = Acquisition(
            self.ledger,
            self._clock,
            self._heart,
            self._claims,
            this_process(),
        )
        self._keep_up()
        return acquisition.run(
            requirement,
            lambda: self._roster.meeting(requirement),
            timeout_s=timeout_s,
            purpose=one_line(purpose, 120),
            changes=self._changes,
            while_waiting=self._keep_up,
            cancelled=cancelled,
        )

    def history(self, name: str) -> list[HistoryEntry]:
        """What happened to a device, oldest first."""
        self._roster.member(name)
        key = self._roster.known(name)
        return [] if key is None else self.ledger.devices.history(key)

    def _from_outside(self, status: MemberStatus, row: DeviceRow | None) -> MemberStatus:
        if alone := left_alone(status.name, row) if row else "":
            status = replace(status, reason=f"{status.reason}; {alone}")
        member = self._roster.member(status.name)
        seen = device_types()[member.spec.type].preview(member.spec).obstacle
        if not seen or status.state is not MemberState.READY:
            return replace(status, seen=seen or status.seen)
        can = seen == "stopped" or member.soc is not None
        reason = f"{'started' if seen == 'stopped' else 'made'} for its next lease"
        return replace(
            status,
            seen=seen,
            reason=reason if can else f"no {member.spec.type} device has that name",
        )

    def _keep_up(self) -> None:
        self.upkeep.start(self._roster.by_key())
