"""Files of cells on another host than the one that submitted them: found by content, or fetched.

A file that has the same path and content here, as in a shared folder, is used where it is. What is
missing is fetched from the submitting host over SSH, once for each worker's host, into the cache.
"""

import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from buildlib.closeable import Closeable
from buildlib.errors import BuildError
from buildlib.paths import default_cache_root
from harness.deploy.deployment import DeployFile
from harness.deploy.digests import hash_files
from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec
from harness.errors import HarnessError, HostFileError
from harness.plans.cell_runner import ModelCache
from harness.plans.cells import Cell
from harness.runtimes.bundles.bundle import pushed_files

_FETCH_S = 3600.0


class CellFiles(BaseModel):
    """Files that a cell reads on the host that submitted it.

    Attributes:
        container: SHA-256 by path, relative to the container.
        inputs: SHA-256 by absolute path, of what its workload reads and what is pushed with it.
        push: files that are pushed with it, as `pushed_files` takes them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    container: Mapping[str, str] = {}
    inputs: Mapping[str, str] = {}
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

    def hashed(paths: Iterable[Path]) -> list[tuple[Path, str]]:
        wanted = list(paths)
        new = [path for path in wanted if path not in digests]
        digests.update({path: digest.sha256 for path, digest in hash_files(new).items()})
        return [(path, digests[path]) for path in wanted]

    @cache
    def of_container(folder: Path) -> dict[str, str]:
        parts = hashed(path for path in sorted(folder.rglob("*")) if path.is_file())
        return {str(path.relative_to(folder)): sha256 for path, sha256 in parts}

    for cell in cells:
        named = (getattr(cell.workload, key) for key in cell.workload.input_keys)
        inputs = [(cell.folder / name).absolute() for name in named if name is not None]
        pushed = pushed_files(push if cell.workload.needs_container else (), cell.folder)
        paths = [*inputs, *(file.path for file in pushed.values())]
        folder = cell.container if cell.container and cell.container.is_dir() else None
        yield CellFiles(
            container=of_container(folder) if folder else {},
            inputs={str(path): sha256 for path, sha256 in hashed(paths)},
            push=tuple(f"{file.path}:{name}" for name, file in pushed.items()),
        )


@dataclass(frozen=True, slots=True)
class LocalCell:
    """A cell whose files are on this host, and what is pushed with it."""

    cell: Cell
    push: Mapping[str, DeployFile]


class HostFiles(Closeable):
    """Files of cells on this host. Thread-safe: each is fetched once."""

    def __init__(self, models: ModelCache, devices: Devices, cache: Path | None = None) -> None:
        """Nothing is fetched yet.

        Args:
            devices: reaches other hosts; closed with it.
            cache: folder of what was fetched.
        """
        self._models = models
        self._devices = devices
        self._cache = (cache or default_cache_root()) / "lab"
        self._lock = threading.Lock()

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
        with self._lock:
            inputs = {
                path: self._input(Path(path), sha256, origin)
                for path, sha256 in files.inputs.items()
            }
            container = self._container(cell, files.container, origin)
        named = {key: getattr(cell.workload, key) for key in cell.workload.input_keys}
        changed = {
            key: str(inputs[str((cell.folder / name).absolute())])
            for key, name in named.items()
            if name is not None
        }
        push = (text.rpartition(":") for text in files.push)
        here = replace(cell, container=container, workload=cell.workload.model_copy(update=changed))
        return LocalCell(here, pushed_files(f"{inputs[path]}:{name}" for path, _, name in push))

    def _input(self, path: Path, sha256: str, origin: str) -> Path:
        if _has(path, sha256):
            return path
        kept = self._cache / "files" / sha256 / path.name
        if not _has(kept, sha256):
            self._fetch({str(path): (kept.name, sha256)}, kept.parent, origin)
        return kept

    def _container(self, cell: Cell, names: Mapping[str, str], origin: str) -> Path | None:
        path = cell.container
        if path is None or self._is_model(path, cell):
            return path
        kept = self._cache / "containers" / cell.affinity / path.name
        if not self._is_model(kept, cell):
            if not names:
                raise HostFileError(str(path), f"{cell.runtime} reads it from a shared folder only")
            wanted = {f"{path}/{name}": (name, sha256) for name, sha256 in names.items()}
            self._fetch(wanted, kept, origin)
        return kept

    def _is_model(self, path: Path, cell: Cell) -> bool:
        try:
            return (
                path.exists() and self._models.open(path, cell.runtime).info.sha256 == cell.affinity
            )
        except (BuildError, HarnessError):
            return False

    def _fetch(self, wanted: Mapping[str, tuple[str, str]], folder: Path, origin: str) -> None:
        """Fetch files into a folder that appears only once all are there.

        Args:
            wanted: name in the folder and SHA-256, by path on the origin.
        """
        first = next(iter(wanted))
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            device = self._devices.open(DeviceSpec("linux", origin))
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
                part = Path(scratch) / folder.name
                for remote, (name, sha256) in wanted.items():
                    target = part / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    device.pull(remote, target, timeout_s=_FETCH_S)
                    if not _has(target, sha256):
                        raise HostFileError(remote, f"{origin} changed it after it was submitted")
                shutil.rmtree(folder, ignore_errors=True)
                part.replace(folder)
        except HostFileError:
            raise
        except (HarnessError, OSError) as error:
            reason = f"it is not on this host, and {origin} does not send it: {error}"
            raise HostFileError(first, reason) from error


def _has(path: Path, sha256: str) -> bool:
    try:
        return path.is_file() and hash_files([path])[path].sha256 == sha256
    except HostFileError:
        return False
