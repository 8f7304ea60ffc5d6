"""Notices that the user's files change while a build works on them.

Stages read them through links, so that a file that is written over changes under a stage whose key
has the hash of what it was.
"""

from collections.abc import Mapping
from pathlib import Path

from buildlib.cache.file_hashes import hash_files
from buildlib.errors import InputFileError

_Look = tuple[int, int]


class SourceWatch:
    """Files with what they were when they were hashed; threads share it."""

    def __init__(self, memo: Path) -> None:
        self._memo = memo
        self._looks: dict[Path, _Look] = {}
        self._hashes: dict[Path, str] = {}

    def hashed(self, files: Mapping[str, Path]) -> dict[str, str]:
        """SHA-256 of files by name; from now on they are watched.

        Raises:
            InputFileError: one cannot be read.
        """
        looks = {path: look for path in files.values() if (look := _look(path))}
        digests = hash_files(files.values(), self._memo)
        self._hashes |= {path: digest.sha256 for path, digest in digests.items()}
        self._looks |= looks
        return {name: digests[path].sha256 for name, path in files.items()}

    def check(self, *, reread: bool = False) -> None:
        """See that no file has changed: a look at each, and a hash of what looks otherwise.

        A file that is gone has not: what is linked stays.

        Args:
            reread: trust size and mtime of none; the hash is known if the file is what it was.

        Raises:
            InputFileError: one has.
        """
        odd = {
            path: now
            for path, before in list(self._looks.items())
            if (now := _look(path)) and (now != before or reread)
        }
        digests = hash_files(odd, self._memo)
        for path, digest in digests.items():
            if digest.sha256 != self._hashes[path]:
                raise InputFileError(str(path), "it changed while it was built from; build again")
        self._looks |= odd  # merely a new date


def _look(path: Path) -> _Look | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
