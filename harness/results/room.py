"""How much room a database takes, and how what was removed from it gets back to the disk."""

import time
from dataclasses import dataclass

from sqlalchemy import Connection, func, select
from sqlalchemy.engine.interfaces import DBAPICursor

from harness.errors import StoreError
from harness.results import prune, schema
from harness.results.database import Database

_INCREMENTAL = 2
_PAGES_AT_ONCE = 2000
_IN_USE = (
    "a run is under way: later results take the free room, and a prune while no run is under way "
    "gives it to the disk"
)
_SERVERS = "the server keeps the room for later results; its VACUUM FULL gives it to the disk"


@dataclass(frozen=True, slots=True)
class Room:
    """What a database takes.

    Attributes:
        total_bytes: on the disk of its host.
        free_bytes: of that, what later results take first; a server does not say it.
    """

    total_bytes: int
    free_bytes: int = 0


def room(connection: Connection) -> Room:
    """The room that the tables take; of a file, the whole file."""
    if connection.dialect.name != "sqlite":
        sizes = (func.pg_total_relation_size(name) for name in schema.metadata.tables)
        return Room(sum(connection.scalar(select(size)) or 0 for size in sizes))
    page, pages, free = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("page_size", "page_count", "freelist_count")
    )
    return Room(page * pages, page * free)


def give_back(database: Database) -> str:
    """Give the free room of a SQLite file to the disk; why that could not be, or nothing.

    The first time the whole file is written anew, which locks writers out for as long and is done
    only while no run is under way. From then on it is done a piece at a time, between writers.
    """
    if not database.is_file:
        return _SERVERS
    try:
        with database.reading() as connection:
            if not room(connection).free_bytes:
                return ""
            in_use = prune.is_under_way(connection)
        with database.cursor() as cursor:
            if _number(cursor, "auto_vacuum") == _INCREMENTAL:
                _free_in_pieces(cursor)
            elif in_use:
                return _IN_USE
            else:
                cursor.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
                cursor.execute("VACUUM")
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")
            cursor.fetchall()
    except StoreError as error:  # the disk may lack the room for the new file
        return str(error)
    return ""


def _free_in_pieces(cursor: DBAPICursor) -> None:
    left = _number(cursor, "freelist_count")
    while left:
        cursor.execute(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})")
        cursor.fetchall()
        before, left = left, _number(cursor, "freelist_count")
        if left >= before:
            return
        time.sleep(prune.PAUSE_S)


def _number(cursor: DBAPICursor, name: str) -> int:
    cursor.execute(f"PRAGMA {name}")
    rows = cursor.fetchall()
    return int(rows[0][0])
