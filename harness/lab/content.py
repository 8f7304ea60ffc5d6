"""Files of other hosts by content: used where they are, or fetched over SSH, once for each host.

Files that have the same paths and content here, as in a shared folder, are used there. What is
missing is fetched into the cache, under its SHA-256; trees of hard links give it the paths that it
has on the other host.
"""

import getpass
import hashlib
import json
import os
import shutil
import socket
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from buildlib.closeable import Closeable
from buildlib.errors import BuildError
from buildlib.paths import default_cache_root, path_below
from harness.deploy.deployment import DeployFile
from harness.deploy.digests import hash_files
from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec
from harness.errors import HarnessError, HostFileError
from harness.plans.cell_runner import ModelCache
from harness.plans.cells import Cell
from harness.runtimes.bundles.bundle import pushed_files

_FETCH_S = 3600.0


def _checked(files: Mapping[str, str]) -> Mapping[str, str]:
    for path, sha256 in files.items():
        if not path.startswith("/") or ".." in path.split("/") or len(bytes.fromhex(sha256)) != 32:
            raise ValueError(f"{path!r:.200} with the hash {sha256!r:.80} is no file of a host")
    return files


Files = Annotated[Mapping[str, str], AfterValidator(_checked)]
"""SHA-256 of files of a host by their absolute paths."""


