"""Journal of plans: what became of each cell of each run, in the database of the results.

`qnnfarm run` and the workers of a lab write the same two tables. What happened to a cell is on the
disk before observers hear of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    MetaData,
    Select,
    String,
    Table,
    Text,
    delete,
    func,
    insert,
    inspect,
    select,
)

from harness.plans.outcome import CellOutcome
from harness.results.database import ResultsDatabase
from harness.results.records import new_run_id, now, to_storable
from harness.results.schema import UtcDateTime

ID_LENGTH, KEY_LENGTH = 32, 64
_OPENING = 0x71_6E_6E_70_6C_61_6E  # "qnnplan"
_KEPT = timedelta(days=90)
metadata = MetaData()
plan_runs = Table(
    "plan_runs",
    metadata,
    Column("id", String(ID_LENGTH), primary_key=True),
    Column("plan", Text, nullable=False, index=True),
    Column("place", Text, nullable=False, server_default=""),  # a `Journal` has it; empty in labs
    Column("submitter", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("owner", Text, nullable=False, server_default=""),  # role, where there is a lab
)
plan_cells = Table(
    "plan_cells",
    metadata,
    Column("plan_run", String(ID_LENGTH), primary_key=True),
    Column("key", String(KEY_LENGTH), primary_key=True),
    Column("status", String(16), nullable=False),
    Column("host", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("error", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("summary", Text, nullable=False),
    Column("duration_s", Double, nullable=False),
    Column("changed_at", UtcDateTime, nullable=False),
    Column("job", BigInteger, nullable=False, server_default="0"),  # of a lab, whose end it is
)


@dataclass(frozen=True, slots=True)
class CellEnd:
    """The end of a cell, or its beginning.

    Attributes:
        status: `begun` while it runs, else of `CellStatus`. It stays where the process is killed.
        device: the last one it ran on.
    """

    status: str
    host: str = ""
    device: str = ""
    error: str = ""
    reason: str = ""
    summary: str = ""
    duration_s: float = 0.0

    @property
    def where(self) -> str:
        """The device, and the host of a lab."""
        return f"{self.device} on {self.host}" if self.host else self.device

    @classmethod
    def of(cls, outcome: CellOutcome, host: str = "") -> "CellEnd":
        """Return the end that an outcome is."""
        failure, summary = outcome.failure, outcome.result.summary
        error, reason = (failure.error, failure.reason) if failure else ("", "")
        device, seconds = outcome.device, outcome.duration_s
        return cls(outcome.status, host, device, error, reason, summary, seconds)


def make_tables(connection: Connection) -> None:
    """Create the tables where they are missing, within the connection's transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_OPENING)))  # one makes them
    metadata.create_all(connection)


def find_run(connection: Connection, plan: str, *whose: ColumnElement[bool]) -> str | None:
    """Return the id of a plan's newest run."""
    runs = select(plan_runs.c.id).where(plan_runs.c.plan == plan, *whose)
    newest: str | None = connection.scalar(runs.order_by(plan_runs.c.created_at.desc()).limit(1))
    return newest


def begin_run(connection: Connection, plan: str, *, place: str = "", submitter: str = "") -> str:
    """Begin a run of a plan, the newest also after one of a host whose clock is ahead of ours."""
    of_plan = select(func.max(plan_runs.c.created_at)).where(plan_runs.c.plan == plan)
    last, created = connection.scalar(of_plan), now()
    if last is not None:
        created = max(created, last + timedelta(microseconds=1))
    row = {"id": new_run_id(), "plan": plan, "place": place, "submitter": submitter}
    connection.execute(insert(plan_runs).values(row | {"created_at": created}))
    return row["id"]


def select_ends(plan_run: str) -> Select[Any]:
    """Return the query for `read_ends`."""
    return select(plan_cells).where(plan_cells.c.plan_run == plan_run)


def read_ends(connection: Connection, query: Select[Any]) -> Mapping[str, CellEnd]:
    """Return what became of the cells of a run that have begun, by their keys."""
    names, rows = CellEnd.__slots__, connection.execute(query).mappings()
    return {row["key"]: CellEnd(*(row[name] for name in names)) for row in rows}


def read_durations(connection: Connection, plan: str) -> Mapping[str, float]:
    """Return the seconds that cells took when they were last done, in any run of a plan."""
    done = (
        select(plan_cells.c.key, plan_cells.c.duration_s)
        .join(plan_runs, plan_runs.c.id == plan_cells.c.plan_run)
        .where(plan_runs.c.plan == plan, plan_cells.c.status == "done")
        .order_by(plan_cells.c.changed_at)
    )
    return dict(map(tuple, connection.execute(done)))


class Journal:
    """Journal of the newest run of a plan from one place. Thread-safe.

    Args:
        plan: its name.
        place: who runs it from which file.

    Attributes:
        plan_run_id: stays the same until a fresh start; empty before the first.
        ends: of its cells, as they were when it was opened.
        durations: see `read_durations`.
    """

    def __init__(self, database: ResultsDatabase, plan: str, place: str = "") -> None:
        self._database = database
        self._plan, self._place = plan, place
        self.plan_run_id = ""
        self.ends: Mapping[str, CellEnd] = {}
        self.durations: Mapping[str, float] = {}
        with database.reading() as connection:
            if inspect(connection).has_table(plan_cells.name):
                self.plan_run_id = find_run(connection, plan, plan_runs.c.place == place) or ""
                self.ends = read_ends(connection, select_ends(self.plan_run_id))
                self.durations = read_durations(connection, plan)

    def begin(self, *, fresh: bool) -> None:
        """Go on with the run, or begin one if asked to or if there is none.

        A new one removes those that began 90 days ago.
        """
        if self.plan_run_id and not fresh:
            return
        with self._database.writing() as connection:
            make_tables(connection)
            of_place = (plan_runs.c.plan == self._plan) & (plan_runs.c.place == self._place)
            old = of_place & (plan_runs.c.created_at < now() - _KEPT)
            ids = select(plan_runs.c.id).where(old)
            connection.execute(delete(plan_cells).where(plan_cells.c.plan_run.in_(ids)))
            connection.execute(delete(plan_runs).where(old))
            self.plan_run_id = begin_run(connection, self._plan, place=self._place)
        self.ends = {}

    def record_start(self, key: str, device: str) -> None:
        """Record that a cell is being tried."""
        self._record({key: CellEnd("begun", device=device)})

    def record_ends(self, outcomes: Sequence[CellOutcome]) -> None:
        """Record how cells ended; on the disk when this returns."""
        self._record({outcome.cell.key: CellEnd.of(outcome) for outcome in outcomes})

    def _record(self, ends: Mapping[str, CellEnd]) -> None:
        run = {"plan_run": self.plan_run_id, "changed_at": now()}
        rows = [
            {name: to_storable(value) for name, value in asdict(end).items()} | {"key": key} | run
            for key, end in ends.items()
        ]
        old = (plan_cells.c.plan_run == self.plan_run_id) & plan_cells.c.key.in_(ends)

        def write(connection: Connection) -> None:
            connection.execute(delete(plan_cells).where(old))
            connection.execute(insert(plan_cells), rows)

        self._database.insist(write)
