"""Ledgers with a manual clock and processes that a test declares dead, in SQLite and PostgreSQL."""

import os
import secrets
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from psycopg.errors import UndefinedTable
from sqlalchemy import Connection, Row, text

from harness.clock import Clock
from harness.devices.adb.client import AdbServer
from harness.devices.spec import DeviceSpec
from harness.pool import records
from harness.pool.config import PoolConfig, QuarantineConfig, parse_config
from harness.pool.context import Heartbeat, PoolContext
from harness.pool.database import Database
from harness.pool.failure_policy import FailureReport
from harness.pool.ledger import Ledger
from harness.pool.members import Member
from harness.pool.opener import Opener
from harness.pool.owner import Owner, host_id
from harness.pool.pool import Pool
from harness.pool.records import Facts, LeaseRow
from harness.pool.states import Event
from tests.clock import ManualClock
from tests.postgresql_server import PostgresqlServer
from tests.system import VIRTUAL, needs, program
from tests.waiting import wait_for_upkeep

if TYPE_CHECKING:
    from plugins.virtual_android import manager

TTL_S = 30.0


class ManualDatabase(Database):
    """A database whose time is that of a test's clock, also on a server."""

    def times(self, _: Connection, clock: Clock, /) -> tuple[float, float]:
        return clock.now(), clock.boottime()


@dataclass
class Bench:
    """A ledger with its clock, its dead processes and its rule."""

    location: str | Path
    clock: ManualClock = field(default_factory=ManualClock)
    dead: set[int] = field(default_factory=set)
    rule: QuarantineConfig = field(default_factory=QuarantineConfig)

    def __post_init__(self) -> None:
        self.database = ManualDatabase(self.location)
        self.ledger = Ledger(
            self.database,
            self.clock,
            ttl_s=TTL_S,
            rule=self.rule,
            ended=lambda owner: owner.pid in self.dead,
        )

    @property
    def path(self) -> Path:
        """The file of a ledger in SQLite."""
        assert self.database.path is not None
        return self.database.path

    def sql(self, statement: str, **values: object) -> list[Row[Any]]:
        """Run a statement past the ledger; return its rows."""

        def run(db: Connection) -> list[Row[Any]]:
            result = db.execute(text(statement), values)
            return list(result) if result.returns_rows else []

        return self.database.write(run)

    def add(self, *names: str) -> None:
        for name in names:
            self.ledger.record_found(name, name, f"spec:{name}", Facts("SM8750", "v79", 1 << 30))

    def ask(self, pid: int, *keys: str, count: int = 1, priority: int = 0) -> int:
        """Let a process wait for devices; return the ticket."""
        return self.ledger.enqueue(process(pid), keys, count, priority=priority)

    def lease(self, pid: int, *keys: str) -> str:
        """Lease devices for a process; return the grant."""
        ticket = self.ask(pid, *keys, count=len(keys))
        rows = self.ledger.try_grant(ticket)
        assert rows
        self.ledger.settle(ticket)
        return rows[0].grant

    def fail(self, key: str, report: FailureReport, pid: int = 1) -> str:
        """Lease a device, report a failure, and release it; return what is blamed in its place."""
        grant = self.lease(pid, key)
        blame = self.ledger.report(key, grant, report)
        self.ledger.release(grant, [key], used=[key])
        assert blame is not None
        return blame

    def begin_repair(self, key: str, pid: int = 2, *, force: bool = False) -> LeaseRow:
        lease = self.ledger.begin_repair(key, process(pid), force=force)
        assert lease is not None
        return lease

    def repair(self, key: str, end: Event, *, force: bool = False, retry_in_s: float = 0) -> None:
        """Repair a device, from beginning to end."""
        grant = self.begin_repair(key, force=force).grant
        assert self.ledger.end_repair(key, grant, end, f"it {end}", retry_in_s=retry_in_s)

    def context(self, opener: object = None, heartbeat: Heartbeat | None = None) -> PoolContext:
        """Return the context of a pool on this ledger; without `opener`, nothing can be claimed."""
        beats = heartbeat or Heartbeat(self.ledger)
        return PoolContext(PoolConfig(), self.clock, self.ledger, cast("Opener", opener), beats)

    def state(self, key: str) -> str:
        return str(self.ledger.rows([key])[key].state)

    def reason(self, key: str) -> str:
        return self.ledger.rows([key])[key].reason


def process(pid: int) -> Owner:
    return Owner(host_id(), "boot", pid, 1, "ns", f"process {pid}")


def pool_of(
    spec: str,
    ledger: str | Path,
    config: str = "",
    opener: type[Opener] = Opener,
    *,
    name: str = "dut",
    probe: bool = True,
) -> Pool:
    """Open a pool of one device; also for programs that tests start."""
    read, member = parse_config(config), Member(name, DeviceSpec.parse(spec))
    return Pool([member], read, opener(read), ledger=Path(ledger), probe=probe)


def close(pool: Pool) -> None:
    """Close it, and wait for upkeep, which could start an adb server or device of later tests."""
    pool.close()
    wait_for_upkeep()


def on_a_small_disk(folder: Path, size: str, *words: str) -> list[str]:
    """Return a command line that runs words with a disk of its own, in memory, at a folder."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = f'mount -t tmpfs -o size={size} none "$1" && shift && exec "$@"'
    unshare = [str(program("unshare")), "--mount", *user, "sh", "-c", mount, "sh"]
    return [*unshare, str(folder), *words]


@pytest.fixture(scope="module")
def two_devices(adb_server: AdbServer) -> "Iterator[tuple[manager.VirtualDevice, ...]]":
    """Two virtual devices that the tests of a file share, behind the adb server."""
    needs(VIRTUAL)
    from plugins.virtual_android import manager

    devices = tuple(manager.start(f"p{secrets.token_hex(3)}", "SM8750") for _ in range(2))
    for device in devices:
        adb_server.connect(device.serial)
    yield devices
    for device in devices:
        manager.remove(device.name)
        adb_server.disconnect(device.serial)


@pytest.fixture
def server_location(postgresql_server: PostgresqlServer) -> str:
    """Location of an empty ledger on a server."""
    names = ", ".join(records.METADATA.tables)
    with closing(postgresql_server.connect()) as connection, suppress(UndefinedTable):
        connection.execute(f"TRUNCATE {names} RESTART IDENTITY".encode())
    return postgresql_server.url("postgres")


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """A ledger in a file, and with `on_each_database` also on a server."""
    kind = getattr(request, "param", "sqlite")
    location = request.getfixturevalue("server_location") if kind == "postgresql" else None
    made = Bench(location or tmp_path / "pool.db")
    yield made
    made.database.close()


on_each_database = pytest.mark.parametrize("bench", ["sqlite", "postgresql"], indirect=True)
"""For tests that together make every statement of the ledger."""
