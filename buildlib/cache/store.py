"""`StageCache`: outputs of stages, found by everything that they depend on."""

import errno
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from buildlib.cache.entries import prune, remove_entry, remove_leftovers
from buildlib.cache.file_hashes import MEMO_FILE, HashMemo
from buildlib.cache.key import StageKey
from buildlib.cache.layout import LAST_USED, CacheEntry, entry_lock, entry_name, is_model_name
from buildlib.cache.records import find_problem, write_records
from buildlib.cache.running_builds import RunningBuild, entries_in_use
from buildlib.cancellation import check_cancelled
from buildlib.closeable import Closeable
from buildlib.errors import BuildError, CacheError, ToolchainError
from buildlib.files import scratch_folder, sync_folder
from buildlib.sizes import default_limit

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_WAIT_S = 0.5  # for another build's lock, before a look whether this one is to end
_FULL_BYTES = 1 << 20  # where less is free, a compiler's failure is taken for the disk's


class StageCache(Closeable):
    """Stage outputs of one model below `<cache_root>/<model>`, for one build.

    An entry appears whole or not at all: it is made in a temporary folder beside its place and
    renamed. Builds and threads that want the same entry at once wait for each other, and the second
    reuses the entry of the first. No entry that this build has got is removed by another until
    `close()`, or until the object or the process is gone.
    """

    def __init__(self, cache_root: Path, model_name: str) -> None:
        """Nothing is read or written yet.

        Args:
            cache_root: shared by the builds of all models. When it holds more than
                `QNNFARM_CACHE_LIMIT`, the least recently used entries go.
            model_name: a folder's name.
        """
        if not is_model_name(model_name):
            raise CacheError(str(cache_root), f"no folder can have the model's name {model_name!r}")
        self._root = cache_root
        self._model = model_name
        self._folder = cache_root / model_name
        self._limit = default_limit()
        self._opening = threading.Lock()
        self._open: _Resources | None = None

    def close(self) -> None:
        """End the build: other builds may remove its entries."""
        with self._opening:
            if self._open is not None:
                self._open.close()
            self._open = None

    def entry(self, key: StageKey, group: str | None = None) -> CacheEntry:
        """Return the entry of `key` as it is before it is made: where it will be, and its hash."""
        digest = key.digest()
        place = self._root / (group or self._model) / entry_name(key.operation, digest)
        return CacheEntry(key.operation, place, digest, reused=False)

    def get_or_build(
        self,
        key: StageKey,
        source: Path,
        build: Callable[[Path], object],
        *,
        subject: str = "",
        group: str | None = None,
    ) -> CacheEntry:
        """Return the entry of `key`; `build(folder)` fills an empty folder if it does not exist.

        Args:
            key: everything that the output depends on.
            source: the input to name in the sidecar, for people to read.
            build: fills the given folder; its errors pass through, and leave no entry; those of
                the system become `BuildError`.
            subject: which graph or part this is, for people to read.
            group: folder of the entry below the root, in place of the model's.

        Raises:
            CacheError: the cache cannot be read or written, or its disk is full.
            BuildError: the stage cannot use a file.
            InputFileError: the stage made something that no entry can hold.
        """
        entry = self.entry(key, group)
        model, place, name = group or self._model, entry.folder, entry.folder.name
        with _as_cache_error(place):
            resources = self._resources()
            place.parent.mkdir(exist_ok=True)
            lock = entry_lock(self._root, model, name)
            _wait_for(lock)
        try:
            with _as_cache_error(place):
                resources.running.mark_used(model, name)
                problem = find_problem(place, resources.memo) if place.exists() else None
                if problem is None and place.exists():
                    (place / LAST_USED).touch()
                    return replace(entry, reused=True)
                remove_entry(place)
            with ExitStack() as making:
                with _as_cache_error(place):
                    scratch = making.enter_context(scratch_folder(place))
                with _as_stage_error(place, f"{key.operation} {subject}".rstrip()):
                    build(scratch)
                with _as_cache_error(place):
                    write_records(scratch, key, source, resources.memo, subject=subject)
                    scratch.rename(place)
                    sync_folder(place.parent)
        finally:
            lock.release()
        if self._limit is not None:
            with _as_cache_error(self._root):
                prune(self._root, to_bytes=self._limit)
        return replace(entry, problem=problem)

    def _resources(self) -> "_Resources":
        with self._opening:
            if self._open is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._open = _Resources(self._root)
                weakref.finalize(self, self._open.close)
                remove_leftovers(self._root, self._folder)
                entries_in_use(self._root)  # which clears what builds that died had listed
            return self._open


class _Resources:
    """Resources of a cache while its build runs."""

    def __init__(self, root: Path) -> None:
        self.running = RunningBuild(root)
        self.memo = HashMemo(root / MEMO_FILE)  # after what may fail, and would leave it open
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.running.close()
            self.memo.close()


def _wait_for(lock: FileLock) -> None:
    """Wait for a lock that another build may hold, unless this build is cancelled."""
    while True:
        check_cancelled()
        try:
            lock.acquire(timeout=_WAIT_S)
        except Timeout:
            continue
        return


@contextmanager
def _as_cache_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(str(path), f"cannot be used ({error.strerror or error})") from error


@contextmanager
def _as_stage_error(path: Path, stage: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            name = str(error.filename or path)
            raise BuildError(f"stage {stage}: {name}: {error.strerror or error}") from error
        reason = f"does not fit on the disk ({error.strerror}); see `qnnfarm cache prune`"
        raise CacheError(str(path), reason) from error
    except ToolchainError as error:  # whose libraries do not say why they cannot write
        if shutil.disk_usage(path.parent).free >= _FULL_BYTES:
            raise
        reason = "does not fit on the disk, which is full; see `qnnfarm cache prune`"
        raise CacheError(str(path), reason) from error
