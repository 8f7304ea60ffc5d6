"""Who waits for devices, in the order in which they came, and who is served next."""

import json
from collections.abc import Sequence

from harness.errors import LeaseLostError
from harness.pool.book import Book
from harness.pool.owner import Owner
from harness.pool.rows import OWNER_COLUMNS, LeaseRow, owner_of, owner_values
from harness.pool.transaction import OWNER_SLOTS


class Tickets:
    """The queue of all processes of this host.

    All methods raise `LedgerError` when the file cannot be used.
    """

    def __init__(self, book: Book) -> None:
        self._book = book

    def enqueue(self, owner: Owner, candidates: Sequence[str], count: int) -> int:
        """A place in the queue, behind all others; it has to be kept by `try_grant`."""
        with self._book.writing() as t:
            cursor = t.db.execute(
                f"INSERT INTO tickets (candidates, count, {OWNER_COLUMNS})"  # noqa: S608
                f" VALUES (?, ?, {OWNER_SLOTS})",
                (
                    json.dumps(list(candidates)),
                    count,
                    *owner_values(owner, self._book.clock.boottime(), self._book.ttl_s),
                ),
            )
            return int(cursor.lastrowid or 0)

    def reconsider(self, ticket: int, candidates: Sequence[str]) -> None:
        """Other devices for a ticket, which keeps its place."""
        with self._book.writing() as t:
            t.db.execute(
                "UPDATE tickets SET candidates = ? WHERE id = ?",
                (json.dumps(list(candidates)), ticket),
            )

    def try_grant(self, ticket: int, owner: Owner, purpose: str = "") -> list[LeaseRow] | None:
        """The leases of a ticket whose turn it is, all with one token; `None` while it is not.

        The ticket stays, out of the way of others, until `settle` ends it or `put_back` returns
        it to its place.

        Raises:
            LeaseLostError: the ticket is gone, for its process slept longer than the TTL.
        """
        with self._book.writing() as t:
            t.bury(self._book.gone)
            now = self._book.clock.boottime()
            kept = t.db.execute("UPDATE tickets SET beat = ? WHERE id = ?", (now, ticket)).rowcount
            if not kept:
                raise LeaseLostError(f"ticket {ticket}", 0, "its process slept for too long")
            keys = t.turn(ticket)
            if keys is None:
                return None
            token = t.next_token()
            t.db.execute("UPDATE tickets SET token = ? WHERE id = ?", (token, ticket))
            return [t.lease(key, token, owner, purpose) for key in keys]

    def settle(self, ticket: int) -> None:
        """A ticket was served, or is not wanted any more."""
        with self._book.writing() as t:
            t.db.execute("DELETE FROM tickets WHERE id = ?", (ticket,))

    def put_back(self, ticket: int) -> None:
        """A ticket's devices could not be used: it waits again, at the place that it had."""
        with self._book.writing() as t:
            t.db.execute("UPDATE tickets SET token = NULL WHERE id = ?", (ticket,))

    def waiting(self) -> list[Owner]:
        """Who waits, first the one who came first."""
        with self._book.reading() as db:
            rows = db.execute("SELECT * FROM tickets WHERE token IS NULL ORDER BY id").fetchall()
        return [owner_of(row) for row in rows]
