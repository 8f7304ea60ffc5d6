"""Acquiring a lease: a place in the queue, the grant of devices, and the fences on them."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from harness.errors import (
    DeviceError,
    DeviceFullError,
    HarnessError,
    LeaseLostError,
    LeaseTimeoutError,
    LedgerError,
)
from harness.pool.context import PoolContext
from harness.pool.failure_policy import FailureReport, backoff
from harness.pool.fence import ClaimedDevice
from harness.pool.lease import Lease
from harness.pool.members import Member, status_of
from harness.pool.owner import Owner
from harness.pool.records import LeaseRow
from harness.pool.requirement import Requirement
from harness.pool.status import describe_wait

_POLL_S = (0.02, 0.1)
_REFRESH_S = 1.0
_TURN_S = 0.02
_AFTER_FAILURE_S = 0.05
_MAX_PARALLEL_CLAIMS = 16


class Acquisition:
    """One request for a lease, from its place in the queue to the lease.

    Args:
        match: gives the members that meet the requirement by their keys, best first.
    """

    def __init__(
        self,
        context: PoolContext,
        owner: Owner,
        requirement: Requirement,
        match: Callable[[], Mapping[str, Member]],
        *,
        purpose: str = "",
    ) -> None:
        self._context = context
        self._ledger = context.ledger
        self._owner = owner
        self._requirement = requirement
        self._match = match
        self._purpose = purpose

    def run(
        self,
        *,
        timeout_s: float | None,
        while_waiting: Callable[[], None],
        cancelled: Callable[[], bool],
    ) -> Lease:
        """Wait for devices and fence them.

        Args:
            while_waiting: called about once a second while nothing is granted.
            cancelled: called several times a second while nothing is granted.
        """
        began = time.monotonic()
        deadline = None if timeout_s is None else began + timeout_s
        members = self._match()
        ticket = self._enqueue(members)
        rows: Sequence[LeaseRow] | None = None
        refreshed = began
        failures = 0
        try:
            while True:
                # Both are read before the ledger is asked: what happens meanwhile is a change.
                changes, version = self._context.changes.count, self._ledger.version()
                try:
                    rows = self._ledger.try_grant(ticket, self._owner, self._purpose)
                except LeaseLostError:  # suspended for so long that the queue went on without us
                    ticket = self._enqueue(members)
                    continue
                if rows:
                    lease = self._fence(rows, members)
                    if lease is not None:
                        self._ledger.settle(ticket)
                        return lease
                    self._ledger.put_back(ticket)
                    time.sleep(backoff(_AFTER_FAILURE_S, self._refresh_s, failures))
                    failures += 1
                now = time.monotonic()
                if rows or now - refreshed > _REFRESH_S:
                    while_waiting()
                    members, before = self._match(), members
                    if list(members) != list(before):
                        self._ledger.set_candidates(ticket, list(members))
                    refreshed = now
                if cancelled() or (deadline is not None and now >= deadline):
                    waited_s = round(now - began, 1)
                    reason = self._wait_reason(members)
                    raise LeaseTimeoutError(str(self._requirement), waited_s, reason)
                self._pause(ticket, changes, version, deadline, cancelled)
        except BaseException:
            if rows:
                self._give_up(rows, "its grant was interrupted")
            with suppress(LedgerError):  # the first error says more
                self._ledger.withdraw(ticket)
            raise

    def _enqueue(self, members: Mapping[str, Member]) -> int:
        return self._ledger.enqueue(
            self._owner,
            list(members),
            self._requirement.count,
            priority=self._context.config.lease.priority,
            purpose=self._purpose,
        )

    def _wait_reason(self, members: Mapping[str, Member]) -> str:
        rows = self._ledger.rows(list(members))
        return describe_wait([status_of(members[key], rows[key]) for key in members if key in rows])

    @property
    def _refresh_s(self) -> float:
        """Often enough to keep the place in the queue."""
        return min(_REFRESH_S, self._ledger.ttl_s / 4)

    def _pause(
        self,
        ticket: int,
        changes: int,
        version: int,
        deadline: float | None,
        cancelled: Callable[[], bool],
    ) -> None:
        """Wait for a change by this process, or for one by another, and then for those before it.

        So a device that becomes free is first looked at by the one whose turn it is.
        """
        turn_s = _TURN_S * self._ledger.turns_before(ticket)
        end = time.monotonic() + self._refresh_s
        if deadline is not None:
            end = min(end, deadline)
        while time.monotonic() < end:
            poll_s = random.uniform(*_POLL_S)  # noqa: S311 - spreads the load, no secret
            if self._context.changes.wait_beyond(changes, poll_s) or cancelled():
                return
            if (latest := self._ledger.version()) != version:
                version = latest
                end = min(end, time.monotonic() + turn_s)

    def _fence(self, rows: Sequence[LeaseRow], members: Mapping[str, Member]) -> Lease | None:
        """Raise the fences of all devices that were granted.

        If one fails, the failures are reported, all devices are given back and the result is
        `None`.
        """
        token, claims = rows[0].token, self._context.claims
        min_free_bytes = self._requirement.min_free_bytes

        def claim(row: LeaseRow) -> ClaimedDevice | HarnessError:
            try:
                member = members[row.key]
                return claims.claim(token, row.key, member, min_free_bytes=min_free_bytes)
            except HarnessError as error:
                return error

        self._context.heartbeat.start(rows)
        if len(rows) == 1:
            outcomes = [claim(rows[0])]
        else:
            with ThreadPoolExecutor(min(len(rows), _MAX_PARALLEL_CLAIMS)) as threads:
                outcomes = list(threads.map(claim, rows))
        claimed = [outcome for outcome in outcomes if isinstance(outcome, ClaimedDevice)]
        if len(claimed) == len(rows):
            return Lease(self._context, token, claimed)
        for row, outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, ClaimedDevice):
                outcome.fence.give_back(outcome.device)
            else:
                self._report(row, outcome)
        self._give_up(rows, "not used: another device failed")
        self._context.changes.notify()
        return None

    def _give_up(self, rows: Sequence[LeaseRow], reason: str) -> None:
        """Give the devices back. Where the ledger cannot be used, they are free after the TTL."""
        token = rows[0].token
        self._context.heartbeat.stop(token)
        with suppress(LedgerError):
            self._ledger.release(token, [row.key for row in rows], reason)

    def _report(self, row: LeaseRow, error: HarnessError) -> None:
        least = self._requirement.min_free_bytes
        if isinstance(error, DeviceFullError) and error.needed_bytes == least > 0:
            return  # the device is sound, and the ledger now knows its free space
        if isinstance(error, LeaseLostError):
            return  # so is it, but knows a token that the ledger did not; now it does
        # Any error of a device counts: a device that cannot be claimed cannot be used.
        is_full = isinstance(error, DeviceFullError)
        least_weight = 1.0 if isinstance(error, DeviceError) and not is_full else 0.0
        report = FailureReport.of(error, recover=True, least_weight=least_weight)
        self._ledger.report(row.key, row.token, report)
