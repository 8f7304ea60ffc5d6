"""Ledgers with a manual clock and processes that a test declares dead, in SQLite and PostgreSQL."""

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from psycopg.errors import UndefinedTable
from sqlalchemy import Connection, Row, text

from harness.clock import Clock
from harness.pool import schema
from harness.pool.config import PoolConfig, QuarantineConfig
from harness.pool.database import Database
from harness.pool.heartbeat import Heartbeat
from harness.pool.lease import PoolContext
from harness.pool.ledger import Ledger
from harness.pool.owner import Owner, host_id
from harness.pool.pool import Pool
from harness.pool.records import Facts
from tests.clock import ManualClock
from tests.postgresql_server import PostgresqlServer

if TYPE_CHECKING:
    from harness.pool.fence import FenceClaims
    from harness.pool.opener import Opener

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

    def lease(self, pid: int, *keys: str) -> int:
        """Lease devices for a process; return the token."""
        ticket = self.ledger.enqueue(process(pid), keys, len(keys))
        rows = self.ledger.try_grant(ticket)
        assert rows
        self.ledger.settle(ticket)
        return rows[0].token

    def context(
        self,
        *,
        claims: object = None,
        opener: object = None,
        config: PoolConfig | None = None,
    ) -> PoolContext:
        """Return the context of a pool on this ledger; without `claims`, nothing can be claimed."""
        return PoolContext(
            config or PoolConfig(),
            self.clock,
            self.ledger,
            cast("Opener", opener),
            Heartbeat(self.ledger),
            cast("FenceClaims", claims),
        )

    def state(self, key: str) -> str:
        return str(self.ledger.rows([key])[key].state)

    def reason(self, key: str) -> str:
        return self.ledger.rows([key])[key].reason


def process(pid: int) -> Owner:
    return Owner(host_id(), "boot", pid, 1, "ns", f"process {pid}")


def close(pool: Pool) -> None:
    """Close it, and wait for its upkeep, which could start an adb server or device of later tests.

    A closed pool's upkeep ends after the step that it is at.
    """
    pool.close()
    for thread in threading.enumerate():
        if thread.name.startswith("qnnfarm-upkeep-"):
            thread.join()


@pytest.fixture
def server_location(postgresql_server: PostgresqlServer) -> str:
    """Location of an empty ledger on a server."""
    names = ", ".join(schema.METADATA.tables)
    with closing(postgresql_server.connect()) as connection, suppress(UndefinedTable):
        connection.execute(f"TRUNCATE {names} RESTART IDENTITY".encode())
    return postgresql_server.url("postgres")


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Location of a new ledger, of each kind."""
    if request.param == "sqlite":
        return tmp_path / "pool.db"
    server: str = request.getfixturevalue("server_location")
    return server


@pytest.fixture
def bench(location: str | Path) -> Iterator[Bench]:
    """A ledger of each kind."""
    made = Bench(location)
    yield made
    made.database.close()


@pytest.fixture
def file_bench(tmp_path: Path) -> Iterator[Bench]:
    """A ledger in a file."""
    made = Bench(tmp_path / "pool.db")
    yield made
    made.database.close()
