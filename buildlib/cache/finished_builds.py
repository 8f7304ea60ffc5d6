"""Finished builds: inputs and outputs of a request, so that looks at files answer it again.

A build that has nothing to do still walks its stages, which needs all libraries of the builder and
the graphs of the model. Here the answer is kept under the request (arguments, code, versions), with
the hash of every file that was read and made. It is given again while each of them is as it was,
no file came or went in the folders of the model, and the cache still has the build's entries.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from buildlib.cache.file_hashes import MEMO_FILE, HashMemo
from buildlib.cache.layout import FINISHED, LAST_USED
from buildlib.errors import InputFileError
from buildlib.files import atomic_write_bytes

_PACKAGES = ("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-qnn", "tokenizers")
_VARIABLES = ("QAIRT", "QNN_")
_MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class FinishedBuild:
    """Files of a finished build by path, and the answer that it gave.

    Attributes:
        read: SHA-256 of the user's files.
        listed: names in the folders where files are looked for.
        made: SHA-256 of the files of its containers.
        entries: folders of the cache.
        answer: JSON values, for the caller.
    """

    read: Mapping[str, str]
    listed: Mapping[str, list[str]]
    made: Mapping[str, str]
    entries: list[str]
    answer: list[Any]

    @classmethod
    def of(
        cls,
        root: Path,
        read: Iterable[Path],
        listed: Iterable[Path],
        containers: Iterable[Path],
        entries: Iterable[Path],
        answer: list[Any],
    ) -> Self:
        """Describe a build that has just ended."""
        products = [path for folder in containers for path in sorted(folder.rglob("*"))]
        with HashMemo.at(root / MEMO_FILE) as memo:
            return cls(
                {str(path): memo.digest(path).sha256 for path in sorted(set(read))},
                {str(folder): _names(folder) for folder in sorted(set(listed))},
                {str(path): memo.digest(path).sha256 for path in products if path.is_file()},
                sorted(set(map(str, entries))),
                answer,
            )

    def holds(self, root: Path) -> bool:
        """Return whether all files are as they were; the entries then count as used."""
        marks = [Path(entry) / LAST_USED for entry in self.entries]
        if not all(mark.is_file() for mark in marks):
            return False
        if any(_names(Path(folder)) != names for folder, names in self.listed.items()):
            return False
        with HashMemo.at(root / MEMO_FILE) as memo:
            try:
                for path, sha256 in (*self.read.items(), *self.made.items()):
                    if memo.digest(Path(path)).sha256 != sha256:
                        return False
            except InputFileError:
                return False
        for mark in marks:
            with contextlib.suppress(OSError):
                mark.touch()
        return True


def find_finished(root: Path, request: Mapping[str, object]) -> FinishedBuild | None:
    """Return the finished build of a request, if everything is as it left it.

    Args:
        root: the cache root.
        request: all arguments, as JSON values.
    """
    path = _record(root, request)
    try:
        if path.stat().st_size > _MAX_BYTES:
            return None
        build = FinishedBuild(**json.loads(path.read_text(encoding="utf-8")))
        if not build.holds(root):
            return None
    except (OSError, ValueError, TypeError, AttributeError):  # none, or not as we write them
        return None
    with contextlib.suppress(OSError):
        path.touch()
    return build


def remember_finished(root: Path, request: Mapping[str, object], finished: FinishedBuild) -> None:
    """Keep a finished build under its request; that it cannot be kept is no error."""
    with contextlib.suppress(OSError):
        atomic_write_bytes(_record(root, request), json.dumps(asdict(finished)).encode())


def remove_stale(root: Path, older_than_s: float | None = None, *, everything: bool = False) -> int:
    """Remove the records of builds without their entries, which answer nothing any more.

    Args:
        root: the cache root.
        older_than_s: remove those too that no request has asked for in this time.
        everything: remove all.

    Returns:
        The number of removed records.
    """
    count = 0
    for path in (root / FINISHED).glob("*.json"):
        with contextlib.suppress(OSError):
            unused = older_than_s is not None and time.time() - path.stat().st_mtime > older_than_s
            if everything or unused or _is_stale(path):
                path.unlink()
                count += 1
    return count


def _is_stale(path: Path) -> bool:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
        return not all((Path(entry) / LAST_USED).is_file() for entry in entries)
    except (ValueError, LookupError, TypeError):  # not as we write them
        return True


def _record(root: Path, request: Mapping[str, object]) -> Path:
    decisive = {
        "request": request,
        "code": code_state(Path(__file__).parents[1]),
        "versions": [_version(name) for name in _PACKAGES],
        "environment": sorted(i for i in os.environ.items() if i[0].startswith(_VARIABLES)),
    }
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    return root / FINISHED / f"{digest}.json"


def code_state(package: Path) -> list[tuple[str, int, int]]:
    """Return name, size and date of every source file of a package."""
    files = []
    for parent, folders, names in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            status = Path(parent, name).stat()
            files.append((f"{parent}/{name}", status.st_size, status.st_mtime_ns))
    return sorted(files)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []
