"""Inventory of the cache: entries listed, found by name, and checked."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import Timeout

from buildlib.cache.file_hashes import MEMO_FILE, HashMemo
from buildlib.cache.layout import entry_folders, entry_lock
from buildlib.cache.records import find_problem, read_files, read_info
from buildlib.cache.removal import EntryUsage, remove_entry
from buildlib.cache.running_builds import entries_in_use
from buildlib.errors import CacheError


@dataclass(frozen=True)
class EntrySummary:
    """One entry, for a list.

    Attributes:
        name: `<model>/<operation>_<32 hex>`.
        subject: which graph or part; empty if its records cannot be read.
        size_bytes: of all its files, shared ones included.
        problem: why its records cannot be read, if they cannot.
    """

    name: str
    model: str
    operation: str
    subject: str
    size_bytes: int
    used_at: datetime
    problem: str | None


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


def summarize(usage: EntryUsage) -> EntrySummary:
    """Summarize an entry for a list."""
    folder = usage.folder
    subject, problem = "", None
    try:
        read_info(folder)
        subject = read_files(folder).subject
    except CacheError as error:
        problem = error.reason
    return EntrySummary(
        name=usage.name,
        model=folder.parent.name,
        operation=folder.name.partition("_")[0],
        subject=subject,
        size_bytes=usage.size_bytes,
        used_at=datetime.fromtimestamp(usage.used_at, UTC),
        problem=problem,
    )


def find_entry(root: Path, text: str) -> Path:
    """Find an entry by path, by name, or by the beginning of its hash."""
    folders = list(entry_folders(root))
    exact = [f for f in folders if text in {str(f), f.name, f"{f.parent.name}/{f.name}"}]
    prefix = text.removesuffix("/").rpartition("/")[2].lower()
    matches = exact or [
        folder
        for folder in folders
        if prefix and (folder.name.startswith(prefix) or _hash_of(folder).startswith(prefix))
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
        for folder in list(entry_folders(root)):
            usage = EntryUsage.of(folder)
            problem = find_problem(folder, memo, reread=True)
            if problem and not folder.exists():
                continue  # it was removed meanwhile
            is_gone = bool(problem) and repair and _remove_damaged(root, folder, memo)
            yield EntryCheck(usage.name, usage.size_bytes, problem, is_gone)


def _remove_damaged(root: Path, folder: Path, memo: HashMemo) -> bool:
    model, name = folder.parent.name, folder.name
    try:
        with entry_lock(root, model, name).acquire(timeout=0):
            if f"{model}/{name}" in entries_in_use(root) or find_problem(folder, memo) is None:
                return False
            remove_entry(folder)
    except Timeout:
        return False
    return True


def _hash_of(folder: Path) -> str:
    return folder.name.partition("_")[2]
