"""Files and folders that appear whole or not at all, even after a crash."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}


@contextmanager
def atomic_path(path: Path, *, replace: bool = True, sync: bool = True) -> Iterator[Path]:
    """Give an unused hidden path beside `path`; its file takes the place of `path` at the end.

    The block makes the file. An exception removes it, and leaves `path` as it was. The folder of
    `path` is made if it does not exist.

    Args:
        replace: whether a file at `path` may be replaced.
        sync: whether the content must be on the disk before the file gets its name; `sync_folder`
            brings the name there.

    Raises:
        FileExistsError: `path` exists and may not be replaced.
        OSError: as writing does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:80]}.{secrets.token_hex(6)}.part")
    try:
        yield temporary
        if sync:
            sync_file(temporary)
        if replace:
            temporary.replace(path)
        else:
            _rename_to_new(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path, *, replace: bool = True, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the place of `path` when the block ends.

    Arguments and errors are those of `atomic_path`.
    """
    with (
        atomic_path(path, replace=replace, sync=sync) as temporary,
        temporary.open("xb") as file,
    ):
        yield file


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write a file as `atomic_write` does."""
    with atomic_write(path) as file:
        file.write(data)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Make an empty folder beside `path`, and remove it at the end unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    scratch.mkdir()  # `tempfile` would make it for its user alone, whatever the umask
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make an empty folder to fill, which takes the place of `path` when the block ends.

    The files in it must have been synced. A folder at `path` is replaced.
    """
    with scratch_folder(path) as scratch:
        yield scratch
        for parent, _, _ in os.walk(scratch):
            sync_folder(Path(parent))
        if path.exists() and any(path.iterdir()):
            with scratch_folder(path) as old:
                path.replace(old)
                try:
                    scratch.replace(path)
                except OSError:
                    old.replace(path)
                    raise
        else:
            scratch.replace(path)
        sync_folder(path.parent)


def check_file(path: Path) -> None:
    """Check that `path` is a file, which can be read to an end, or a pipe that a shell opened.

    Raises:
        OSError: it is not; or it is missing, or its links lead nowhere.
    """
    mode = path.stat().st_mode
    from_shell = path.is_relative_to("/dev/fd") or path == Path("/dev/stdin")
    if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and from_shell):
        kind = _KINDS.get(stat.S_IFMT(mode), "device")
        raise OSError(errno.EINVAL, f"it is a {kind}, not a file")


def sync_file(path: Path) -> None:
    """Bring a file's content to the disk; one with several links was synced with the first."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_nlink == 1:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rename_to_new(temporary: Path, path: Path) -> None:
    try:
        path.hardlink_to(temporary)  # unlike a rename, it replaces nothing
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        temporary.rename(path)
