"""Where a test keeps its results: a SQLite file, or a database of a real PostgreSQL server.

Tests that look past the store, or get into its way, do so through a `Place`.
"""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from harness.results.records import ContainerInfo, DeviceInfo, Provenance, Run, WorkloadRecord
from harness.results.run_recorder import insert_run
from harness.results.store import ResultsStore
from tests.postgresql_server import PostgresqlServer

EngineName = Literal["sqlite", "postgresql"]


def make_run(**changes: object) -> Run:
    """Make a run that is legal but for what is changed; the numbers are made up."""
    fields: dict[str, Any] = {
        "kind": "bench",
        "container": ContainerInfo(
            model="tiny_llama",
            sha256="a" * 64,
            target="SM8750:emulator",
            ars=(1, 32),
            cl=192,
            n_splits=2,
            precision="W8A16",
        ),
        "device": DeviceInfo(
            serial="127.0.0.1:5555",
            soc="SM8750",
            emulator=True,
            model="virtual",
            manufacturer="qnnfarm",
            dsp_arch="v79",
            abi="x86_64",
            android_version="15",
        ),
        "workload": WorkloadRecord(
            runner="genie_t2t_run.py",
            prompt_tokens=64,
            max_new_tokens=16,
            repetitions=3,
            warmup=1,
            sampler={"temp": 1.0, "greedy": True, "seed": 42, "type": "basic", "top-p": None},
        ),
        "provenance": Provenance(
            toolchain="ort_qnn",
            toolchain_versions={"onnxruntime-qnn": "2.7.0", "qnn": "2.51"},
            library_versions={"genie": "1.21"},
            qnnfarm_version="0.1.0",
            host="bench-1",
            git_commit="c0ffee",
            git_dirty=True,
        ),
    }
    return Run(**{**fields, **changes})


def write_runs(store: ResultsStore, runs: Iterable[Run]) -> None:
    """Write runs in one transaction: each of its own takes more time than all else of a test."""
    with store.database.writing() as connection:
        for run in runs:
            insert_run(connection, store.location, run)


class Place(Protocol):
    """A results database that is not there yet, or is empty."""

    @property
    def engine(self) -> EngineName: ...

    @property
    def location(self) -> str:
        """As `ResultsStore.open` has it."""
        ...

    def run(self, script: str) -> None:
        """Run statements past the store."""
        ...

    def rows(self, query: str) -> list[tuple[object, ...]]:
        """What a query finds past the store."""
        ...

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Another writer is in the middle of a transaction, and no other can write."""
        ...


class SqlitePlace:
    engine: EngineName = "sqlite"

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def location(self) -> str:
        return str(self.path)

    def run(self, script: str) -> None:
        with closing(sqlite3.connect(self.path)) as connection:
            connection.executescript(script)

    def rows(self, query: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute(query).fetchall()

    @contextmanager
    def held(self) -> Iterator[None]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")


class PostgresqlPlace:
    engine: EngineName = "postgresql"

    def __init__(self, server: PostgresqlServer, database: str) -> None:
        self.server = server
        self.database = database

    @property
    def location(self) -> str:
        return self.server.url(self.database)

    def run(self, script: str) -> None:
        self.rows(script)

    def rows(self, query: str) -> list[tuple[object, ...]]:
        with closing(self.server.connect(self.database)) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def held(self) -> Iterator[None]:
        with closing(self.server.connect(self.database)) as other, other.transaction():
            other.execute("LOCK TABLE runs, qnnfarm_results IN EXCLUSIVE MODE")
            yield
