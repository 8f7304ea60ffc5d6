"""Layout of the cache root.

<cache_root>/hashes.sqlite                      known hashes of files
<cache_root>/genie_<32 hex>.json                results of the check of a Genie's dialogs
<cache_root>/.builds/<random>.lock, .used       a running build, and the entries it uses
<cache_root>/.finished/<64 hex>.json            inputs and outputs of a request to build
<cache_root>/.locks/<model>/<entry>.lock        held while an entry is made, checked or removed
<cache_root>/<model>/<operation>_<32 hex>/      an entry
<cache_root>/<model>/.<entry>.<random>/         an entry that is being made or removed
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock

SIDECAR: Final = "builder_cache_info.json"
FILES: Final = ".files.json"
LAST_USED: Final = ".last_used"
BUILDS: Final = ".builds"
FINISHED: Final = ".finished"
_LOCKS = ".locks"
_HASH_IN_NAME = 32
_ENTRY = re.compile(rf"[a-z]+_[0-9a-f]{{{_HASH_IN_NAME}}}")
_LEFTOVER = re.compile(rf"\.({_ENTRY.pattern})\.\w+")


@dataclass(frozen=True)
class CacheEntry:
    """The output of a stage.

    Attributes:
        hash: the whole hash; the folder's name has half of it.
        reused: whether it existed already, once the stage has run.
        problem: the fault of the entry that this one replaces, or None.
    """

    operation: str
    folder: Path
    hash: str
    reused: bool
    problem: str | None = None


def entry_name(operation: str, digest: str) -> str:
    """Return the name of an entry's folder."""
    return f"{operation}_{digest[:_HASH_IN_NAME]}"


def is_entry_name(name: str) -> bool:
    """Return whether a folder of that name is an entry."""
    return _ENTRY.fullmatch(name) is not None


def is_model_name(name: str) -> bool:
    """Return whether a model can have that name, and its entries a folder of it."""
    return name not in {"", ".", "..", BUILDS, FINISHED, _LOCKS} and Path(name).name == name


def model_folders(root: Path) -> list[Path]:
    """Return the folders of models, in the order of their names."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and is_model_name(path.name))


def entry_folders(root: Path) -> Iterator[Path]:
    """Yield every entry below a root, whole or not."""
    for model in model_folders(root):
        yield from sorted(p for p in model.iterdir() if is_entry_name(p.name) and p.is_dir())


def leftovers(model: Path) -> Iterator[tuple[Path, str]]:
    """Find folders of one model that are, or were when a build died, being made or removed.

    Yields:
        The folder, and the name of the entry with the lock that protects it.
    """
    for path in sorted(model.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match and path.is_dir():
            yield path, match[1]


def entry_lock(root: Path, model: str, entry: str) -> FileLock:
    """Return the lock of an entry, which need not exist."""
    folder = root / _LOCKS / model
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{entry}.lock", thread_local=False)
