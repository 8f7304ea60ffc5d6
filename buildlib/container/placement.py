"""Folders and files that appear whole or not at all."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from buildlib.errors import ContainerError, ContainerExistsError
from buildlib.paths import user_path
from buildlib.syncing import sync_folder


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
        destination.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{destination.name}."
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))
    except OSError as error:
        raise ContainerError(str(destination), f"cannot be written ({error.strerror})") from error
    try:
        scratch.chmod(0o755)
        yield scratch
        for parent, _, _ in os.walk(scratch):
            sync_folder(Path(parent))
        refuse_to_lose(destination, exist_ok=exist_ok, may_replace=may_replace)
        _swap(scratch, destination)
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        raise ContainerError(str(destination), reason) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def placed_file(destination: Path) -> Iterator[BinaryIO]:
    """A file to write, which appears as `destination` when the block ends well.

    Raises:
        ContainerExistsError: there is something.
        ContainerError: the file cannot be written.
    """
    destination = user_path(destination).absolute()
    scratch = destination.with_name(f".{destination.name[:80]}.{secrets.token_hex(6)}.part")
    try:
        if destination.exists() or destination.is_symlink():
            raise FileExistsError
        destination.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("xb") as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        _publish(scratch, destination)
        sync_folder(destination.parent)
    except FileExistsError as error:
        reason = "is there already; name another file"
        raise ContainerExistsError(str(destination), reason) from error
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        raise ContainerError(str(destination), reason) from error
    finally:
        scratch.unlink(missing_ok=True)


def _publish(scratch: Path, destination: Path) -> None:
    try:
        destination.hardlink_to(scratch)  # unlike a rename, it replaces nothing
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        scratch.rename(destination)


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


def _swap(scratch: Path, destination: Path) -> None:
    """Rename over an empty or absent folder; a folder with content is moved aside first."""
    if destination.exists() and any(destination.iterdir()):
        aside = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
        destination.replace(aside)
        try:
            scratch.replace(destination)
        except OSError:
            aside.replace(destination)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    else:
        scratch.replace(destination)
    sync_folder(destination.parent)
