"""The devices that the ledger knows: their addresses, facts, fences, states and history."""

from collections.abc import Collection
from dataclasses import dataclass

from harness.pool.base import MemberState
from harness.pool.book import Book
from harness.pool.evidence import Evidence
from harness.pool.rows import DeviceRow, Facts, KnownFence, device_of, lease_of
from harness.pool.states import Event


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """Something that happened to a device; `at` is in seconds since 1970."""

    at: float
    what: str
    text: str


class Register:
    """What is known of devices, whoever holds them. They are named by keys.

    All methods raise `LedgerError` when the file cannot be used.
    """

    def __init__(self, book: Book) -> None:
        self._book = book

    def keys_of(self, specs: Collection[str]) -> dict[str, str]:
        """The devices that were last reached under those addresses, as far as any were."""
        with self._book.reading() as db:
            rows = db.execute("SELECT spec, key FROM addresses").fetchall()
        return {row["spec"]: row["key"] for row in rows if row["spec"] in specs}

    def facts_version(self) -> int:
        """A number that rises whenever an address or the facts of a device may have changed."""
        with self._book.reading() as db:
            return int(db.execute("SELECT value FROM counters WHERE name = 'facts'").fetchone()[0])

    def register_found(self, key: str, name: str, spec: str, facts: Facts) -> None:
        """A device answered under `spec`: from now on that address means this device."""
        with self._book.writing() as t:
            known = t.db.execute("SELECT key FROM addresses WHERE spec = ?", (spec,)).fetchone()
            t.point(spec, key)
            if known is not None and known["key"] != key:
                t.forget_nameless(known["key"], spec)
            t.ensure(key, name, spec, MemberState.READY, "it answered")
            t.set_facts(key, name, spec, facts)
            t.move(key, Event.FOUND, "it answered")

    def register_absent(self, name: str, spec: str, reason: str) -> str:
        """A device was looked for under `spec` and is not there; gives its key."""
        with self._book.writing() as t:
            row = t.db.execute("SELECT key FROM addresses WHERE spec = ?", (spec,)).fetchone()
            key = spec if row is None else str(row["key"])
            t.point(spec, key)
            t.ensure(key, name, spec, MemberState.ABSENT, reason)
            t.move(key, Event.LOST, reason)
            return key

    def set_free_bytes(self, key: str, free_bytes: int | None) -> None:
        """Remember what a device has free now."""
        with self._book.writing() as t:
            t.db.execute("UPDATE devices SET free_bytes = ? WHERE key = ?", (free_bytes, key))
            t.facts_changed()

    def set_fence(self, key: str, fence: KnownFence) -> None:
        """Remember the fence on a device."""
        with self._book.writing() as t:
            t.db.execute(
                "UPDATE devices SET fence = ?, root = ?, quiet = ? WHERE key = ?",
                (fence.id, fence.root, fence.quiet, key),
            )

    def fence_of(self, key: str) -> KnownFence:
        """What is remembered of the fence on a device."""
        with self._book.reading() as db:
            row = db.execute(
                "SELECT fence, root, quiet FROM devices WHERE key = ?", (key,)
            ).fetchone()
        return KnownFence(*row) if row else KnownFence()

    def rows(self, keys: Collection[str]) -> dict[str, DeviceRow]:
        """Those of `keys` that are known, as they are now."""
        wanted = tuple(keys)
        among = f"WHERE key IN ({', '.join('?' * len(wanted))})"
        with self._book.reading() as db:
            leases = {
                row["key"]: lease_of(row)
                for row in db.execute(f"SELECT * FROM leases {among}", wanted)  # noqa: S608
            }
            evidence: dict[str, list[Evidence]] = {}
            for row in db.execute(
                f"SELECT key, lease, weight, kind, text FROM evidence {among}"  # noqa: S608
                " AND settled = 0 AND weight > 0 ORDER BY id",
                wanted,
            ):
                found = Evidence(row["lease"], row["weight"], row["kind"], row["text"])
                evidence.setdefault(row["key"], []).append(found)
            rows = db.execute(f"SELECT * FROM devices {among}", wanted).fetchall()  # noqa: S608
        return {
            row["key"]: device_of(
                row,
                leases.get(row["key"]),
                tuple(self._book.rule.counted(evidence.get(row["key"], ()), row["leases"])),
            )
            for row in rows
        }

    def history(self, key: str) -> list[HistoryEntry]:
        """What happened to a device, oldest first, as far as it is kept."""
        with self._book.reading() as db:
            rows = db.execute(
                "SELECT at, what, text FROM history WHERE key = ? ORDER BY id", (key,)
            ).fetchall()
        return [HistoryEntry(row["at"], row["what"], row["text"]) for row in rows]

    def note(self, key: str, what: str, text: str) -> None:
        """Write something into a device's history."""
        with self._book.writing() as t:
            t.note(key, what, text)

    def event(self, key: str, event: Event, reason: str) -> MemberState:
        """Let something happen to a device that nobody's lease protects; gives its state then."""
        with self._book.writing() as t:
            if event is Event.UNDRAIN:
                return t.undrain(key, reason)
            if event in {Event.FAILED, Event.RECOVER}:
                t.begin_anew(key)
            t.move(key, event, reason)
            return t.state(key)
