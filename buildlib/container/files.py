"""Copying and checking the files of containers by their hashes."""

import hashlib
import os
from pathlib import Path
from typing import IO

from buildlib.cache.file_hashes import HashMemo
from buildlib.container.manifest import FileRecord, PartKind
from buildlib.errors import ContainerFileError, InputFileError

_CHUNK = 4 * 1024 * 1024


def copy_file(source: Path, destination: Path, kind: PartKind) -> FileRecord:
    """Copy to a new file, durably, and describe what was copied; makes the folder for it.

    Raises:
        OSError: as reading and writing do, with the file's name.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with destination.open("xb") as writer:
        record = pour(source, writer, kind)
        writer.flush()
        os.fsync(writer.fileno())
    return record


def pour(source: Path, sink: IO[bytes], kind: PartKind) -> FileRecord:
    """Write a file's bytes into `sink`, and describe what was written.

    Raises:
        OSError: as reading and writing do.
    """
    digest = hashlib.sha256()
    size = 0
    with source.open("rb") as reader:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            size += sink.write(chunk)
    return FileRecord(sha256=digest.hexdigest(), size_bytes=size, kind=kind)


def write_text(path: Path, text: str, kind: PartKind) -> FileRecord:
    """Write a new file, durably, and describe it."""
    data = text.encode()
    with path.open("xb") as writer:
        writer.write(data)
        writer.flush()
        os.fsync(writer.fileno())
    return FileRecord(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data), kind=kind)


def check_file(folder: Path, name: str, record: FileRecord, memo: HashMemo | None = None) -> None:
    """Compare a file with its record: its size, and its content if there is a memo of hashes.

    Raises:
        ContainerFileError: it is missing, not a file, unreadable, or has other content.
    """
    path = folder / name
    try:
        if not path.is_file():
            raise ContainerFileError(str(folder), name, "is missing")
        size = path.stat().st_size
        if size != record.size_bytes:
            reason = f"has {size} bytes where {record.size_bytes} were written"
            raise ContainerFileError(str(folder), name, reason)
        if memo is None:
            return
        digest = memo.digest(path).sha256
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise ContainerFileError(str(folder), name, reason) from error
    except InputFileError as error:
        raise ContainerFileError(str(folder), name, f"cannot be read ({error.reason})") from error
    if digest != record.sha256:
        raise ContainerFileError(str(folder), name, "has changed since it was written")
