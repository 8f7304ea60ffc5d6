"""A lab at one moment, for people: its hosts, and the plans with cells that wait or run."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

_IS_LAB = text("SELECT to_regclass('lab_workers') IS NOT NULL")
_PLANS = text("""
    SELECT run.id, run.plan, run.submitter, run.created_at, waiting, running,
        (SELECT count(*) FROM plan_cells WHERE plan_run = run.id AND status = 'done'),
        (SELECT count(*) FROM plan_cells WHERE plan_run = run.id AND status = 'failed')
    FROM plan_runs run JOIN (
        SELECT split_part(queueing_lock, ':', 1) AS id,
            count(*) FILTER (WHERE status = 'todo') AS waiting,
            count(*) FILTER (WHERE status = 'doing') AS running
        FROM procrastinate_jobs WHERE status IN ('todo', 'doing') GROUP BY 1
    ) jobs ON jobs.id = run.id
    ORDER BY run.created_at, run.id
""")
_HOSTS = text("""
    SELECT worker.host, worker.devices, worker.since,
        (SELECT count(*) FROM procrastinate_jobs
            WHERE worker_id = worker.id AND status = 'doing')
    FROM lab_workers worker JOIN procrastinate_workers USING (id)
    ORDER BY worker.host, worker.since
""")


@dataclass(frozen=True, slots=True)
class LivePlan:
    """A run of a plan with cells that wait or run.

    Attributes:
        id: of the run.
        submitter: as SSH reaches it.
        waiting, running, done, failed: numbers of cells.
    """

    id: str
    plan: str
    submitter: str
    created_at: datetime
    waiting: int
    running: int
    done: int
    failed: int


@dataclass(frozen=True, slots=True)
class LabHost:
    """A host with a worker.

    Attributes:
        since: the worker began.
        running: number of cells.
    """

    name: str
    devices: int
    since: datetime
    running: int


@dataclass(frozen=True, slots=True)
class Overview:
    """A lab; empty where the database is none."""

    plans: tuple[LivePlan, ...] = ()
    hosts: tuple[LabHost, ...] = ()

    @classmethod
    def read(cls, connection: Connection) -> "Overview":
        """Read it from the PostgreSQL database of the results."""
        if not connection.scalar(_IS_LAB):
            return cls()
        return cls(
            tuple(LivePlan(*row) for row in connection.execute(_PLANS)),
            tuple(LabHost(*row) for row in connection.execute(_HOSTS)),
        )
