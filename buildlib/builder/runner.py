"""Runs the stages of one build through the cache."""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.code_digest import own_code
from buildlib.builder.stage import CachedStage
from buildlib.cache.file_hashes import MEMO_FILE, hash_files
from buildlib.cache.key import StageKey
from buildlib.cache.layout import CacheEntry
from buildlib.cache.store import StageCache
from buildlib.cancellation import check_cancelled
from buildlib.errors import CacheError, InputFileError
from buildlib.progress import working
from buildlib.toolchains.base import Toolchain

_Stat = tuple[int, int]


class SourceWatch:
    """The user's files as they were when they were hashed; threads share it.

    Stages read them through links: a file that is written over changes under a running stage, and
    the key of the stage still has the hash of the former content.
    """

    def __init__(self, memo: Path) -> None:
        self._memo = memo
        self._stats: dict[Path, _Stat] = {}
        self._hashes: dict[Path, str] = {}

    @property
    def hashes(self) -> Mapping[Path, str]:
        """SHA-256 of every file that was hashed."""
        return dict(self._hashes)

    def hash(self, files: Mapping[str, Path]) -> dict[str, str]:
        """Return SHA-256 of files by name, and watch them from now on."""
        stats = {path: stat for path in files.values() if (stat := _stat_of(path))}
        digests = hash_files(files.values(), self._memo)
        self._hashes |= {path: digest.sha256 for path, digest in digests.items()}
        self._stats |= stats
        return {name: digests[path].sha256 for name, path in files.items()}

    def check(self, *, reread: bool = False) -> None:
        """Refuse changed files: compare size and date of each, and hash those that differ.

        A removed file is no change: its links stay.

        Args:
            reread: trust no size and mtime; the memo still knows the hash of an unchanged file.
        """
        stats = {
            path: now
            for path, before in list(self._stats.items())
            if (now := _stat_of(path)) and (now != before or reread)
        }
        digests = hash_files(stats, self._memo)
        for path, digest in digests.items():
            if digest.sha256 != self._hashes[path]:
                raise InputFileError(str(path), "it changed while it was built from; build again")
        self._stats |= stats  # merely a new date


def _stat_of(path: Path) -> _Stat | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class StageRecord:
    """Record of one stage of a build.

    Attributes:
        subject: which graph or part, such as `ar32_cl192_1_of_2`.
        reused: whether it came from the cache.
        total: stages of the build; `None` while the number of parts is not known.
        entry: folder of its output in the cache.
    """

    operation: str
    subject: str
    seconds: float
    reused: bool
    number: int
    total: int | None
    entry: Path


OnStage = Callable[[StageRecord], None]


def _check_room(cache_root: Path, needed: int) -> None:
    free = shutil.disk_usage(cache_root).free
    if free < needed:
        sizes = f"about {needed >> 20:,} MiB are needed and {free >> 20:,} MiB free"
        hint = "see `qnnfarm cache prune`, or set QNNFARM_CACHE_DIR"
        raise CacheError(str(cache_root), f"{sizes}; {hint}")


class StageRunner:
    """Runs stages through the cache, from any thread, and keeps a record of each.

    Attributes:
        total: stages of the build; `None` while the number of parts is not known.
        watch: refuses changes of the user's files during the build.
        toolchain: that compiles.
        versions: of it.
        needed_bytes: estimate of the disk space of the build, if its first stage is not cached.
    """

    def __init__(
        self, toolchain: Toolchain, cache: StageCache, cache_root: Path, on_stage: OnStage | None
    ) -> None:
        self.records: list[StageRecord] = []
        self.total: int | None = None
        self.watch = SourceWatch(cache_root / MEMO_FILE)
        self.toolchain = toolchain
        self.versions = dict(toolchain.versions())
        self.needed_bytes = 0
        self._cache = cache
        self._cache_root = cache_root
        self._on_stage = on_stage
        self._recording = threading.Lock()
        self._code = own_code()
        self._toolchain_module = type(toolchain).__module__

    def entry(self, stage: CachedStage, group: str | None = None) -> CacheEntry:
        """Return the output of a stage before it runs: its folder and hash, which need not exist.

        Args:
            stage: that will run.
            group: as `run` takes it.
        """
        return self._cache.entry(self._key(stage), group)

    def run(self, stage: CachedStage, group: str | None = None) -> CacheEntry:
        """Return the output of a stage, from the cache if nothing that decides it has changed.

        Args:
            stage: to run.
            group: folder of its entry below the cache's root; by default that of the model.
        """
        began = time.monotonic()
        key = self._key(stage)

        def fill(folder: Path) -> None:
            if not self.records:
                _check_room(self._cache_root, self.needed_bytes)
            with working(f"{stage.operation} {stage.subject}"):
                stage.run(folder)
            self.watch.check()  # or the content of the entry would not match its key

        check_cancelled()
        entry = self._cache.get_or_build(
            key, stage.source, fill, subject=stage.subject, group=group
        )
        with self._recording:
            record = StageRecord(
                stage.operation,
                stage.subject,
                time.monotonic() - began,
                entry.reused,
                len(self.records) + 1,
                self.total,
                entry.folder,
            )
            self.records.append(record)
            if self._on_stage is not None:
                self._on_stage(record)
        return entry

    def _key(self, stage: CachedStage) -> StageKey:
        modules = stage.modules
        if stage.compiles:
            modules += (self._toolchain_module,)
        versions = self.versions if stage.compiles else {}
        code = self._code.of(*modules)
        return StageKey(stage.operation, stage.options, stage.inputs, versions, code)
