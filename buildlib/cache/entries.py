"""Entries of the cache: listed, found by name, checked, and removed.

None goes that a running build uses. An entry is renamed before it is deleted, so that an
interrupted removal leaves nothing that looks like an entry.
"""

import contextlib
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from filelock import Timeout

from buildlib.cache.file_hashes import MEMO_FILE, HashMemo
from buildlib.cache.finished_builds import remove_stale
from buildlib.cache.layout import LAST_USED, entry_folders, entry_lock, leftovers, model_folders
from buildlib.cache.records import find_problem, read_files, read_info
from buildlib.cache.running_builds import entries_in_use
from buildlib.errors import CacheError

_Inode = tuple[int, int]
_CLOCKS_DIFFER_S = 3600.0  # of hosts that share a cache


@dataclass(frozen=True)
class EntryUsage:
    """Disk usage of one entry, and its last use.

    Attributes:
        inodes: size in bytes of each of its files, by device and inode.
        used_at: the time of its last use, in seconds since the epoch.
    """

    folder: Path
    inodes: dict[_Inode, int]
    used_at: float

    @classmethod
    def of(cls, folder: Path) -> "EntryUsage":
        """Measure an entry; one that vanishes meanwhile counts as empty."""
        inodes: dict[_Inode, int] = {}
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    status = (Path(parent) / name).lstat()
                except FileNotFoundError:
                    continue
                inodes[status.st_dev, status.st_ino] = status.st_size
        return cls(folder, inodes, last_used(folder))

    @property
    def name(self) -> str:
        """`<model>/<entry>`."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def size_bytes(self) -> int:
        """Size of its files, shared ones included."""
        return sum(self.inodes.values())

    def is_now(self, folder: Path) -> bool:
        """Return whether the entry was not used since it was measured."""
        return last_used(folder) == self.used_at

    def describe(self) -> tuple[str, str | None]:
        """Return which graph or part it is, and why its records cannot be read, if they cannot."""
        try:
            read_info(self.folder)
            return read_files(self.folder).subject, None
        except CacheError as error:
            return "", error.reason


@dataclass(frozen=True)
class EntryCheck:
    """Result of checking an entry.

    Attributes:
        problem: its fault, or None.
        removed: whether it was removed because of that.
    """

    name: str
    size_bytes: int
    problem: str | None
    removed: bool


@dataclass(frozen=True)
class PruneResult:
    """Result of pruning, or of a dry run.

    Attributes:
        removed: entries, the least recently used first.
        in_use: entries that were kept because a running build uses them.
        leftovers: folders that dead builds had left.
        freed_bytes: of the cache; files that it shares with the user's model stay on the disk.
        left_bytes: size of the cache afterwards.
    """

    removed: tuple[EntryUsage, ...]
    in_use: tuple[EntryUsage, ...]
    leftovers: tuple[Path, ...]
    freed_bytes: int
    left_bytes: int


def last_used(folder: Path) -> float:
    """Return the last use of an entry, in seconds since the epoch; 0 if it does not exist."""
    for path in (folder / LAST_USED, folder):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


def disk_usage(usages: Iterable[EntryUsage]) -> int:
    """Sum the sizes of all files, counting shared files once."""
    return sum({inode: size for usage in usages for inode, size in usage.inodes.items()}.values())


def find_entry(root: Path, text: str) -> Path:
    """Find an entry by path, by name, or by the beginning of its hash."""
    folders = list(entry_folders(root))
    exact = [f for f in folders if text in {str(f), f.name, f"{f.parent.name}/{f.name}"}]
    prefix = text.removesuffix("/").rpartition("/")[2].lower()
    matches = exact or [
        folder
        for folder in folders
        if prefix
        and any(f.startswith(prefix) for f in (folder.name, folder.name.partition("_")[2]))
    ]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise CacheError(str(root), f"no entry {text!r}; see `qnnfarm cache ls`")
    some = ", ".join(folder.name for folder in matches[:3])
    raise CacheError(str(root), f"{text!r} means {len(matches)} entries: {some}; give more of it")


def verify(root: Path, *, repair: bool = False) -> Iterator[EntryCheck]:
    """Read every file of every entry and compare it with its hash.

    Args:
        root: the cache root.
        repair: remove damaged entries that are not in use, so that the next build makes them again.
    """
    with HashMemo(root / MEMO_FILE) as memo:

        def is_damaged(folder: Path) -> bool:
            return find_problem(folder, memo) is not None

        for folder in list(entry_folders(root)):
            usage = EntryUsage.of(folder)
            problem = find_problem(folder, memo, reread=True)
            if problem and not folder.exists():
                continue  # it was removed meanwhile
            is_gone = bool(problem) and repair and _remove_unused(root, folder, is_damaged)
            yield EntryCheck(usage.name, usage.size_bytes, problem, is_gone)


def prune(
    root: Path,
    *,
    to_bytes: int | None = None,
    older_than: timedelta | None = None,
    everything: bool = False,
    dry_run: bool = False,
) -> PruneResult:
    """Remove leftovers of dead builds, entries as the arguments say, and records of their builds.

    Args:
        root: the cache root.
        to_bytes: remove the least recently used until the cache holds no more than this.
        older_than: remove entries that were not used for this long.
        everything: remove all entries.
        dry_run: remove nothing; the result is that of a removal.
    """
    swept = [
        path
        for model in model_folders(root)
        for path in remove_leftovers(root, model, dry_run=dry_run)
    ]
    if not dry_run:
        for folder in entry_folders(root):
            _clamp_last_used(folder)
    usages = sorted(
        (EntryUsage.of(f) for f in entry_folders(root)), key=lambda usage: usage.used_at
    )
    shares = Counter(inode for usage in usages for inode in usage.inodes)
    oldest = (datetime.now(UTC) - older_than).timestamp() if older_than is not None else None
    before = remainder = disk_usage(usages)
    victims, busy = [], []
    in_use = entries_in_use(root)
    for usage in usages:
        too_old = oldest is not None and usage.used_at < oldest
        too_much = to_bytes is not None and remainder > to_bytes
        if not (everything or too_old or too_much):
            continue
        if usage.name in in_use or not (
            dry_run or _remove_unused(root, usage.folder, usage.is_now)
        ):
            busy.append(usage)
            continue
        victims.append(usage)
        shares.subtract(usage.inodes.keys())
        remainder -= sum(size for inode, size in usage.inodes.items() if not shares[inode])
    if not dry_run and (victims or older_than is not None or everything):
        age_s = None if older_than is None else older_than.total_seconds()
        remove_stale(root, age_s, everything=everything)
    return PruneResult(tuple(victims), tuple(busy), tuple(swept), before - remainder, remainder)


def _clamp_last_used(folder: Path) -> None:
    """Correct a last use in the future, which would keep the entry until then."""
    now = datetime.now(UTC).timestamp()
    if last_used(folder) > now + _CLOCKS_DIFFER_S:
        with contextlib.suppress(OSError):
            os.utime(folder / LAST_USED, (now, now))


def remove_leftovers(root: Path, model: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove and return the leftovers of dead builds of one model."""
    folders = []
    for folder, entry in leftovers(model):
        try:
            with entry_lock(root, model.name, entry).acquire(timeout=0):
                folders.append(folder)
                if not dry_run:
                    shutil.rmtree(folder, ignore_errors=True)
        except Timeout:
            continue  # it is being filled
    return folders


def remove_entry(folder: Path) -> None:
    """Remove an entry; the caller holds its lock."""
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        folder.replace(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def _remove_unused(root: Path, folder: Path, is_due: Callable[[Path], bool]) -> bool:
    """Remove an entry unless it is in use; `is_due` is asked under its lock."""
    model, name = folder.parent.name, folder.name
    try:
        with entry_lock(root, model, name).acquire(timeout=0):
            if f"{model}/{name}" in entries_in_use(root) or not is_due(folder):
                return False
            remove_entry(folder)
    except Timeout:
        return False
    return True
