"""Pool of devices that several processes share: its public interface, and requests for leases."""

import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from buildlib.closeable import Closeable
from harness.clock import Clock, SystemClock
from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec, device_types
from harness.errors import (
    DeviceError,
    DeviceFullError,
    HarnessError,
    LeaseLostError,
    LeaseTimeoutError,
    LedgerError,
    one_line,
)
from harness.pool.config import AdbServerConfig, PoolConfig, load_config
from harness.pool.context import Heartbeat, PoolContext
from harness.pool.database import Database, default_path
from harness.pool.failure_policy import FailureReport, backoff
from harness.pool.fence import Fence, claim
from harness.pool.history import HistoryEntry
from harness.pool.lease import Lease
from harness.pool.ledger import Ledger
from harness.pool.members import (
    Member,
    Members,
    configured_members,
    describe_idle_recovery,
    members_of_specs,
    status_of,
)
from harness.pool.opener import Opener, Prober, devices_of
from harness.pool.owner import Owner, this_process
from harness.pool.records import DeviceRow, LeaseRow
from harness.pool.requirement import (
    MemberStatus,
    OnProgress,
    Requirement,
    Waiting,
    describe_wait,
    ignore_progress,
)
from harness.pool.states import MemberState

if TYPE_CHECKING:
    from harness.pool.admin import PoolAdmin
    from harness.pool.notifications import Notification, Notifier
    from harness.pool.upkeep import Upkeep

VARIABLE = "QNNFARM_POOL"
LEDGER_VARIABLE = "QNNFARM_LEDGER"
FILE_NAME = "pool.yaml"
_POLL_S = (0.02, 0.1)
_REFRESH_S = 1.0
_TURN_S = 0.02
_PATIENCE_S = 5.0
"""A shorter wait is told to nobody."""
_AFTER_FAILURE_S = 0.05
_MAX_PARALLEL_CLAIMS = 16


def find_config(config: Path | None) -> tuple[Path | None, PoolConfig]:
    """Return the file that `Pool.open` reads (`None` if there is none), and its content."""
    variable = os.environ.get(VARIABLE)
    path = config or (Path(variable) if variable else None)
    if path is None and Path(FILE_NAME).is_file():
        path = Path(FILE_NAME)
    if path is None:
        return None, PoolConfig()
    return path, load_config(path, soc_of=_known_soc)


def find_ledger(config: PoolConfig) -> str | Path:
    """Return the location of a pool's ledger: `$QNNFARM_LEDGER`, the file's, or this host's."""
    return os.environ.get(LEDGER_VARIABLE) or config.ledger or default_path()


def host_devices() -> Devices:
    """Make the connections to adb servers and hosts that the file of `find_config` describes."""
    return devices_of(find_config(None)[1])


def trusted_users() -> tuple[str, ...]:
    """Return the users whose adb server on this host the file of `find_config` trusts."""
    return find_config(None)[1].adb_server.trusted_users


def _known_soc(spec: DeviceSpec) -> str | None:
    return device_types()[spec.type].preview(spec).soc


