"""Jobs of a lab: cells in procrastinate's queue, and their ends.

procrastinate keeps its tables (`procrastinate_*`) in the database of the results, beside ours: the
journal of plans and `lab_workers`.
"""

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import procrastinate
from procrastinate import exceptions
from procrastinate.jobs import Job, Status
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import (
    BigInteger,
    Column,
    Integer,
    MetaData,
    Table,
    Text,
    column,
    delete,
    insert,
    or_,
    select,
    text,
)

from buildlib.closeable import Closeable
from harness.errors import StoreError, StoreUnavailableError, WrongUseError, one_line
from harness.plans.cell_runner import PlanSettings
from harness.plans.cells import Cell
from harness.plans.journal import (
    ID_LENGTH,
    KEY_LENGTH,
    CellEnd,
    begin_run,
    find_run,
    make_tables,
    plan_cells,
    plan_runs,
    read_ends,
    select_ends,
)
from harness.results.database import connection_string, database_file, shown
from harness.results.records import now
from harness.results.schema import UtcDateTime
from harness.results.store import ResultsStore
from plugins.lab.content import CellFiles

log = logging.getLogger("qnnfarm.worker")

Result = TypeVar("Result")
TASK = "qnnfarm_cell"
DEAD_AFTER_S = 30.0
PATIENCE_S = 2.0
"""Seconds between tries to reach a server that is away."""
_BATCH = 500
_QUEUE_DIGITS = 32
_LONGEST_REASON = 1000
_AT_ONCE = datetime.fromtimestamp(0, UTC)
"""When jobs that are given back may run: not by this host's clock, which may be ahead."""
_LONGEST_CELL = 1 << 20
_LONGEST_S = 1e7
_LAST_SESSION = 1 << 20
_KNOWN = "SELECT id FROM procrastinate_workers WHERE id = %(worker)s"
_SET_BACK = (
    "WITH late AS (UPDATE procrastinate_workers SET last_heartbeat = now()"
    " WHERE last_heartbeat > now() RETURNING id) SELECT id FROM late"
)
"""Terms begin again where the server's clock was set back: else the dead live until it is there."""
_RUNNING = "SELECT id FROM procrastinate_jobs WHERE worker_id = %(worker)s AND status = 'doing'"
_BACKLOG = (
    "SELECT queue.name, waiting, highest, args FROM (SELECT queue_name AS name,"
    " count(*) AS waiting, max(priority) AS highest, min(id) AS first"
    " FROM procrastinate_jobs WHERE status = 'todo' AND task_name = %(task)s"
    " AND (scheduled_at IS NULL OR scheduled_at <= now()) GROUP BY queue_name"
    ") queue JOIN procrastinate_jobs ON id = first"
)
_WORKERS = select(text("id")).select_from(text("procrastinate_workers"))
_metadata = MetaData()
workers = Table(
    "lab_workers",
    _metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),  # of procrastinate_workers
    Column("host", Text, nullable=False),
    Column("devices", Integer, nullable=False),
    Column("since", UtcDateTime, nullable=False),
)

_ENDS = (
    "status", "host", "device", "error", "reason", "summary", "duration_s", "changed_at", "job",
)  # fmt: skip
_NEWEST = (
    "SELECT queueing_lock AS lock, max(id) AS job FROM procrastinate_jobs"
    " WHERE starts_with(queueing_lock, :plan_run) GROUP BY queueing_lock"
)
_GUARDED = "SELECT 1 FROM pg_trigger WHERE tgname = 'plan_owned'"
_GUARD = """
CREATE OR REPLACE FUNCTION plan_own_run() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  NEW.owner := session_user;
  RETURN NEW;
END $$;
CREATE OR REPLACE FUNCTION plan_own_jobs() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM 1 FROM plan_runs
    WHERE id = split_part(NEW.queueing_lock, ':', 1) AND owner <> session_user;
  IF FOUND THEN
    RAISE insufficient_privilege USING MESSAGE = 'permission denied: another role began that run';
  END IF;
  RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER plan_owner BEFORE INSERT ON plan_runs
  FOR EACH ROW EXECUTE FUNCTION plan_own_run();
CREATE OR REPLACE TRIGGER plan_owned BEFORE INSERT ON procrastinate_jobs
  FOR EACH ROW EXECUTE FUNCTION plan_own_jobs();
"""
"""A run of a plan is its role's, and so are the jobs whose ends are stored under its id."""
_RECORD = (
    f"INSERT INTO plan_cells (plan_run, key, {', '.join(_ENDS)})"  # noqa: S608 - our own names
    f" SELECT %(plan_run)s, %(key)s, {', '.join(f'%({name})s' for name in _ENDS)}"
    " FROM procrastinate_jobs WHERE id = %(job)s AND worker_id = %(worker)s AND status = 'doing'"
    " FOR UPDATE ON CONFLICT (plan_run, key) DO UPDATE"
    f" SET {', '.join(f'{name} = EXCLUDED.{name}' for name in _ENDS)}"
)
"""Records what became of a job while it is its worker's."""


