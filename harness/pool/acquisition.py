"""Getting a lease: a place in the queue, the grant, and the fences on the devices."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from harness.clock import Clock
from harness.errors import (
    DeviceError,
    DeviceFullError,
    HarnessError,
    LeaseLostError,
    LeaseTimeoutError,
    LedgerError,
)
from harness.pool.failure_policy import FailureReport, backoff
from harness.pool.fence import Claims, Held, HigherTokenError
from harness.pool.heartbeat import Heart, Pulse
from harness.pool.lease import Lease
from harness.pool.ledger import Leases, Ledger
from harness.pool.members import Member, status_of
from harness.pool.owner import Owner
from harness.pool.records import LeaseRow
from harness.pool.requirement import Requirement
from harness.pool.status import in_the_way

_POLL_S = (0.02, 0.1)
_LOOK_AGAIN_S = 1.0
_AFTER_FAILURE_S = 0.05
_MOST_CLAIMS = 16

_Outcome = Held | HarnessError | HigherTokenError


class Changes:
    """Counts what happened, so that who looked before it and waits after it does not miss it."""

    def __init__(self) -> None:
        self._happened = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """How many there were."""
        return self._count

    def notify(self) -> None:
        """There is one more."""
        with self._happened:
            self._count += 1
            self._happened.notify_all()

    def wait_beyond(self, count: int, timeout_s: float) -> bool:
        """Wait until there are more than `count`; whether there are."""
        with self._happened:
            return self._happened.wait_for(lambda: self._count > count, timeout_s)


class Grant:
    """What `Tickets.try_grant` gave, until it is a lease."""

    def __init__(
        self,
        rows: Sequence[LeaseRow],
        members: Mapping[str, Member],
        leases: Leases,
        clock: Clock,
        heart: Heart,
        claims: Claims,
    ) -> None:
        self._pulse = Pulse(rows[0].token, len(rows), rows[0].beat + rows[0].ttl)
        self._members = {row.key: members[row.key] for row in rows}
        self._leases = leases
        self._clock = clock
        self._heart = heart
        self._claims = claims

    def fenced(self, requirement: Requirement, changes: Changes) -> Lease | None:
        """The lease, when the fences are raised; `None` if one device cannot be used after all.

        Devices that failed are reported then, and all given back.
        """
        self._heart.keep(self._pulse)
        outcomes = self._claim_all(requirement.min_free_bytes)
        failed = {k: o for k, o in outcomes.items() if isinstance(o, HarnessError)}
        held = [o for o in outcomes.values() if isinstance(o, Held)]
        if len(held) < len(self._members):
            self._report(failed, requirement)
            self.give_up("not used: another device failed")
            changes.notify()
            return None
        return Lease(self._leases, self._clock, self._heart, self._pulse, held, changes.notify)

    def give_up(self, reason: str) -> None:
        """Give the devices back. Where the ledger cannot be used, they are free after the TTL."""
        self._heart.drop(self._pulse)
        with suppress(LedgerError):
            self._leases.release(self._pulse.token, list(self._members), reason)

    def _claim_all(self, min_free_bytes: int) -> Mapping[str, _Outcome]:
        while True:
            outcomes = self._each(min_free_bytes)
            higher = [o.args[0] for o in outcomes.values() if isinstance(o, HigherTokenError)]
            if not higher:
                return outcomes
            if not self._heart.raise_token(self._pulse, max(higher)):  # it was taken back
                return outcomes

    def _each(self, min_free_bytes: int) -> Mapping[str, _Outcome]:
        def one(key: str) -> _Outcome:
            try:
                return self._claims.claim(
                    self._pulse.token, key, self._members[key], min_free_bytes=min_free_bytes
                )
            except (HarnessError, HigherTokenError) as error:
                return error

        if len(self._members) == 1:
            return {key: one(key) for key in self._members}
        with ThreadPoolExecutor(min(len(self._members), _MOST_CLAIMS)) as threads:
            return dict(zip(self._members, threads.map(one, self._members), strict=True))

    def _report(self, failed: Mapping[str, HarnessError], requirement: Requirement) -> None:
        for key, error in failed.items():
            # It is sound, and known now for what it has free.
            wanted = requirement.min_free_bytes
            if isinstance(error, DeviceFullError) and error.needed_bytes == wanted > 0:
                continue
            # Any error of a device counts: the device cannot be used.
            least_weight = 1.0 if isinstance(error, DeviceError) else 0.0
            report = FailureReport.of(error, recover=True, least_weight=least_weight)
            self._leases.report(key, self._pulse.token, report)


class Acquisition:
    """One request for a lease, from its place in the queue to its end."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        heart: Heart,
        claims: Claims,
        owner: Owner,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._heart = heart
        self._claims = claims
        self._owner = owner

    def run(
        self,
        requirement: Requirement,
        find: Callable[[], Mapping[str, Member]],
        *,
        timeout_s: float | None,
        purpose: str,
        changes: Changes,
        while_waiting: Callable[[], None],
        cancelled: Callable[[], bool],
    ) -> Lease:
        """Wait for devices and fence them.

        Args:
            find: the members that would do by their keys, best first; asked again as things change.
            changes: told when a lease of this process ends.
            while_waiting: called now and then while there is nothing to be had.
            cancelled: asked several times a second while there is nothing to be had.

        Raises:
            RequirementError: no device could ever do.
            LeaseTimeoutError: none was granted in time, or before it was cancelled.
        """
        began = time.monotonic()
        deadline = None if timeout_s is None else began + timeout_s
        found = find()
        tickets, wanted = self._ledger.tickets, requirement.count
        ticket = tickets.enqueue(self._owner, list(found), wanted)
        grant: Grant | None = None
        looked = began
        failures = 0
        try:
            while True:
                before = changes.count
                try:
                    rows = tickets.try_grant(ticket, self._owner, purpose)
                except LeaseLostError:  # suspended for so long that the queue went on without us
                    ticket = tickets.enqueue(self._owner, list(found), wanted)
                    continue
                if rows:
                    grant = self._grant(rows, found)
                    lease = grant.fenced(requirement, changes)
                    if lease is not None:
                        tickets.settle(ticket)
                        return lease
                    grant = None
                    tickets.put_back(ticket)
                    time.sleep(backoff(_AFTER_FAILURE_S, self._look_again_s, failures))
                    failures += 1
                now = time.monotonic()
                if rows or now - looked > _LOOK_AGAIN_S:
                    while_waiting()
                    found = find()
                    tickets.reconsider(ticket, list(found))
                    looked = now
                if cancelled() or (deadline is not None and now >= deadline):
                    waited_s = round(now - began, 1)
                    raise LeaseTimeoutError(str(requirement), waited_s, self._in_the_way(found))
                self._pause(changes, before, deadline, cancelled)
        except BaseException:
            if grant is not None:
                grant.give_up("its grant was interrupted")
            with suppress(LedgerError):  # what failed first says more
                tickets.settle(ticket)
            raise

    def _grant(self, rows: Sequence[LeaseRow], found: Mapping[str, Member]) -> Grant:
        return Grant(rows, found, self._ledger.leases, self._clock, self._heart, self._claims)

    def _in_the_way(self, found: Mapping[str, Member]) -> str:
        rows = self._ledger.devices.rows(list(found))
        return in_the_way([status_of(found[key], rows[key]) for key in found if key in rows])

    @property
    def _look_again_s(self) -> float:
        """So often that the place in the queue is kept."""
        return min(_LOOK_AGAIN_S, self._ledger.leases.ttl_s / 4)

    def _pause(
        self,
        changes: Changes,
        seen: int,
        deadline: float | None,
        cancelled: Callable[[], bool],
    ) -> None:
        """Wait for a change: of this process at once, of others by looking again soon."""
        before = self._ledger.version()
        end = time.monotonic() + self._look_again_s
        if deadline is not None:
            end = min(end, deadline)
        while time.monotonic() < end:
            poll_s = random.uniform(*_POLL_S)  # noqa: S311 - it spreads, no secret
            if changes.wait_beyond(seen, poll_s):
                return
            if self._ledger.version() != before or cancelled():
                return
