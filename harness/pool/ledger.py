"""Who holds what, on this host: transactions over one small file. No device is touched in one."""

from collections.abc import Callable

from harness.pool.book import Book
from harness.pool.clock import Clock
from harness.pool.database import Database
from harness.pool.evidence import QuarantineRule
from harness.pool.leases import Leases
from harness.pool.owner import Owner, has_ended
from harness.pool.register import Register
from harness.pool.repairs import Repairs
from harness.pool.tickets import Tickets


class Ledger:
    """The one place that says who holds which device.

    Devices are named by keys that stay when addresses change. All methods, and those of the parts,
    raise `LedgerError` when the file cannot be used.

    Args:
        ttl_s: how long a heartbeat keeps a lease or a place in the queue.
        rule: when evidence is enough for quarantine.
        gone: whether a process has ended.

    Attributes:
        devices: what is known of them.
        tickets: who waits.
        leases: who holds what.
        repairs: who recovers what, or tries it.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        ttl_s: float,
        rule: QuarantineRule,
        gone: Callable[[Owner], bool] = has_ended,
    ) -> None:
        self._database = database
        self._book = Book(database, clock, ttl_s, rule, gone)
        self.devices = Register(self._book)
        self.tickets = Tickets(self._book)
        self.leases = Leases(self._book)
        self.repairs = Repairs(self._book)

    def version(self) -> int:
        """A number that changes when another process has changed the ledger."""
        return self._database.version()

    def reconcile(self) -> None:
        """End what belongs to processes that are gone, and repair what contradicts itself."""
        with self._book.writing() as t:
            t.bury(self._book.gone)
