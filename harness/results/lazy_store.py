"""Results database that appears with its first result."""

import threading

from buildlib.closeable import Closeable
from harness.results.database import database_file
from harness.results.store import ResultsStore


class LazyResultsStore(Closeable):
    """Results database that is made when it is first written to. Thread-safe.

    Args:
        location: as `ResultsStore.open` takes it. A database that exists is opened at once.
        must_exist: only read what an earlier run stored.

    Raises:
        MissingStoreError: it must exist, and does not.
        StoreError: it exists and cannot be used, or cannot be made there.
    """

    def __init__(self, location: str, *, must_exist: bool = False) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._path = database_file(location)
        self._store: ResultsStore | None = None
        if must_exist or self._path is None or self._path.exists():
            self._store = ResultsStore.open(location, create=not must_exist)
        else:
            ResultsStore.check(location)

    @property
    def location(self) -> str:
        """The path or URL, without its password; the same before it is made and after."""
        return str(self._path) if self._store is None else self._store.location

    @property
    def existing(self) -> ResultsStore | None:
        """The database, if it exists by now."""
        return self._store

    def open(self) -> ResultsStore:
        """Open the database; make it if it does not exist."""
        with self._lock:
            if self._store is None:
                self._store = ResultsStore.open(self._location)
            return self._store

    def close(self) -> None:
        """Close its connections."""
        with self._lock:
            if self._store is not None:
                self._store.close()
