"""What a person does to devices: takes them out and back, or from who holds them; tries them."""

from collections.abc import Callable

from harness.errors import MemberStateError, one_line
from harness.pool.ledger import Ledger
from harness.pool.members import NOT_LOOKED, Roster
from harness.pool.owner import this_process
from harness.pool.records import DeviceRow
from harness.pool.states import Event, MemberState
from harness.pool.status import Tell, silent
from harness.pool.upkeep import Upkeep


class ByHand:
    """Each names a device by its name in the pool, and gives the state that it has then.

    All raise `UnknownMemberError` where the pool has no such device, and `LedgerError` where the
    ledger cannot be used.

    Args:
        changed: called when a device may have become free.
    """

    def __init__(
        self, roster: Roster, ledger: Ledger, upkeep: Upkeep, changed: Callable[[], None]
    ) -> None:
        self._roster = roster
        self._ledger = ledger
        self._upkeep = upkeep
        self._changed = changed

    def drain(self, name: str, reason: str) -> MemberState:
        """Give a device to nobody any more; who holds it now may finish."""
        return self._event(name, Event.DRAIN, one_line(reason) or "drained")

    def undrain(self, name: str) -> MemberState:
        """Take back a drain.

        Raises:
            MemberStateError: it is not drained.
        """
        state = self._row(name).state
        if state is not MemberState.DRAINING:
            raise MemberStateError(name, state, "only what is drained can be undrained")
        state = self._event(name, Event.UNDRAIN, "undrained")
        row = self._row(name)
        if state is MemberState.READY and not (row.leases or row.facts.soc):
            self._register_unprobed(name)  # nobody knows whether it is there
            return self._row(name).state
        return state

    def release(self, name: str, *, token: int | None = None) -> bool:
        """Take a device from its holder: from the one that holds `token`, by default whoever does.

        Gives whether that was so: what a new owner holds meanwhile is not touched.
        """
        lease = self._row(name).lease
        if lease is None:
            return False
        by = this_process().label
        released = self._ledger.leases.release(
            token or lease.token, [lease.key], f"{by} took it from {lease.holder}", taken_by=by
        )
        self._changed()
        return bool(released)

    def unquarantine(self, name: str, *, tell: Tell = silent) -> MemberState:
        """Try a quarantined device now, without waiting: it is ready if its probation run passes.

        Args:
            tell: told of each step as it begins, and of how it went.

        Raises:
            MemberStateError: it is not in quarantine.
        """
        state = self._row(name).state
        if state is not MemberState.QUARANTINED:
            stuck = state in {MemberState.RECOVERING, MemberState.ABSENT}
            hint = f": `qnnfarm pool recover {name}` tries it now" if stuck else ""
            raise MemberStateError(name, state, f"it is not in quarantine{hint}")
        return self._work(name, tell)

    def recover(self, name: str, *, tell: Tell = silent) -> MemberState:
        """Take a device through the steps of recovery now, whatever is believed of it.

        Args:
            tell: told of each step as it begins, and of how it went.

        Raises:
            MemberStateError: somebody holds it, or it is drained or in quarantine.
        """
        row = self._row(name)
        if row.lease is not None or row.state in {MemberState.LEASED, MemberState.PROBATION}:
            raise MemberStateError(name, row.state, "it is in use; release it first")
        if row.state in {MemberState.DRAINING, MemberState.QUARANTINED}:
            wish = "undrain" if row.state is MemberState.DRAINING else "unquarantine"
            raise MemberStateError(name, row.state, f"{wish} it instead")
        self._event(name, Event.RECOVER, "recovery was asked for")
        return self._work(name, tell)

    def _work(self, name: str, tell: Tell) -> MemberState:
        """Recover it or try it now, also where that is not due yet."""
        self._upkeep.work(self._roster.member(name), self._key(name), force=True, tell=tell)
        return self._row(name).state

    def _event(self, name: str, event: Event, reason: str) -> MemberState:
        state = self._ledger.devices.event(self._key(name), event, reason)
        self._changed()
        return state

    def _key(self, name: str) -> str:
        """The device that a member is; one that nobody has looked at is absent until then."""
        key = self._roster.known(name)
        if key is None:
            key = self._register_unprobed(name)
            self._roster.learn(name, key)
        return key

    def _register_unprobed(self, name: str) -> str:
        spec = str(self._roster.member(name).spec)
        return self._ledger.devices.register_absent(name, spec, NOT_LOOKED, probed=False)

    def _row(self, name: str) -> DeviceRow:
        key = self._key(name)
        self._ledger.reconcile()
        return self._ledger.devices.rows([key])[key]