class CellFiles(BaseModel):
    """Files that a cell reads on the host that submitted it.

    Attributes:
        inputs: what its workload reads, and what is pushed with it.
        push: files that are pushed with it, as `pushed_files` takes them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    container: Files = {}
    inputs: Files = {}
    push: tuple[str, ...] = ()


def find_files(cells: Sequence[Cell], push: tuple[str, ...]) -> Iterator[CellFiles]:
    """Yield the files of each of the cells, every one of which is hashed once.

    Args:
        push: files that are pushed with containers, as `pushed_files` takes them.

    Raises:
        HostFileError: one cannot be read.
        WrongUseError: a pushed file is not there.
    """
    digests: dict[Path, str] = {}

    def hashed(paths: Iterable[Path]) -> dict[str, str]:
        wanted = [path.absolute() for path in paths]
        new = [path for path in wanted if path not in digests]
        digests.update({path: digest.sha256 for path, digest in hash_files(new).items()})
        return {str(path): digests[path] for path in wanted}

    @cache
    def of_container(folder: Path) -> dict[str, str]:
        return hashed(folder_files(folder))

    for cell in cells:
        named = (getattr(cell.workload, key) for key in cell.workload.input_keys)
        inputs = [cell.folder / name for name in named if name is not None]
        pushed = pushed_files(push if cell.workload.needs_container else (), cell.folder)
        folder = cell.container if cell.container and cell.container.is_dir() else None
        yield CellFiles(
            container=of_container(folder) if folder else {},
            inputs=hashed([*inputs, *(file.path for file in pushed.values())]),
            push=tuple(f"{file.path.absolute()}:{name}" for name, file in pushed.items()),
        )


def folder_files(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


@dataclass(frozen=True, slots=True)
class LocalCell:
    """A cell whose files are on this host, and what is pushed with it."""

    cell: Cell
    push: Mapping[str, DeployFile]


class HostFiles(Closeable):
    """Files of other hosts on this one. Thread-safe: each is fetched once."""

    def __init__(self, models: ModelCache, devices: Devices, cache: Path | None = None) -> None:
        """Nothing is fetched yet.

        Args:
            devices: reaches other hosts; closed with it.
            cache: folder of what was fetched.
        """
        self._models = models
        self._devices = devices
        self.cache = (cache or default_cache_root()) / "lab"
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def close(self) -> None:
        """Close the connections to other hosts."""
        self._devices.close()

    def localise(self, cell: Cell, files: CellFiles, origin: str) -> LocalCell:
        """Return a cell as it runs on this host.

        Args:
            origin: host that submitted it, as SSH reaches it.

        Raises:
            HostFileError: a file is not here, and cannot be fetched.
        """
        container = self._container(cell, files.container, origin)
        root = self.root(files.inputs, origin)
        changed = {
            key: str(path_below(root, cell.folder / name))
            for key in cell.workload.input_keys
            if (name := getattr(cell.workload, key)) is not None
        }
        here = replace(cell, container=container, workload=cell.workload.model_copy(update=changed))
        push = (text.rpartition(":") for text in files.push)
        return LocalCell(
            here, pushed_files(f"{path_below(root, path)}:{name}" for path, _, name in push)
        )

    def root(self, files: Mapping[str, str], origin: str) -> Path:
        """Return a folder that has files of another host by their absolute paths.

        It is `/` where they are all here.

        Args:
            origin: the host, as SSH reaches it.

        Raises:
            HostFileError: one is not here, and cannot be fetched.
        """
        digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
        tree = self.cache / "trees" / digest
        with self._locks[digest]:
            for root in (Path("/"), tree):
                if _have({path_below(root, path): sha256 for path, sha256 in files.items()}):
                    return root
            blobs = {path: self._fetch(path, sha256, origin) for path, sha256 in files.items()}
            tree.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=tree.parent, prefix=".links-") as scratch:
                for path, blob in blobs.items():
                    link = path_below(Path(scratch, "tree"), path)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    os.link(blob, link)
                shutil.rmtree(tree, ignore_errors=True)
                Path(scratch, "tree").replace(tree)
            return tree

    def keep(self, files: Mapping[str, str]) -> None:
        """Keep files of this host, so that they need not be fetched for other cells."""
        for path, sha256 in files.items():
            blob = self.cache / "files" / sha256
            if not _have({blob: sha256}):
                blob.parent.mkdir(parents=True, exist_ok=True)
                blob.unlink(missing_ok=True)
                os.link(path, blob)

    def _container(self, cell: Cell, files: Mapping[str, str], origin: str) -> Path | None:
        path = cell.container
        if path is None or self._is_model(path, cell):
            return path
        if not files:
            raise HostFileError(str(path), f"{cell.runtime} reads it from a shared folder only")
        return path_below(self.root(files, origin), path)

    def _is_model(self, path: Path, cell: Cell) -> bool:
        try:
            return (
                path.exists() and self._models.open(path, cell.runtime).info.sha256 == cell.affinity
            )
        except (BuildError, HarnessError):
            return False

    def _fetch(self, path: str, sha256: str, origin: str) -> Path:
        """Fetch a file that is not here yet; return it in the cache."""
        blob = self.cache / "files" / sha256
        try:
            blob.parent.mkdir(parents=True, exist_ok=True)
            with (
                self._locks[sha256],
                tempfile.TemporaryDirectory(dir=blob.parent, prefix=".fetch-") as scratch,
            ):
                if not _have({blob: sha256}):
                    part = Path(scratch, "part")
                    device = self._devices.open(DeviceSpec("linux", origin))
                    device.pull(path, part, timeout_s=_FETCH_S)
                    if not _have({part: sha256}):
                        raise HostFileError(path, f"{origin} changed it after it was submitted")
                    part.replace(blob)
        except HostFileError:
            raise
        except (HarnessError, OSError) as error:
            reason = f"it is not on this host, and {origin} does not send it: {error}"
            raise HostFileError(path, reason) from error
        return blob


def own_address() -> str:
    """Return this machine as SSH of another host would reach it."""
    return f"{getpass.getuser()}@{socket.getfqdn()}"


def _have(files: Mapping[Path, str]) -> bool:
    """Return whether all files are here, with these contents."""
    try:
        if not all(path.is_file() for path in files):
            return False
        digests = hash_files(files)
    except (HostFileError, OSError):
        return False
    return all(digests[path].sha256 == sha256 for path, sha256 in files.items())
