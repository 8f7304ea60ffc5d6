"""Devices that the ledger granted together: all of them fenced and made a lease, or given back."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from harness.errors import DeviceError, DeviceFullError, HarnessError, LedgerError
from harness.pool.base import Requirement
from harness.pool.changes import Changes
from harness.pool.claims import Claims, Held
from harness.pool.clock import Clock
from harness.pool.evidence import judge
from harness.pool.fence import HigherTokenError
from harness.pool.heart import Heart, Pulse
from harness.pool.lease import Lease
from harness.pool.leases import Leases
from harness.pool.members import Member
from harness.pool.rows import LeaseRow

_MOST_CLAIMS = 16

_Outcome = Held | HarnessError | HigherTokenError


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
        lease = Lease(self._leases, self._clock, self._heart, self._pulse, changes.notify)
        lease.begin([part.under(lease) for part in held])
        return lease

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
            judgement = replace(judge(error), recover=True)
            if isinstance(error, DeviceError):  # whatever it is: it cannot be used
                judgement = replace(judgement, weight=max(judgement.weight, 1.0))
            self._leases.report(key, self._pulse.token, judgement)