class CellArguments(BaseModel):
    """Arguments of a cell's job, as anybody who may submit wrote them."""

    model_config = ConfigDict(frozen=True, extra="forbid", regex_engine="python-re")

    plan_run: Annotated[str, Field(pattern=r"\A[0-9a-f]{1,32}\Z")]
    settings: PlanSettings
    cell: Annotated[str, Field(max_length=_LONGEST_CELL)]
    files: CellFiles

    def read_cell(self, job: Job) -> Cell:
        """Return the cell; `ValueError` if it is none, or not that of its job's row."""
        cell = Cell.from_json(self.cell)
        if job.queueing_lock != f"{self.plan_run}:{cell.key}" or job.queue != queue_name(cell):
            raise ValueError("its row is that of another cell")
        if not (0 < cell.timeout_s < _LONGEST_S and 0 <= cell.session < _LAST_SESSION):
            raise ValueError("its time limit or session is out of range")
        return cell


@dataclass(frozen=True, slots=True)
class Taken:
    """A job of procrastinate, and the worker that took it."""

    job: Job
    worker: int


@dataclass(frozen=True, slots=True)
class CellJob(Taken):
    """A cell of a plan's run, as a job.

    Attributes:
        files: that it reads.
    """

    plan_run: str
    cell: Cell
    files: CellFiles
    settings: PlanSettings


@dataclass(frozen=True, slots=True)
class Backlog:
    """Jobs that wait in one queue: cells of one requirement and one container.

    Attributes:
        sample: one of them.
        priority: the highest.
    """

    queue: str
    count: int
    priority: int
    sample: Cell


