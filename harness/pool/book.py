"""The file of the ledger with the clock and the rules that its transactions go by."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from sqlite3 import Connection

from harness.pool.clock import Clock
from harness.pool.database import Database
from harness.pool.evidence import QuarantineRule
from harness.pool.owner import Owner
from harness.pool.transaction import Transaction


@dataclass(frozen=True, slots=True)
class Book:
    """What all parts of the ledger share.

    Attributes:
        ttl_s: how long a heartbeat keeps a lease or a place in the queue.
        rule: when evidence is enough for quarantine.
        gone: whether a process has ended.
    """

    database: Database
    clock: Clock
    ttl_s: float
    rule: QuarantineRule
    gone: Callable[[Owner], bool]

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        """A transaction that alone may write.

        Raises:
            LedgerError: the file cannot be used.
        """
        with self.database.writing() as db:
            yield Transaction(db, self.clock, self.ttl_s, self.rule)

    def reading(self) -> AbstractContextManager[Connection]:
        """One consistent view; see `Database.reading`."""
        return self.database.reading()
