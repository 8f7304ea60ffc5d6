"""Folders and files that appear whole or not at all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from buildlib.errors import ContainerError, ContainerExistsError
from buildlib.files import atomic_folder, atomic_write, sync_folder
from buildlib.paths import user_path


@contextmanager
def placed_folder(
    destination: Path, *, exist_ok: bool, may_replace: Callable[[Path], bool]
) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of `destination` when the block ends well.

    Args:
        destination: an empty folder there is replaced in any case.
        exist_ok: whether a folder with content may be replaced.
        may_replace: whether what is there is ours to replace.

    Raises:
        ContainerExistsError: there is something that may not be replaced.
        ContainerError: the folder cannot be written.
    """
    destination = user_path(destination).absolute()
    refuse_to_lose(destination, exist_ok=exist_ok, may_replace=may_replace)
    try:
        with atomic_folder(destination) as scratch:
            yield scratch
            refuse_to_lose(destination, exist_ok=exist_ok, may_replace=may_replace)
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        raise ContainerError(str(destination), reason) from error


@contextmanager
def placed_file(destination: Path) -> Iterator[BinaryIO]:
    """A file to write, which appears as `destination` when the block ends well.

    Raises:
        ContainerExistsError: there is something.
        ContainerError: the file cannot be written.
    """
    destination = user_path(destination).absolute()
    try:
        if destination.exists() or destination.is_symlink():
            raise FileExistsError
        with atomic_write(destination, replace=False) as sink:
            yield sink
        sync_folder(destination.parent)
    except FileExistsError as error:
        reason = "is there already; name another file"
        raise ContainerExistsError(str(destination), reason) from error
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        raise ContainerError(str(destination), reason) from error


def refuse_to_lose(
    destination: Path, *, exist_ok: bool, may_replace: Callable[[Path], bool]
) -> None:
    """See that nothing would be lost by placing a folder at `destination`.

    Raises:
        ContainerExistsError: there is something that may not be replaced.
    """
    destination = user_path(destination)
    if not destination.exists() and not destination.is_symlink():
        return
    path = str(destination)
    if destination.is_symlink() or not destination.is_dir():
        raise ContainerExistsError(path, "is there already and is no folder")
    if not any(destination.iterdir()):
        return
    if not exist_ok:
        raise ContainerExistsError(
            path, "is there already; name another folder, or replace it (`--overwrite`)"
        )
    if not may_replace(destination):
        raise ContainerExistsError(path, "holds something else than a container; not replaced")
