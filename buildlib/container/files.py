"""Copying and checking the files of containers by their hashes."""

import hashlib
import os
from pathlib import Path

from buildlib.container.manifest import FileRecord, PartKind
from buildlib.errors import ContainerFileError

_CHUNK = 4 * 1024 * 1024


def copy_file(source: Path, destination: Path, kind: PartKind) -> FileRecord:
    """Copy to a new file, durably, and describe what was copied.

    Raises:
        OSError: as reading and writing do, with the file's name.
    """
    digest = hashlib.sha256()
    size = 0
    with source.open("rb") as reader, destination.open("xb") as writer:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            size += writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    return FileRecord(sha256=digest.hexdigest(), size_bytes=size, kind=kind)


def write_text(path: Path, text: str, kind: PartKind) -> FileRecord:
    """Write a new file, durably, and describe it."""
    data = text.encode()
    with path.open("xb") as writer:
        writer.write(data)
        writer.flush()
        os.fsync(writer.fileno())
    return FileRecord(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data), kind=kind)


def check_file(folder: Path, name: str, record: FileRecord, *, hashed: bool = True) -> None:
    """Compare a file with its record: its size, and its content if `hashed`.

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
        if not hashed:
            return
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise ContainerFileError(str(folder), name, reason) from error
    if digest != record.sha256:
        raise ContainerFileError(str(folder), name, "has changed since it was written")
