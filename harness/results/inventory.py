"""What a database holds, day by day, without reading all of it."""

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import DataError

from harness.errors import NotAStoreError
from harness.results import schema


@dataclass(frozen=True, slots=True)
class Holding:
    """The runs of one container on one device on one day.

    Attributes:
        day: in UTC.
        sessions: runs of a group in one session count as one.
        done: how many of the runs have a result.
        telemetry_bytes: as stored.
    """

    day: date
    model: str
    container_sha256: str
    device_serial: str
    soc: str
    emulator: bool
    sessions: int
    runs: int
    done: int
    telemetry_bytes: int


@dataclass(slots=True)
class _Sum:
    sessions: set[tuple[str, int]] = field(default_factory=set)
    runs: int = 0
    done: int = 0
    telemetry_bytes: int = 0


def holdings(connection: Connection, location: str) -> tuple[Holding, ...]:
    """All that there is, the oldest day first.

    Raises:
        NotAStoreError: a row cannot be read.
    """
    runs = schema.runs.c
    columns = (
        runs.created_at, runs.model, runs.container_sha256, runs.device_serial, runs.soc,
        runs.emulator,
    )  # fmt: skip
    telemetry = _telemetry_bytes(connection)
    sums: dict[tuple[date, str, str, str, str, bool], _Sum] = defaultdict(_Sum)
    query = select(*columns, runs.id, runs.group_id, runs.session, runs.status)
    try:
        for at, *what, run_id, group_id, session, status in connection.execute(query):
            one = sums[_day(at), *what]
            one.sessions.add((group_id, session))
            one.runs += 1
            one.done += status == "done"
            one.telemetry_bytes += telemetry.get(run_id, 0)
    except (ValueError, TypeError) as error:
        raise NotAStoreError(location, f"a row cannot be read: {error}") from error
    except DataError as error:
        raise NotAStoreError(location, f"a row cannot be read: {error.orig}") from error
    return tuple(
        Holding(*key, len(one.sessions), one.runs, one.done, one.telemetry_bytes)
        for key, one in sorted(sums.items(), key=lambda item: tuple(map(str, item[0])))
    )


def _day(moment: datetime) -> date:
    return moment.astimezone(UTC).date()


def _telemetry_bytes(connection: Connection) -> dict[str, int]:
    table = schema.telemetry
    query = select(table.c.run_id, func.sum(func.length(table.c.samples))).group_by(table.c.run_id)
    return {run_id: int(size or 0) for run_id, size in connection.execute(query)}
