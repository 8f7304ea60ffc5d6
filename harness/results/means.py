"""Runs with the mean of each metric, for histories of any size.

A history asks for one number of each run and metric. The database computes it, so that a million
repetitions become some ten thousand rows before Python sees any of them.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import func, select

from harness.results import schema
from harness.results.database import Database, refuse_unreadable_rows
from harness.results.records import Run
from harness.results.rows import parse_run


@dataclass(frozen=True, slots=True)
class Mean:
    """Measured repetitions of one metric in one run, without warm-ups."""

    value: float
    repetitions: int


@dataclass(frozen=True, slots=True)
class RunMeans:
    """A run without its measurements, and their means by metric."""

    run: Run
    means: Mapping[str, Mean] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> "RunMeans":
        """Compute the means of a run that is in memory with its measurements."""
        values: dict[str, list[float]] = {}
        for one in run.measurements:
            if not one.is_warmup:
                values.setdefault(one.metric, []).append(one.value)
        means = {key: Mean(statistics.fmean(found), len(found)) for key, found in values.items()}
        return cls(run, means)


def read_means(database: Database) -> tuple[RunMeans, ...]:
    """Read every run with its means, oldest first.

    Raises:
        CorruptRunError: qnnfarm cannot have written one of them.
    """
    runs, measured = schema.runs, schema.measurements
    averages = (
        select(
            measured.c.run_id,
            measured.c.metric,
            func.avg(measured.c.value),
            func.count(),
        )
        .where(measured.c.is_warmup.is_(False))
        .group_by(measured.c.run_id, measured.c.metric)
    )
    found: dict[str, dict[str, Mean]] = {}
    with database.reading() as connection, refuse_unreadable_rows(database.location):
        for run_id, metric, value, repetitions in connection.execute(averages):
            found.setdefault(run_id, {})[metric] = Mean(value, repetitions)
        rows = connection.execute(select(runs).order_by(runs.c.created_at, runs.c.id)).mappings()
        return tuple(
            RunMeans(parse_run(database.location, row, ()), found.get(row["id"], {}))
            for row in rows
        )