class Pool(Closeable):
    """Devices, and the ledger that all pools of this user on this host share.

    Programs lease devices with `acquire`; people manage them through `admin`. A pool may be used by
    several threads. Use it as a context manager, or call `close`; leases that are still held then
    go on until they are released or the process ends.

    Most methods raise `LedgerError` when the ledger cannot be used.
    """

    def __init__(
        self,
        members: Sequence[Member],
        config: PoolConfig,
        opener: Opener,
        *,
        clock: Clock | None = None,
        ledger: str | Path | None = None,
        probe: bool = True,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        """Create a pool; see `open` and `of`. The opener is closed with it, or if this raises.

        Args:
            ledger: location of its ledger; by default see `find_ledger`.
        """
        self.config = config
        self._database = Database(ledger or find_ledger(config))
        clock = clock or SystemClock()
        self.ledger = Ledger(
            self._database, clock, ttl_s=config.lease.ttl_s, rule=config.quarantine
        )
        self._context = PoolContext(config, clock, self.ledger, opener, Heartbeat(self.ledger))
        self._members = Members(self.ledger, members)
        self._prober = Prober(self._members, self.ledger, opener, on_progress)
        self._lock = threading.Lock()
        self._upkeep: Upkeep | None = None
        self._notifier: Notifier | None = None
        try:
            self.ledger.ledger_id()
            self.ledger.reconcile()
            self._notifier = self._start_notifier()
            if probe:
                self.probe_absent()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        config: Path | None = None,
        *,
        probe: bool = True,
        on_progress: OnProgress = ignore_progress,
    ) -> Self:
        """Open the pool of a file: `config`, `$QNNFARM_POOL`, or `pool.yaml` in the working folder.

        Without a file, the pool is all devices of the adb server.

        Args:
            probe: look for the devices that are not known to be there, and make and start virtual
                ones for that. Without it, devices that were never probed are not leased.
            on_progress: called with the names of the devices that are slow to answer.

        Raises:
            ConfigFileError: the file cannot be used.
            AdbServerError: the adb server cannot be reached or started.
        """
        path, content = find_config(config)
        opener = Opener(content)
        try:
            members = configured_members(content, opener.discover, str(path or "the adb server"))
        except BaseException:
            opener.close()
            raise
        return cls(members, content, opener, probe=probe, on_progress=on_progress)

    @classmethod
    def of(
        cls,
        specs: Sequence[DeviceSpec],
        *,
        devices: Devices | None = None,
        probe: bool = True,
        on_progress: OnProgress = ignore_progress,
    ) -> Self:
        """Open a pool of just these devices, with the default configuration.

        Only the trust in an adb server is that of the file that `open` reads.

        Args:
            devices: connections to use as well; closed with the pool.
            probe, on_progress: see `open`.
        """
        config = PoolConfig(adb_server=AdbServerConfig(trusted_users=trusted_users()))
        opener = Opener(config, devices)
        members = members_of_specs(specs)
        return cls(members, config, opener, probe=probe, on_progress=on_progress)

    @property
    def admin(self) -> "PoolAdmin":
        """The actions of people on its devices."""
        from harness.pool.admin import PoolAdmin

        return PoolAdmin(self.ledger, self._members, self.upkeep)

    @property
    def upkeep(self) -> "Upkeep":
        """The repair of its devices."""
        from harness.pool.upkeep import Upkeep

        with self._lock:
            self._upkeep = self._upkeep or Upkeep(self._context)
            return self._upkeep

    def close(self) -> None:
        """Stop background work, send the notifications that are due, and close the connections."""
        if self._upkeep is not None:
            self._upkeep.close()
        if self._notifier is not None:
            self._notifier.close()
        self._context.opener.close()
        if not self._context.heartbeat.active:
            self._database.close()

    def members(self) -> list[MemberStatus]:
        """Return all devices as they are now, in the order of the configuration."""
        self.ledger.reconcile()
        return self._members.statuses(self.config.quarantine.limit)

    def waiting(self) -> list[Waiting]:
        """Return the requests that wait, in the order in which they come next."""
        tickets = self.ledger.waiting()
        if not tickets:
            return []
        members = {status.name: status for status in self.members()}
        by_key = self._members.by_key()
        waiting = []
        for ticket in tickets:
            names = [by_key[key].name for key in ticket.candidates if key in by_key]
            reason = describe_wait([members[name] for name in names if name in members])
            waiting.append(replace(ticket, reason=reason))
        return waiting

    def overview(self) -> list[MemberStatus]:
        """Return `members`, with hints on stopped devices, of which none is started."""
        statuses, rows = self.members(), self._members.rows()
        return [self._with_hints(status, rows.get(status.name)) for status in statuses]

    def probe_absent(self) -> None:
        """Look for the devices that are not known to be there."""
        self._probe(lambda row: row.state is MemberState.ABSENT)

    def probe(self) -> list[MemberStatus]:
        """Look for every device without a holder, then return all as `members` does."""
        self._probe(lambda row: row.lease is None)
        return self.members()

    def acquire(
        self,
        requirement: Requirement,
        *,
        timeout_s: float | None = None,
        purpose: str = "",
        cancelled: Callable[[], bool] = lambda: False,
        on_wait: OnProgress = ignore_progress,
    ) -> Lease:
        """Wait for devices, first come first served.

        Args:
            timeout_s: `None` waits without limit.
            purpose: shown to people with the holder of a device.
            cancelled: whether to give up; called in this thread several times a second while it
                waits, which keeps its place in the queue.
            on_wait: called once, if it waits for more than 5 seconds, with who has the devices, or
                why they are out.

        Raises:
            RequirementError: no device of the pool could ever meet the requirement.
            LeaseTimeoutError: none was free in time, or before it was cancelled.
        """
        acquisition = Acquisition(
            self._context,
            this_process(),
            requirement,
            lambda: self._members.matching(requirement),
            purpose=one_line(purpose, 120),
        )
        self._start_repairs()
        return acquisition.run(
            timeout_s=timeout_s,
            while_waiting=self._start_repairs,
            cancelled=cancelled,
            on_wait=on_wait,
        )

    def history(self, name: str, *, since: float = 0.0) -> list[HistoryEntry]:
        """Return the history of a device, oldest first.

        Args:
            since: seconds since 1970; events before are left out.
        """
        self._members.member(name)
        key = self._members.key_of(name)
        return [] if key is None else self.ledger.history(key, since=since)

    def notify(self, notification: "Notification") -> None:
        """Send a notification to the receivers of its kind; failures are logged."""
        if self._notifier is not None:
            self._notifier.send(notification)

    def _start_notifier(self) -> "Notifier | None":
        if not self.config.notifications:
            return None
        from harness.pool.notifications import Notifier

        return Notifier(self.config.notifications, self.ledger, self._name_of)

    def _probe(self, should: Callable[[DeviceRow], bool]) -> None:
        """Probe the devices that should be, and those that the ledger does not know."""
        rows, members = self._members.rows(), self._members.by_name.items()
        self._prober.probe([m for name, m in members if name not in rows or should(rows[name])])

    def _name_of(self, key: str) -> str:
        member = self._members.by_key().get(key)
        return "" if member is None else member.name

    def _with_hints(self, status: MemberStatus, row: DeviceRow | None) -> MemberStatus:
        if idle := describe_idle_recovery(status.name, row) if row else "":
            status = replace(status, reason=f"{status.reason}; {idle}")
        member = self._members.member(status.name)
        obstacle = device_types()[member.spec.type].preview(member.spec).obstacle
        if obstacle and status.state is MemberState.READY:
            reason = f"no {member.spec.type} device has that name"
            if obstacle == "stopped" or member.soc is not None:
                reason = f"{'started' if obstacle == 'stopped' else 'made'} for its next lease"
            status = replace(status, reason=reason)
        return replace(status, seen=obstacle or status.seen)

    def _start_repairs(self) -> None:
        if due := self.ledger.due_repairs():
            self.upkeep.start(due, self._members.by_key())


