"""The results database of a plan: there as soon as there is something to keep, not before."""

import threading
from pathlib import Path

from harness.results.store import ResultsStore


class ResultsLater:
    """A results database that is made when it is first written to. For several threads.

    Args:
        location: as `ResultsStore.open` has it. A database that exists is opened at once.
        must_exist: only read what an earlier run stored.

    Raises:
        MissingStoreError: it must exist, and does not.
        StoreError: it exists, and cannot be used.
    """

    def __init__(self, location: str, *, must_exist: bool = False) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._store: ResultsStore | None = None
        self._path = file_of(location)
        if must_exist or self._path is None or self._path.exists():
            self._store = ResultsStore.open(location, create=not must_exist)

    @property
    def location(self) -> str:
        """The path or URL, without its password; the same before it is made and after."""
        return str(self._path) if self._store is None else self._store.location

    @property
    def there(self) -> ResultsStore | None:
        """The database, if there is one yet."""
        return self._store

    def made(self) -> ResultsStore:
        """The database, made now where there is none."""
        with self._lock:
            if self._store is None:
                self._store = ResultsStore.open(self._location)
            return self._store

    def close(self) -> None:
        """Give up what connects to it."""
        with self._lock:
            if self._store is not None:
                self._store.close()


def file_of(location: str) -> Path | None:
    """The file of a SQLite database; `None` of another."""
    if "://" in location and not location.startswith("sqlite"):
        return None
    return Path(location.removeprefix("sqlite:///"))
