"""Administration of devices by people: drain, reserve, release, recover, probation."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from harness.devices.socket_owner import user_name
from harness.errors import PoolError, WrongUseError, one_line
from harness.pool.ledger import Ledger
from harness.pool.members import NOT_PROBED, Members
from harness.pool.owner import this_process
from harness.pool.records import DeviceRow, Reservation
from harness.pool.requirement import OnProgress, ignore_progress
from harness.pool.states import Event, MemberState
from harness.pool.upkeep import Upkeep


@dataclass(frozen=True, slots=True)
class PoolAdmin:
    """Actions of people on the devices of a pool, which they name by their names in the pool.

    Each action returns the state of the device after it. All raise `UnknownMemberError` if the pool
    has no such device, `PoolError` if its state forbids the action, and `LedgerError` if the ledger
    cannot be used.
    """

    ledger: Ledger
    members: Members
    upkeep: Upkeep

    def drain(self, name: str, reason: str, *, by: str = "") -> MemberState:
        """Grant a device to nobody any more; its current holder may finish."""
        return self._apply(name, Event.DRAIN, f"{one_line(reason) or 'drained'} ({by or _user()})")

    def undrain(self, name: str, *, by: str = "") -> MemberState:
        """Take back a drain."""
        state = self._row(name).state
        if state is not MemberState.DRAINING:
            raise PoolError(f"{name} is {state}: only what is drained can be undrained")
        state = self._apply(name, Event.UNDRAIN, f"undrained ({by or _user()})")
        row = self._row(name)
        if state is MemberState.READY and not (row.leases or row.facts.soc):
            self._record_unprobed(name)  # nobody knows whether it is there
            return self._row(name).state
        return state

    def reserve(
        self, names: Sequence[str], duration_s: float, *, start: float | None = None, by: str = ""
    ) -> None:
        """Reserve devices for a user, this one by default: nobody else leases them in that time.

        Args:
            start: seconds since 1970; `None` is now. Leases of others that are out then end.
        """
        if start is not None and start + duration_s <= self.ledger.now():
            raise WrongUseError("that time is over")
        keys = {self._key(name): name for name in names}
        obstacles = self.ledger.reserve(keys, by or _user(), start, duration_s)
        if obstacles:
            name, other = keys[obstacles[0].key], obstacles[0].describe(time.time())
            reason = f"choose another time, or `qnnfarm pool unreserve {obstacles[0].number}`"
            raise PoolError(f"{name} is {other}: {reason}")

    def unreserve(self, number: int) -> Reservation:
        """Cancel a reservation, and return it."""
        reservation = self.ledger.cancel_reservation(number, _user())
        if reservation is None:
            raise WrongUseError(f"there is no reservation {number}: `qnnfarm pool show` lists them")
        return reservation

    def release(self, name: str, *, token: int | None = None, by: str = "") -> bool:
        """Take a device from its holder, or only from the holder of `token`.

        Returns whether that was the holder: a new owner's lease is not touched.
        """
        lease = self._row(name).lease
        if lease is None or token not in {None, lease.token}:
            return False
        by = by or this_process().label
        released = self.ledger.release(
            lease.grant, [lease.key], f"{by} took it from {lease.holder}", taken_by=by
        )
        return bool(released)

    def unquarantine(self, name: str, *, on_progress: OnProgress = ignore_progress) -> MemberState:
        """Start the probation run of a quarantined device now; it is ready if it passes."""
        state = self._row(name).state
        if state is not MemberState.QUARANTINED:
            stuck = state in {MemberState.RECOVERING, MemberState.ABSENT}
            hint = f": `qnnfarm pool recover {name}` tries it now" if stuck else ""
            raise PoolError(f"{name} is {state}: it is not in quarantine{hint}")
        return self._repair(name, on_progress)

    def recover(
        self, name: str, *, take: bool = False, on_progress: OnProgress = ignore_progress
    ) -> MemberState:
        """Take a device through the steps of recovery now, beginning with the first.

        Args:
            take: take the device even from a holder of another ledger.
        """
        row = self._row(name)
        if row.lease is not None or row.state in {MemberState.LEASED, MemberState.PROBATION}:
            raise PoolError(f"{name} is {row.state}: it is in use; release it first")
        if row.state in {MemberState.DRAINING, MemberState.QUARANTINED}:
            command = "undrain" if row.state is MemberState.DRAINING else "unquarantine"
            raise PoolError(f"{name} is {row.state}: {command} it instead")
        self._apply(name, Event.RECOVER, f"recovery was asked for ({_user()})")
        return self._repair(name, on_progress, take=take)

    def _repair(self, name: str, on_progress: OnProgress, *, take: bool = False) -> MemberState:
        self.upkeep.repair(
            self.members.member(name),
            self._key(name),
            force=True,
            from_others=take,
            on_progress=on_progress,
        )
        return self._row(name).state

    def _apply(self, name: str, event: Event, reason: str) -> MemberState:
        return self.ledger.apply(self._key(name), event, reason)

    def _key(self, name: str) -> str:
        """Return the key of a member, after recording a member that was never probed as absent."""
        return self.members.key_of(name) or self._record_unprobed(name)

    def _record_unprobed(self, name: str) -> str:
        spec = str(self.members.member(name).spec)
        key = self.ledger.record_absent(name, spec, NOT_PROBED, probed=False)
        self.members.set_key(name, key)
        return key

    def _row(self, name: str) -> DeviceRow:
        key = self._key(name)
        self.ledger.reconcile()
        return self.ledger.rows([key])[key]


def _user() -> str:
    return user_name(os.getuid())