@dataclass(frozen=True, slots=True)
class Acquisition:
    """One request for a lease, from its place in the queue to the lease.

    Attributes:
        match: gives the members that meet the requirement by their keys, best first.
    """

    context: PoolContext
    owner: Owner
    requirement: Requirement
    match: Callable[[], Mapping[str, Member]]
    purpose: str = ""

    def run(
        self,
        *,
        timeout_s: float | None,
        while_waiting: Callable[[], None],
        cancelled: Callable[[], bool],
        on_wait: OnProgress = ignore_progress,
    ) -> Lease:
        """Wait for devices and fence them.

        Args:
            while_waiting: called about once a second while nothing is granted.
            cancelled: called several times a second while nothing is granted.
            on_wait: see `Pool.acquire`.
        """
        began = time.monotonic()
        deadline = None if timeout_s is None else began + timeout_s
        members = self.match()
        ticket = self._enqueue(members)
        rows: Sequence[LeaseRow] | None = None
        refreshed = began
        is_told = False
        failures = 0
        try:
            while True:
                # It is read before the ledger is asked: what happens meanwhile is a change.
                version = self.context.ledger.database.version()
                try:
                    rows = self.context.ledger.try_grant(ticket)
                except LeaseLostError:  # suspended for so long that the queue went on without us
                    ticket = self._enqueue(members)
                    continue
                if rows:
                    lease = self._fence(rows, members)
                    if lease is not None:
                        self.context.ledger.settle(ticket)
                        return lease
                    self.context.ledger.put_back(ticket)
                    time.sleep(backoff(_AFTER_FAILURE_S, self._refresh_s, failures))
                    failures += 1
                now = time.monotonic()
                if rows or now - refreshed > _REFRESH_S:
                    while_waiting()
                    members, before = self.match(), members
                    if list(members) != list(before):
                        self.context.ledger.set_candidates(ticket, list(members))
                    refreshed = now
                    if not is_told and now - began > _PATIENCE_S:
                        on_wait(self._wait_reason(members))
                        is_told = True
                if cancelled() or (deadline is not None and now >= deadline):
                    waited_s = round(now - began, 1)
                    reason = self._wait_reason(members)
                    raise LeaseTimeoutError(str(self.requirement), waited_s, reason)
                self._pause(ticket, version, deadline, cancelled)
        except BaseException:
            if rows:
                self._give_up(rows, "its grant was interrupted")
            with suppress(LedgerError):  # the first error says more
                self.context.ledger.withdraw(ticket)
            raise

    def _enqueue(self, members: Mapping[str, Member]) -> int:
        return self.context.ledger.enqueue(
            self.owner,
            list(members),
            self.requirement.count,
            priority=self.context.config.lease.priority,
            purpose=self.purpose,
        )

    def _wait_reason(self, members: Mapping[str, Member]) -> str:
        rows = self.context.ledger.rows(list(members))
        return describe_wait([status_of(members[key], rows[key]) for key in members if key in rows])

    @property
    def _refresh_s(self) -> float:
        """Often enough to keep the place in the queue."""
        return min(_REFRESH_S, self.context.ledger.ttl_s / 4)

    def _pause(
        self,
        ticket: int,
        version: tuple[int, int],
        deadline: float | None,
        cancelled: Callable[[], bool],
    ) -> None:
        """Wait until the ledger has changed since that version, and then for the tickets before it.

        So only two look at once at a device that becomes free: the first may have been served.
        """
        turn_s = _TURN_S * max(0, self.context.ledger.turns_before(ticket) - 1)
        end = time.monotonic() + self._refresh_s
        if deadline is not None:
            end = min(end, deadline)
        while (left_s := end - time.monotonic()) > 0:
            poll_s = random.uniform(*_POLL_S)  # noqa: S311 - spreads the load, no secret
            latest = self.context.ledger.database.wait(version, min(poll_s, left_s))
            if cancelled():
                return
            if latest != version:
                version, end = latest, min(end, time.monotonic() + turn_s)

    def _fence(self, rows: Sequence[LeaseRow], members: Mapping[str, Member]) -> Lease | None:
        """Raise the fences of all devices; if one fails, report it and give all devices back."""
        least = self.requirement.min_free_bytes

        def try_claim(row: LeaseRow) -> Fence | HarnessError:
            try:
                return claim(self.context, row, members[row.key], min_free_bytes=least)
            except HarnessError as error:
                return error

        self.context.heartbeat.start(rows)
        if len(rows) == 1:
            outcomes = [try_claim(rows[0])]
        else:
            with ThreadPoolExecutor(min(len(rows), _MAX_PARALLEL_CLAIMS)) as threads:
                outcomes = list(threads.map(try_claim, rows))
        fences = [outcome for outcome in outcomes if isinstance(outcome, Fence)]
        if len(fences) == len(rows):
            return Lease(self.context, rows[0].grant, fences)
        for row, outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, Fence):
                outcome.give_back()
            else:
                self._report(row, outcome)
        self._give_up(rows, "not used: another device failed")
        return None

    def _give_up(self, rows: Sequence[LeaseRow], reason: str) -> None:
        """Give the devices back. Where the ledger cannot be used, they are free after the TTL."""
        grant = rows[0].grant
        self.context.heartbeat.stop(grant)
        with suppress(LedgerError):
            self.context.ledger.release(grant, [row.key for row in rows], reason)

    def _report(self, row: LeaseRow, error: HarnessError) -> None:
        least = self.requirement.min_free_bytes
        if isinstance(error, DeviceFullError) and error.needed_bytes == least > 0:
            return  # the device is sound, and the ledger now knows its free space
        if isinstance(error, LeaseLostError):
            return  # so is it, but the ledger has given it to another holder meanwhile
        # Any error of a device counts: a device that cannot be claimed cannot be used.
        is_full = isinstance(error, DeviceFullError)
        least_weight = 1.0 if isinstance(error, DeviceError) and not is_full else 0.0
        report = FailureReport.of(error, recover=True, least_weight=least_weight)
        self.context.ledger.report(row.key, row.grant, report)
