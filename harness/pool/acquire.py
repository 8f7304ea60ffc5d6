"""Getting a lease: a place in the queue, the grant, and the fences on the devices."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from harness.errors import LeaseLostError, LeaseTimeoutError, LedgerError
from harness.pool.backoff import backoff
from harness.pool.base import Requirement
from harness.pool.changes import Changes
from harness.pool.claims import Claims
from harness.pool.clock import Clock
from harness.pool.grant import Grant
from harness.pool.heart import Heart
from harness.pool.lease import Lease
from harness.pool.ledger import Ledger
from harness.pool.members import Member
from harness.pool.owner import Owner
from harness.pool.rows import LeaseRow
from harness.pool.status import status_of
from harness.pool.waiting import in_the_way

_POLL_S = (0.02, 0.1)
_LOOK_AGAIN_S = 1.0
_AFTER_FAILURE_S = 0.05


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
