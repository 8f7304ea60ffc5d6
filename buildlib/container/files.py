"""Files of a container: copied and checked by their hashes, placed whole or not at all."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from buildlib.cache.file_hashes import HashMemo
from buildlib.container.manifest import FileRecord, PartKind, is_container
from buildlib.errors import ContainerError, InputFileError
from buildlib.files import atomic_folder, atomic_write, sync_folder
from buildlib.paths import user_path

_CHUNK = 4 * 1024 * 1024


def copy_file(source: Path, destination: Path, kind: PartKind) -> FileRecord:
    """Copy to a new file, durably, and describe it; makes the folder for it."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with destination.open("xb") as writer:
        record = copy_into(source, writer, kind)
        writer.flush()
        os.fsync(writer.fileno())
    return record


def copy_into(source: Path, sink: IO[bytes], kind: PartKind) -> FileRecord:
    """Write a file's bytes into `sink`, and describe them."""
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


_EDITED = "was edited: -O of the build sets the HTP's options, --genie-config another dialog"


def file_error(folder: Path, name: str, reason: str) -> ContainerError:
    """Return the error of a file of a container that is missing, changed, or must not be there."""
    return ContainerError(str(folder), f"file {name!r} {reason}; build or copy it again")


def check_file(folder: Path, name: str, record: FileRecord, memo: HashMemo | None = None) -> None:
    """Compare a file with its record: its size, and its content if there is a memo of hashes."""
    path = folder / name
    try:
        if not path.is_file():
            raise file_error(folder, name, "is missing")
        size = path.stat().st_size
        if size != record.size_bytes:
            reason = f"has {size} bytes where {record.size_bytes} were written"
            raise file_error(folder, name, _EDITED if record.kind == "configuration" else reason)
        if memo is None:
            return
        digest = memo.digest(path).sha256
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise file_error(folder, name, reason) from error
    except InputFileError as error:
        raise file_error(folder, name, f"cannot be read ({error.reason})") from error
    if digest != record.sha256:
        reason = "has changed since it was written"
        raise file_error(folder, name, _EDITED if record.kind == "configuration" else reason)


@contextmanager
def place_folder(destination: Path, *, exist_ok: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes `destination` when the block succeeds.

    Args:
        destination: an empty folder there is replaced in any case.
        exist_ok: whether a container there may be replaced.
    """
    destination = user_path(destination).absolute()
    check_replaceable(destination, exist_ok=exist_ok)
    try:
        with atomic_folder(destination) as scratch:
            yield scratch
            check_replaceable(destination, exist_ok=exist_ok)
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        raise ContainerError(str(destination), reason) from error


@contextmanager
def place_file(destination: Path) -> Iterator[BinaryIO]:
    """Yield a file that becomes `destination` when the block succeeds."""
    destination = user_path(destination).absolute()
    try:
        if destination.exists() or destination.is_symlink():
            raise FileExistsError
        with atomic_write(destination, replace=False) as sink:
            yield sink
        sync_folder(destination.parent)
    except FileExistsError as error:
        reason = "is there already; name another file"
        raise ContainerError(str(destination), reason) from error
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        raise ContainerError(str(destination), reason) from error


def check_replaceable(destination: Path, *, exist_ok: bool) -> None:
    """Refuse a destination where placing a folder would lose something."""
    destination = user_path(destination)
    if not destination.exists() and not destination.is_symlink():
        return
    path = str(destination)
    if destination.is_symlink() or not destination.is_dir():
        raise ContainerError(path, "is there already and is not a folder")
    if not any(destination.iterdir()):
        return
    if not exist_ok:
        raise ContainerError(
            path, "is there already; name another folder, or replace it (`--overwrite`)"
        )
    if not is_container(destination):
        raise ContainerError(path, "holds something else than a container; not replaced")
