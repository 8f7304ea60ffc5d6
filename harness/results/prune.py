"""Removing old runs, or their telemetry, a few at a time, so that writers get their turns.

What belongs together goes together: a group (the sessions of a cell, both sides of a comparison)
goes when its newest run is old enough and none is under way, so that no report ever says another
thing of half a group. Perplexities that are done stay, as later benchmarks are checked against
them (`harness.workloads.output_check.stored_quality`); they take a kB each.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, delete, func, not_, select

from harness.results import schema, writer
from harness.results.database import Database

GROUPS_AT_ONCE = 20
"""In one transaction: milliseconds, where writers wait for half a minute."""
PAUSE_S = 0.15
"""Between transactions; SQLite's writers look every 0.1 s whether it is their turn."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """What is to go.

    Attributes:
        before: groups go whose newest run was created before, with its time zone.
        only_telemetry: runs and measurements stay.
    """

    before: datetime
    only_telemetry: bool = False


@dataclass(frozen=True, slots=True)
class Amount:
    """So much of a database."""

    runs: int = 0
    measurements: int = 0
    telemetry: int = 0
    telemetry_bytes: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            self.runs + other.runs,
            self.measurements + other.measurements,
            self.telemetry + other.telemetry,
            self.telemetry_bytes + other.telemetry_bytes,
        )


def plan(connection: Connection, wanted: Pruning) -> Amount:
    """What `prune` would remove now."""
    found = [_amount(connection, groups, wanted) for groups in _batches(connection, wanted)]
    return sum(found, Amount())


def vouching(connection: Connection, before: datetime) -> int:
    """How many perplexities of that age there are, which stay."""
    old = and_(_is_vouching(), schema.runs.c.created_at < before)
    return connection.scalar(select(func.count()).select_from(schema.runs).where(old)) or 0


def prune(database: Database, wanted: Pruning) -> Generator[Amount, None, None]:
    """Remove it; gives what each transaction removed, after that has ended."""
    with database.reading() as connection:
        batches = _batches(connection, wanted)
    for number, batch in enumerate(batches):
        if number:
            time.sleep(PAUSE_S)
        with database.writing() as connection:
            # A group that got a run since then is not old any more.
            groups = _old(connection, wanted, batch)
            removed = _amount(connection, groups, wanted)
            if wanted.only_telemetry:
                table = schema.telemetry
                ids = select(schema.runs.c.id).where(schema.runs.c.group_id.in_(groups))
                connection.execute(delete(table).where(table.c.run_id.in_(ids)))
            else:  # measurements and telemetry go with their runs
                connection.execute(delete(schema.runs).where(_goes(groups)))
        yield removed


def is_under_way(connection: Connection) -> bool:
    """Whether a process writes a run, or may do so on another host."""
    table = schema.runs
    marks = connection.scalars(select(table.c.writer).where(table.c.status == "running"))
    return any(not writer.is_gone(mark) for mark in marks)


def _batches(connection: Connection, wanted: Pruning) -> list[Sequence[str]]:
    groups = _old(connection, wanted)
    return [groups[n : n + GROUPS_AT_ONCE] for n in range(0, len(groups), GROUPS_AT_ONCE)]


def _old(
    connection: Connection, wanted: Pruning, among: Sequence[str] | None = None
) -> Sequence[str]:
    """The groups of that age that hold what is to go, the oldest first.

    Args:
        among: of these; by default of all.
    """
    table = schema.runs
    newest = func.max(table.c.created_at)
    holds = select(table.c.group_id)
    if wanted.only_telemetry:
        holds = holds.join(schema.telemetry, schema.telemetry.c.run_id == table.c.id)
    else:
        holds = holds.where(not_(_is_vouching()))
    query: Select[Any] = select(table.c.group_id).where(table.c.group_id.in_(holds))
    query = query.group_by(table.c.group_id)
    running = select(table.c.group_id, table.c.writer).where(table.c.status == "running")
    if among is not None:
        query = query.where(table.c.group_id.in_(among))
        running = running.where(table.c.group_id.in_(among))
    old = query.having(newest < wanted.before).order_by(newest, table.c.group_id)
    busy = {group for group, mark in connection.execute(running) if not writer.is_gone(mark)}
    return [group for group in connection.scalars(old) if group not in busy]


def _is_vouching() -> ColumnElement[bool]:
    return and_(schema.runs.c.kind == "perplexity", schema.runs.c.status == "done")


def _goes(groups: Sequence[str]) -> ColumnElement[bool]:
    return and_(schema.runs.c.group_id.in_(groups), not_(_is_vouching()))


def _amount(connection: Connection, groups: Sequence[str], wanted: Pruning) -> Amount:
    runs, telemetry, measured = schema.runs, schema.telemetry, schema.measurements
    going = runs.c.group_id.in_(groups) if wanted.only_telemetry else _goes(groups)
    ids = select(runs.c.id).where(going)
    packed = select(func.count(), func.sum(func.length(telemetry.c.samples))).where(
        telemetry.c.run_id.in_(ids)
    )
    repetitions, size = connection.execute(packed).one()
    found = Amount(telemetry=repetitions, telemetry_bytes=int(size or 0))
    if wanted.only_telemetry:
        return found
    values = select(func.count()).select_from(measured).where(measured.c.run_id.in_(ids))
    return found + Amount(
        runs=connection.scalar(select(func.count()).select_from(runs).where(going)) or 0,
        measurements=connection.scalar(values) or 0,
    )
