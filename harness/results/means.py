"""Runs with the mean of each metric, for histories of any size.

A history asks for one number of each run and metric. The database computes it, so that a million
repetitions become some ten thousand rows before Python sees any of them.
"""

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Select, func, select

from harness.results import schema
from harness.results.database import Database, refuse_unreadable_rows
from harness.results.records import Run
from harness.results.rows import RunParser


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


def read_means(
    database: Database, chosen: Select[Any] | None = None, metrics: Collection[str] = ()
) -> tuple[RunMeans, ...]:
    """Read runs with their means, oldest first.

    Args:
        chosen: a query of rows of runs; by default all runs.
        metrics: those whose means are needed; by default all.

    Raises:
        CorruptRunError: qnnfarm cannot have written one of the runs.
    """
    runs, measured = schema.runs, schema.measurements
    wanted = select(runs) if chosen is None else chosen
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
    if chosen is not None:
        ids = chosen.with_only_columns(runs.c.id).subquery()
        averages = averages.join(ids, measured.c.run_id == ids.c.id)
    if metrics:
        averages = averages.where(measured.c.metric.in_(metrics))
    ordered = wanted.order_by(None).order_by(runs.c.created_at, runs.c.session, runs.c.id)
    found: dict[str, dict[str, Mean]] = {}
    parser = RunParser(database.location)
    with database.reading() as connection, refuse_unreadable_rows(database.location):
        for run_id, metric, value, repetitions in connection.execute(averages):
            found.setdefault(run_id, {})[metric] = Mean(value, repetitions)
        rows = connection.execute(ordered).mappings()
        return tuple(RunMeans(parser.parse(row), found.get(row["id"], {})) for row in rows)
