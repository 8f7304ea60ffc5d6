"""What an interrupt may not do to the store: hide behind another error, or leave a lock behind.

Ctrl-C falls between any two lines, also those of SQLAlchemy. Where it falls into the end of a
transaction, SQLAlchemy's own checks fail over what it left undone, and their AssertionError comes
out in its place.
"""

import contextlib
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar


class Closable(Protocol):
    """A connection to some database."""

    def close(self) -> None:
        """Give it up, with what is open in it; harmless when it is closed already."""
        ...


Opened = TypeVar("Opened", bound=Closable)


class RollingBack(sqlite3.Connection):
    """A connection that rolls back before it closes.

    `sqlite3_close_v2` waits for the last cursor, and an interrupt keeps cursors alive in its
    traceback: the transaction, and with it the lock, would live on behind the closed connection.
    """

    def close(self) -> None:
        """Roll back what is open, and close."""
        try:
            with contextlib.suppress(sqlite3.Error):  # it is closed already
                self.rollback()
        finally:
            super().close()


class Connections:
    """The open connections of each thread, so that none survives the block that opened it."""

    def __init__(self) -> None:
        self._of = threading.local()

    def add(self, connection: Opened) -> Opened:
        """Remember a connection that this thread has opened."""
        self._mine().append(connection)
        return connection

    @contextmanager
    def closed_after(self) -> Iterator[None]:
        """Close what this thread opens in the block, however the block ends."""
        mine = self._mine()
        before = len(mine)
        try:
            yield
        finally:
            while len(mine) > before:
                mine[-1].close()
                mine.pop()

    def _mine(self) -> list[Closable]:
        if not hasattr(self._of, "connections"):
            self._of.connections = []
        found: list[Closable] = self._of.connections
        return found


@contextmanager
def interrupts_first() -> Iterator[None]:
    """Let an interrupt out of the block as itself, whatever went wrong on its way."""
    handled = sys.exception()
    try:
        yield
    except Exception as error:
        interrupt = _interrupt_behind(error, handled)
        if interrupt is None:
            raise
        raise interrupt from None


def _interrupt_behind(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """The interrupt that an error came of, if there was one since the handling of `handled`."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and cause is not handled and id(cause) not in seen:
        if not isinstance(cause, Exception):
            return cause
        seen.add(id(cause))
        cause = cause.__context__
    return None
