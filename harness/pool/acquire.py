"""Getting a lease: a place in the queue, the grant, and the fences on the devices."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from harness.errors import (
    DeviceError,
    DeviceFullError,
    HarnessError,
    LeaseLostError,
    LeaseTimeoutError,
)
from harness.pool.base import MemberState, Requirement
from harness.pool.changes import Changes
from harness.pool.claims import Claims, Held
from harness.pool.clock import Clock
from harness.pool.evidence import judge
from harness.pool.fence import HigherTokenError
from harness.pool.heart import Heart
from harness.pool.lease import Lease
from harness.pool.ledger import Ledger
from harness.pool.members import Member
from harness.pool.owner import Owner
from harness.pool.rows import LeaseRow

_POLL_S = (0.02, 0.1)
_LOOK_AGAIN_S = 1.0
_AFTER_FAILURE_S = 0.05
_MOST_CLAIMS = 16


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
        ticket = self._ledger.enqueue(self._owner, list(found), requirement.count)
        looked = time.monotonic()
        failures = 0
        try:
            while True:
                before = changes.count
                try:
                    rows = self._ledger.try_grant(ticket, self._owner, purpose)
                except LeaseLostError:  # suspended for so long that the queue went on without us
                    ticket = self._ledger.enqueue(self._owner, list(found), requirement.count)
                    continue
                if rows:
                    lease = self._take(rows, found, requirement, changes)
                    if lease is not None:
                        return lease
                    self._ledger.put_back(ticket)
                    time.sleep(min(_AFTER_FAILURE_S * 2.0**failures, _LOOK_AGAIN_S))
                    failures = min(failures + 1, 10)
                now = time.monotonic()
                if rows or now - looked > _LOOK_AGAIN_S:
                    while_waiting()
                    found = find()
                    self._ledger.reconsider(ticket, list(found))
                    looked = now
                if cancelled() or (deadline is not None and now >= deadline):
                    waited_s = round(now - began, 1)
                    raise LeaseTimeoutError(
                        str(requirement), waited_s, _in_the_way(found, self._ledger)
                    )
                self._pause(changes, before, deadline, cancelled)
        finally:
            self._ledger.settle(ticket)

    def _pause(
        self,
        changes: Changes,
        seen: int,
        deadline: float | None,
        cancelled: Callable[[], bool],
    ) -> None:
        """Wait for a change: of this process at once, of others by looking again soon."""
        before = self._ledger.version()
        end = time.monotonic() + _LOOK_AGAIN_S
        if deadline is not None:
            end = min(end, deadline)
        while time.monotonic() < end:
            poll_s = random.uniform(*_POLL_S)  # noqa: S311 - it spreads, no secret
            if changes.wait_beyond(seen, poll_s):
                return
            if self._ledger.version() != before or cancelled():
                return

    def _take(
        self,
        rows: Sequence[LeaseRow],
        found: Mapping[str, Member],
        requirement: Requirement,
        changes: Changes,
    ) -> Lease | None:
        """Fence the granted devices; `None` if one of them cannot be used after all."""
        token, keys = rows[0].token, [row.key for row in rows]

        self._heart.add(token, len(rows), rows[0].beat + rows[0].ttl)
        claimed = self._claim_all(token, {key: found[key] for key in keys}, requirement)
        if claimed is None:
            changes.notify()
            return None
        token, parts = claimed
        lease = Lease(self._ledger, self._clock, self._heart, token, changes.notify)
        lease.begin([part.under(lease) for part in parts])
        return lease

    def _claim_all(
        self, token: int, members: Mapping[str, Member], requirement: Requirement
    ) -> tuple[int, Sequence[Held]] | None:
        try:
            while True:
                outcomes = self._each(token, members, requirement.min_free_bytes)
                higher = [o.args[0] for o in outcomes.values() if isinstance(o, HigherTokenError)]
                if not higher:
                    break
                new = self._ledger.raise_token(token, max(higher))
                if new is None:
                    self._heart.drop(token)
                    return None
                self._heart.rename(token, new)
                token = new
        except BaseException:
            self._give_up(token, members, "its grant was interrupted")
            raise
        failed = {k: o for k, o in outcomes.items() if isinstance(o, HarnessError)}
        if failed:
            self._report(token, failed, requirement)
            self._give_up(token, members, "not used: another device failed")
            return None
        return token, [o for o in outcomes.values() if isinstance(o, Held)]

    def _give_up(self, token: int, members: Mapping[str, Member], reason: str) -> None:
        self._heart.drop(token)
        self._ledger.release(token, list(members), reason)

    def _each(
        self, token: int, members: Mapping[str, Member], min_free_bytes: int
    ) -> dict[str, "Held | HarnessError | HigherTokenError"]:
        def one(
            key: str,
        ) -> "Held | HarnessError | HigherTokenError":
            try:
                return self._claims.claim(token, key, members[key], min_free_bytes=min_free_bytes)
            except (HarnessError, HigherTokenError) as error:
                return error

        if len(members) == 1:
            return {key: one(key) for key in members}
        with ThreadPoolExecutor(min(len(members), _MOST_CLAIMS)) as threads:
            return dict(zip(members, threads.map(one, members), strict=True))

    def _report(
        self, token: int, failed: Mapping[str, HarnessError], requirement: Requirement
    ) -> None:
        for key, error in failed.items():
            # It is sound, and known now for what it has free.
            wanted = requirement.min_free_bytes
            if isinstance(error, DeviceFullError) and error.needed_bytes == wanted > 0:
                continue
            judgement = replace(judge(error), recover=True)
            if isinstance(error, DeviceError):  # whatever it is: it cannot be used
                judgement = replace(judgement, weight=max(judgement.weight, 1.0))
            self._ledger.report(key, token, judgement)


def _in_the_way(found: Mapping[str, Member], ledger: Ledger) -> str:
    rows = ledger.devices(list(found))
    words = []
    for key, member in found.items():
        row = rows.get(key)
        if row is None:
            continue
        if row.state is MemberState.LEASED and row.lease is not None:
            words.append(f"{member.name} is held by {row.lease.holder}")
        else:
            words.append(f"{member.name} is {row.state} ({row.reason})")
    more = f", and {len(words) - 6} more" if len(words) > 6 else ""
    return "; ".join(words[:6]) + more
