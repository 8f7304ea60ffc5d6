"""Recovery and probation as the ledger sees them: work on a device, under a lease of its own."""

from collections.abc import Sequence

from harness.pool.base import MemberState
from harness.pool.book import Book
from harness.pool.owner import Owner
from harness.pool.rows import LeaseRow
from harness.pool.states import Event

CUT_OFF = "its process ended in the middle of it"
_WORK = {MemberState.RECOVERING, MemberState.QUARANTINED, MemberState.ABSENT}


class Repairs:
    """Which devices are to be worked on, and who does.

    All methods raise `LedgerError` when the file cannot be used.
    """

    def __init__(self, book: Book) -> None:
        self._book = book

    def due(self) -> Sequence[str]:
        """The devices for which `begin` would do something now, first who waits for it longest."""
        states = ", ".join(f"'{state}'" for state in _WORK)
        now = self._book.clock.now()
        with self._book.reading() as db:
            rows = db.execute(
                f"SELECT key FROM devices WHERE state IN ({states})"  # noqa: S608
                " AND (due <= ? OR since > ?) AND key NOT IN (SELECT key FROM leases)"
                " ORDER BY due, since, key",
                (now, now),
            ).fetchall()
        return [row["key"] for row in rows]

    def begin(self, key: str, owner: Owner, *, force: bool = False) -> LeaseRow | None:
        """A lease to recover a device or to try one in quarantine; `None` if it is not to be done.

        `force` does not wait until the next attempt is due.
        """
        with self._book.writing() as t:
            t.bury(self._book.gone)
            row = t.db.execute("SELECT * FROM devices WHERE key = ?", (key,)).fetchone()
            busy = t.db.execute("SELECT 1 FROM leases WHERE key = ?", (key,)).fetchone()
            if row is None or busy:
                return None
            # A clock that was set back since would put it off for as long.
            if row["since"] <= self._book.clock.now() < row["due"] and not force:
                return None
            state = MemberState(row["state"])
            if state not in _WORK:
                return None
            if state is MemberState.ABSENT:
                t.move(key, Event.RECOVER, "looked for again")
            if state is MemberState.QUARANTINED:
                t.move(key, Event.TRIED, "a probation run decides")
            token = t.next_token()
            purpose = "probation" if state is MemberState.QUARANTINED else "recovery"
            return t.insert_lease(key, token, owner, purpose)

    def reached(self, key: str, token: int, step: str) -> None:
        """A step of recovery begins: whoever goes on with it need not take those before it."""
        with self._book.writing() as t:
            t.db.execute(
                "UPDATE devices SET step = ?, step_at = ? WHERE key = ?"
                " AND key IN (SELECT key FROM leases WHERE token = ?)",
                (step, self._book.clock.now(), key, token),
            )

    def put_down(self, key: str, token: int) -> None:
        """Leave a recovery to the next process that has the time for it, which is due at once."""
        with self._book.writing() as t:
            done = t.db.execute(
                "DELETE FROM leases WHERE key = ? AND token = ?", (key, token)
            ).rowcount
            if done and t.state(key) is MemberState.LEASED:  # drained and undrained meanwhile
                t.move(key, Event.FAILED, CUT_OFF)
            elif done:
                t.note(key, "recovery", CUT_OFF)

    def end(
        self, key: str, token: int, event: Event, reason: str, *, retry_in_s: float = 0.0
    ) -> bool:
        """How the work ended: the device goes on by `event`; after a failure, not before a while.

        A probation that was passed settles all evidence from before it.
        """
        with self._book.writing() as t:
            done = t.db.execute(
                "DELETE FROM leases WHERE key = ? AND token = ?", (key, token)
            ).rowcount
            if not done:
                return False
            if event in {Event.RECOVERED, Event.PASSED}:
                t.begin_anew(key)
            else:
                t.db.execute(
                    "UPDATE devices SET attempts = attempts + 1, due = ?, step = '' WHERE key = ?",
                    (self._book.clock.now() + retry_in_s, key),
                )
            if event is Event.PASSED:
                t.settle_evidence(key)
            t.move(key, event, reason)
            return True
