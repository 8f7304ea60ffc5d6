"""Leases that were granted: kept by heartbeats, reported under, and ended."""

from collections.abc import Collection, Mapping

from harness.pool.book import Book
from harness.pool.clock import on_the_wall
from harness.pool.evidence import Judgement
from harness.pool.states import Event
from harness.pool.transaction import LOST


class Leases:
    """Who holds what. A lease is named by its token, and may have several devices.

    All methods raise `LedgerError` when the file cannot be used.
    """

    def __init__(self, book: Book) -> None:
        self._book = book

    @property
    def ttl_s(self) -> float:
        """How long a heartbeat keeps a lease."""
        return self._book.ttl_s

    def heartbeat(self, leases: Mapping[int, int]) -> dict[int, float | None]:
        """Keep leases; gives the `CLOCK_BOOTTIME` until which each is good, `None` if it is lost.

        One that has run out is never revived, even if nobody took the device yet.

        Args:
            leases: the number of devices of each, by its token.
        """
        with self._book.writing() as t:
            now = self._book.clock.boottime()
            good: dict[int, float | None] = {}
            for token, count in leases.items():
                kept = t.db.execute(
                    "UPDATE leases SET beat = ? WHERE token = ? AND beat + ttl > ?",
                    (now, token, now),
                ).rowcount
                t.db.execute("UPDATE tickets SET beat = ? WHERE token = ?", (now, token))
                good[token] = now + self._book.ttl_s if kept == count else None
            return good

    def holds(self, token: int, key: str) -> bool:
        """Whether the lease of that token still has the device."""
        with self._book.reading() as db:
            row = db.execute(
                "SELECT beat + ttl AS until FROM leases WHERE key = ? AND token = ?", (key, token)
            ).fetchone()
        return row is not None and row["until"] > self._book.clock.boottime()

    def in_use(self, *, besides: str) -> bool:
        """Whether anybody holds a device other than `besides`."""
        with self._book.reading() as db:
            row = db.execute("SELECT 1 FROM leases WHERE key != ?", (besides,)).fetchone()
        return row is not None

    def raise_token(self, token: int, above: int, count: int) -> int | None:
        """A higher token for a lease, where a device knows of a higher one; `None` if it is lost.

        That happens when the ledger was removed, or when another host leases the same device.

        Args:
            count: the devices of the lease. One that lost any of them is lost: with a higher token
                it would shut out who has that device now.
        """
        with self._book.writing() as t:
            now = self._book.clock.boottime()
            held = t.db.execute(
                "SELECT count(*) FROM leases WHERE token = ? AND beat + ttl > ?", (token, now)
            ).fetchone()[0]
            if held != count:
                return None
            t.db.execute("UPDATE counters SET value = max(value, ?) WHERE name = 'token'", (above,))
            new = t.next_token()
            t.db.execute("UPDATE leases SET token = ? WHERE token = ?", (new, token))
            t.db.execute("UPDATE tickets SET token = ? WHERE token = ?", (new, token))
            return new

    def report(self, key: str, token: int, judgement: Judgement) -> bool:
        """Evidence from the holder of a lease; `False` if it holds it no more."""
        with self._book.writing() as t:
            row = t.db.execute(
                "SELECT failure FROM leases WHERE key = ? AND token = ?", (key, token)
            ).fetchone()
            if row is None:
                return False
            number = t.db.execute("SELECT leases FROM devices WHERE key = ?", (key,)).fetchone()[0]
            t.db.execute(
                "INSERT INTO evidence (key, at, lease, kind, weight, text) VALUES (?,?,?,?,?,?)",
                (
                    key,
                    self._book.clock.now(),
                    number,
                    judgement.kind,
                    judgement.weight,
                    judgement.text,
                ),
            )
            t.db.execute(
                "DELETE FROM evidence WHERE key = ? AND lease < ?",
                (key, number - self._book.rule.memory),
            )
            if judgement.recover:
                t.db.execute(
                    "UPDATE leases SET failure = ? WHERE key = ? AND token = ?",
                    (judgement.text, key, token),
                )
            return True

    def release(
        self,
        token: int,
        keys: Collection[str],
        reason: str = "released",
        *,
        unused: Collection[str] = (),
        taken_by: str = "",
    ) -> frozenset[str]:
        """End the lease of that token on those devices; gives those that it still held.

        What was reported during it decides what a device does next.

        Args:
            unused: those that were fenced for the lease, but never used under it.
            taken_by: who took the devices from their holder, whom `why_lost` tells.
        """
        released = set()
        with self._book.writing() as t:
            for key in keys:
                row = t.db.execute(
                    "DELETE FROM leases WHERE key = ? AND token = ? RETURNING failure",
                    (key, token),
                ).fetchall()
                if not row:
                    continue
                released.add(key)
                if key in unused:
                    t.db.execute("UPDATE devices SET quiet = ? WHERE key = ?", (token, key))
                if taken_by:
                    t.note_lost(key, token, f"{taken_by} took it back")
                t.give_back(key, row[0]["failure"], Event.RELEASED, reason)
        return frozenset(released)

    def why_lost(self, token: int, keys: Collection[str]) -> str:
        """Who ended the lease of that token, and when; empty where that was its holder."""
        with self._book.reading() as db:
            for key in keys:
                row = db.execute(
                    "SELECT at, text FROM history WHERE key = ? AND what = ? AND text LIKE ?"
                    " ORDER BY id DESC LIMIT 1",
                    (key, LOST, f"token {token}: %"),
                ).fetchone()
                if row is not None:
                    why = str(row["text"]).partition(": ")[2]
                    return f"{why}, at {on_the_wall(row['at'], self._book.clock.now())}"
        return ""