class LabJobs(Closeable):
    """Jobs in one database. Thread-safe; calls block.

    Methods raise `StoreUnavailableError` while the server is away.

    Args:
        location: URL of the PostgreSQL database that holds the results.

    Attributes:
        worker: id as which this process takes jobs; -1 before it is a worker. One that was taken
            for dead, as after a long outage, goes on with another.
    """

    def __init__(self, location: str) -> None:
        if database_file(location) is not None:
            reason = "hosts share cells through PostgreSQL: --db postgresql+psycopg://USER@HOST/DB"
            raise WrongUseError(f"{location} is a file; {reason}")
        self._location = shown(location)
        self.worker = -1
        self.host = ""
        self._devices = 0
        self._taking = threading.Lock()
        self._held: set[tuple[int | None, int]] = set()  # jobs that this process has, and as whom
        self._heard_at = float("-inf")
        self._unreadable: set[str] = set()
        self.store = ResultsStore.open(location)
        connector = procrastinate.PsycopgConnector(
            conninfo=connection_string(location), min_size=1, max_size=4
        )
        self._app = procrastinate.App(connector=connector)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            with self.store.database.writing() as connection:
                make_tables(connection)
                _metadata.create_all(connection)
                self._call(self._open())
            with self.store.database.writing() as connection:
                if connection.scalar(text(_GUARDED)) is None:
                    connection.exec_driver_sql(_GUARD)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections."""
        if self._loop.is_running():
            try:
                self._call(self._app.close_async())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
        self.store.close()

    async def _open(self) -> None:
        await self._app.open_async()
        if not await self._app.check_connection_async():  # no tables of procrastinate's
            await self._app.schema_manager.apply_schema_async()

    # Plans

    def begin(self, plan: str, submitter: str, *, fresh: bool) -> str:
        """Return the id of the newest run of a plan by this role, or of a new one.

        Args:
            fresh: begin a new one in any case.
        """
        ours = plan_runs.c.owner == text("session_user"), plan_runs.c.place == ""
        with self.store.database.writing() as connection:
            run = None if fresh else find_run(connection, plan, *ours)
            return run or begin_run(connection, plan, submitter=submitter)

    def submit(
        self,
        plan_run: str,
        settings: PlanSettings,
        chosen: Iterable[tuple[Cell, CellFiles, int]],
    ) -> int:
        """Put cells into the queue that do not wait there yet; return their number.

        Args:
            chosen: cells with their files and priorities; the highest run first.
        """
        arguments: dict[str, Any] = {
            "plan_run": plan_run,
            "settings": settings.model_dump(mode="json"),
        }
        jobs = [
            Job(
                queue=queue_name(cell),
                priority=priority,
                lock=None,
                queueing_lock=f"{plan_run}:{cell.key}",
                task_name=TASK,
                task_kwargs={
                    **arguments,
                    "cell": cell.to_json(),
                    "files": files.model_dump(mode="json"),
                },
            )
            for cell, files, priority in chosen
        ]
        return self.put(jobs)

    def put(self, jobs: list[Job]) -> int:
        """Put jobs with `queueing_lock` `RUN:KEY` into the queue; return their number.

        Earlier ends of theirs count no more.
        """
        return sum(self._defer(jobs[at : at + _BATCH]) for at in range(0, len(jobs), _BATCH))

    def _defer(self, jobs: list[Job]) -> int:
        try:
            self._call(self._app.job_manager.batch_defer_jobs_async(jobs))
        except exceptions.AlreadyEnqueued:  # by another who submits the same plan
            return sum(self._defer([job]) for job in jobs) if len(jobs) > 1 else 0
        return len(jobs)

    def live(self, plan_run: str) -> Mapping[str, int]:
        """Return a plan run's cells that wait, then those that run: their keys and jobs' ids."""
        query = text(
            "SELECT queueing_lock, id FROM procrastinate_jobs"
            " WHERE status IN ('todo', 'doing') AND starts_with(queueing_lock, :plan_run)"
            " ORDER BY status = 'doing', id"
        )
        values = {"plan_run": f"{plan_run}:"}
        with self.store.database.reading() as connection:
            rows = connection.execute(query, values).all()
        return {lock.rpartition(":")[2]: number for lock, number in rows}

    def ends(self, plan_run: str) -> Mapping[str, CellEnd]:
        """Return the ends of the cells of a plan's run that have begun, by their keys."""
        newest = text(_NEWEST).columns(column("lock", Text), column("job", BigInteger)).subquery()
        lock = plan_cells.c.plan_run + ":" + plan_cells.c.key
        query = select_ends(plan_run).outerjoin(newest, newest.c.lock == lock)
        newest_ends = query.where(or_(newest.c.job.is_(None), newest.c.job <= plan_cells.c.job))
        with self.store.database.reading() as connection:
            return read_ends(connection, newest_ends.params(plan_run=f"{plan_run}:"))

    def record(self, job: Taken, end: CellEnd) -> None:
        """Record the end of a job, unless it was given to another worker meanwhile."""
        values = {name: getattr(end, name) for name in CellEnd.__slots__} | {"changed_at": now()}
        values["reason"] = one_line(end.reason, _LONGEST_REASON)
        plan_run, _, key = str(job.job.queueing_lock).rpartition(":")
        if not (0 < len(plan_run) <= ID_LENGTH and 0 < len(key) <= KEY_LENGTH):
            return  # of somebody who means harm
        values |= {"plan_run": plan_run, "key": key, "job": job.job.id, "worker": job.worker}
        # As `_rows`: a new connection costs more than the write.
        self._call(self._app.connector.execute_query_async(_RECORD, **values))

    def cancel(self, plan_run: str) -> int:
        """Cancel the cells that wait, ask workers to end those that run; return their number."""
        cancel = self._app.job_manager.cancel_job_by_id_async
        # In the order of `live`: a worker whose cell has ended would take one that waits.
        return sum(self._call(cancel(n, abort=True)) for n in self.live(plan_run).values())

    # Workers

    def register(self, host: str, devices: int) -> None:
        """Begin as a worker of a host that has so many devices."""
        self.host, self._devices = host, devices
        self.worker = self._call(self._app.job_manager.register_worker())
        row = {"id": self.worker, "host": host, "devices": devices, "since": now()}
        with self.store.database.writing() as connection:
            connection.execute(delete(workers).where(workers.c.id.not_in(_WORKERS)))
            connection.execute(insert(workers).values(row))

    def unregister(self) -> None:
        """End as a worker."""
        self._call(self._app.job_manager.unregister_worker(self.worker))

    def beat(self, dead_after_s: float) -> frozenset[int]:
        """Show that this worker lives, give the cells of dead ones back, and return ids to abort.

        Args:
            dead_after_s: a worker that was not heard of for so long is dead.
        """
        manager = self._app.job_manager
        self._call(manager.update_heartbeat(self.worker))
        if not self._rows(_KNOWN, worker=self.worker):
            self.register(self.host, self._devices)
        # Where we could not be heard, others could not: they have as long again.
        was_heard = time.monotonic() - self._heard_at < dead_after_s
        self._heard_at = time.monotonic()
        if was_heard:
            self._rows(_SET_BACK)
            for job in self._call(manager.get_stalled_jobs(seconds_since_heartbeat=dead_after_s)):
                self._call(manager.retry_job(job, retry_at=_AT_ONCE))
            self._call(manager.prune_stalled_workers(dead_after_s))
        self._give_back_lost()
        return self.to_abort()

    def _give_back_lost(self) -> None:
        """Give back jobs that are this worker's in the database alone.

        A server that went away took the answer with which it gave them, or the word of their end.
        """
        worker, retry = self.worker, self._app.job_manager.retry_job_by_id_async
        with self._taking:
            for row in self._rows(_RUNNING, worker=worker):
                if (row["id"], worker) not in self._held:
                    self._call(retry(row["id"], _AT_ONCE))

    def backlog(self) -> Sequence[Backlog]:
        """Return the waiting jobs by queue, without cells that this version cannot read."""
        backlog = []
        for row in self._rows(_BACKLOG, task=TASK):
            try:
                sample = Cell.from_json(CellArguments.model_validate(row["args"]).cell)
                if queue_name(sample) != row["name"]:
                    raise ValueError("its row is that of another cell")
            except ValueError as error:
                if row["name"] not in self._unreadable:
                    self._unreadable.add(row["name"])
                    reason = one_line(str(error), _LONGEST_REASON)
                    log.warning("cells of another version wait for other hosts: %s", reason)
                continue
            backlog.append(Backlog(row["name"], row["waiting"], row["highest"], sample))
        return backlog

    def fetch(self, queue: str) -> CellJob | None:
        """Take the first cell of a queue; see `take`. One that this version cannot read fails."""
        taken = self.take(queue)
        if taken is None:
            return None
        try:
            arguments = CellArguments.model_validate(taken.job.task_kwargs)
            cell = arguments.read_cell(taken.job)
        except ValueError as error:
            reason = f"the qnnfarm of this host cannot read it: {error}"
            self.record(taken, CellEnd("failed", self.host, reason=reason))
            self.finish(taken, Status.FAILED)
            return None
        plan_run, files, settings = arguments.plan_run, arguments.files, arguments.settings
        return CellJob(taken.job, taken.worker, plan_run, cell, files, settings)

    def take(self, queue: str) -> Taken | None:
        """Take the first job of a queue, which is then this worker's; `None` if there is none."""
        with self._taking:
            worker = self.worker
            job = self._call(self._app.job_manager.fetch_job([queue], worker))
            if job is None:
                return None
            self._held.add((job.id, worker))
            return Taken(job, worker)

    def to_abort(self) -> frozenset[int]:
        """Return the ids of jobs that somebody cancelled while they ran."""
        return frozenset(self._call(self._app.job_manager.list_jobs_to_abort_async()))

    def finish(self, job: Taken, status: Status) -> None:
        """End a job, unless it was given to another worker meanwhile."""
        if self._is_ours(job):
            self._call(self._app.job_manager.finish_job(job.job, status, delete_job=False))
        self._held.discard((job.job.id, job.worker))

    def give_back(self, job: Taken) -> None:
        """Let a job wait again, for any worker, unless it was given to another meanwhile."""
        self._held.discard((job.job.id, job.worker))  # first: we may take it again
        if self._is_ours(job):
            self._call(self._app.job_manager.retry_job(job.job, retry_at=_AT_ONCE))

    def _is_ours(self, job: Taken) -> bool:
        jobs = self._call(self._app.job_manager.list_jobs_async(id=job.job.id, status="doing"))
        return any(one.worker_id == job.worker for one in jobs)

    def _rows(self, query: str, **values: object) -> Sequence[Mapping[str, Any]]:
        """Read over the connections of procrastinate, which stay open: workers ask every second."""
        return self._call(self._app.connector.execute_query_all_async(query, **values))

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except exceptions.ConnectorException as error:
            if isinstance(error, exceptions.UniqueViolation):
                raise
            cause = error.__cause__ or error
            raise StoreUnavailableError(self._location, one_line(str(cause))) from error


def insist(ask: Callable[[], Result]) -> Result:
    """Read or write, and again for as long as the server is away: no measurement is lost."""
    while True:
        try:
            return ask()
        except StoreError as error:
            log.warning("%s: trying again", error)
            time.sleep(PATIENCE_S)


def queue_name(cell: Cell) -> str:
    """Return the queue of a cell: cells that any device of a kind can run with one container."""
    identity = f"{cell.requirement!r} {cell.runtime} {cell.affinity}"
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:_QUEUE_DIGITS]
