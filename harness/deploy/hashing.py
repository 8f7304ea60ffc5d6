"""The builder's memo of file hashes, with the harness's error."""

from collections.abc import Iterable
from pathlib import Path

from buildlib.errors import InputFileError
from buildlib.hashing_memo import FileDigest
from buildlib.hashing_memo import hash_files as hash_files_of_builder
from harness.errors import HostFileError

__all__ = ["FileDigest", "hash_files"]


def hash_files(paths: Iterable[Path], memo: Path | None = None) -> dict[Path, FileDigest]:
    """The digests of `paths`, from the memo where the file is what it was.

    Raises:
        HostFileError: a file is missing, unreadable or not regular, or changed meanwhile.
    """
    try:
        return hash_files_of_builder(paths, memo)
    except InputFileError as error:
        raise HostFileError(error.path, error.reason) from None
