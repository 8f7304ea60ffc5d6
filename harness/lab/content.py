"""Files of other hosts by content: used where they are, or fetched over SSH, once for each host.

Files that have the same paths and content here, as in a shared folder, are used there. Missing ones
are fetched into an entry of the stage cache and follow its rules: from a worker that has them, or
from the host that named them. In the entry they have the paths that they have on the other host.
"""

import getpass
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict

from buildlib.cache.key import StageKey
from buildlib.cache.layout import is_entry_name
from buildlib.cache.records import read_files
from buildlib.cache.store import StageCache
from buildlib.closeable import Closeable
from buildlib.errors import BuildError, CacheError
from buildlib.paths import default_cache_root, path_below, plain_path
from harness.deploy.deployment import DeployFile
from harness.deploy.digests import hash_files
from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec
from harness.errors import HarnessError, HostFileError, StoreError
from harness.plans.cell_runner import ModelCache
from harness.plans.cells import Cell
from harness.runtimes.bundles.bundle import pushed_files
from harness.words import pluralize

_FETCH_S = 3600.0
_GROUP = "lab"
_FILES = "files"
BUILD = "build"

Found: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]
"""Hosts that have contents, as SSH reaches them, each with its path there, by SHA-256."""


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
        inputs: files that its workload reads, and those that are pushed with it.
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
    """
    digests: dict[Path, str] = {}

    def hashed(paths: Iterable[Path]) -> dict[str, str]:
        plain = [plain_path(path) for path in paths]
        new = [path for path in plain if path not in digests]
        digests.update({path: digest.sha256 for path, digest in hash_files(new).items()})
        return {str(path): digests[path] for path in plain}

    @cache
    def of_container(folder: Path) -> dict[str, str]:
        return hashed(folder_files(folder))

    for cell in cells:
        names = (getattr(cell.workload, key) for key in cell.workload.input_keys)
        inputs = [cell.folder / name for name in names if name is not None]
        pushes = pushed_files(push if cell.workload.needs_container else (), cell.folder)
        folder = cell.container if cell.container and cell.container.is_dir() else None
        yield CellFiles(
            container=of_container(folder) if folder else {},
            inputs=hashed([*inputs, *(file.path for file in pushes.values())]),
            push=tuple(f"{file.path.absolute()}:{name}" for name, file in pushes.items()),
        )


def folder_files(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


@dataclass(frozen=True, slots=True)
class LocalCell:
    """A cell with its files on this host, and those that are pushed with it."""

    cell: Cell
    push: Mapping[str, DeployFile]


class HostFiles(Closeable):
    """Files of other hosts on this one. Thread-safe: each is fetched once."""

    def __init__(
        self,
        models: ModelCache,
        devices: Devices,
        cache: Path | None = None,
        holders: Callable[[Collection[str]], Found] = lambda _: {},
    ) -> None:
        """Nothing is fetched yet.

        Args:
            devices: reaches other hosts; closed with it.
            cache: the stage cache; its folder `lab` takes the files.
            holders: finds hosts beside the one that named the files.
        """
        self._models = models
        self._devices = devices
        self._root = cache or default_cache_root()
        self._holders = holders
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def close(self) -> None:
        """Close the connections to other hosts."""
        self._devices.close()

    @contextmanager
    def localise(self, cell: Cell, files: CellFiles, origin: str) -> Iterator[LocalCell]:
        """Give a cell as it runs on this host; its files stay until it has.

        Args:
            origin: host that submitted it, as SSH reaches it.
        """
        with (
            self._container(cell, files.container, origin) as container,
            self.root(files.inputs, origin) as root,
        ):
            inputs = {
                key: str(path_below(root, cell.folder / name))
                for key in cell.workload.input_keys
                if (name := getattr(cell.workload, key)) is not None
            }
            workload = cell.workload.model_copy(update=inputs)
            push = (text.rpartition(":") for text in files.push)
            yield LocalCell(
                replace(cell, container=container, workload=workload),
                pushed_files(f"{path_below(root, path)}:{name}" for path, _, name in push),
            )

    @contextmanager
    def root(self, files: Files, origin: str) -> Iterator[Path]:
        """Give a folder that has files of another host by their absolute paths while it is used.

        It is `/` where they are all here.

        Args:
            origin: the host, as SSH reaches it.

        Raises:
            HostFileError: one is not here, and cannot be fetched.
            CacheError: the cache cannot take it.
        """
        if _have({Path(path): sha256 for path, sha256 in files.items()}):
            yield Path("/")
            return
        fill = partial(self._fill, files, origin)
        subject = f"{pluralize(len(files), 'file')} of {origin}"
        with self.entry(_FILES, files, subject, fill) as folder:
            yield folder / _FILES

    @contextmanager
    def entry(
        self,
        operation: str,
        identity: Mapping[str, str],
        subject: str,
        make: Callable[[Path], None],
    ) -> Iterator[Path]:
        """Give an entry of the cache, which stays while it is used.

        Args:
            identity: everything that its content depends on.
            subject: its content, for people to read.
            make: fills an empty folder if there is no entry.
        """
        key = StageKey(operation, identity, ())
        with StageCache(self._root, _GROUP) as stages:
            yield stages.get_or_build(key, Path(_GROUP), make, subject=subject).folder

    def contents(self) -> dict[str, Path]:
        """Return the files that the cache has of other hosts, and of builds, by SHA-256."""
        contents: dict[str, Path] = {}
        folder = self._root / _GROUP
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if is_entry_name(entry.name) and entry.name.startswith((f"{_FILES}_", f"{BUILD}_")):
                with suppress(CacheError):  # it is just being removed
                    files = read_files(entry).files
                    contents |= {file.sha256: entry / name for name, file in files.items()}
        return contents

    @contextmanager
    def _container(self, cell: Cell, files: Files, origin: str) -> Iterator[Path | None]:
        path = cell.container
        if path is None or self._is_model(path, cell):
            yield path
            return
        if not files:
            raise HostFileError(str(path), f"{cell.runtime} reads it from a shared folder only")
        with self.root(files, origin) as root:
            yield path_below(root, path)

    def _is_model(self, path: Path, cell: Cell) -> bool:
        try:
            return (
                path.exists() and self._models.open(path, cell.runtime).info.sha256 == cell.affinity
            )
        except (BuildError, HarnessError):
            return False

    def _fill(self, files: Files, origin: str, folder: Path) -> None:
        """Put files of another host into a folder, each from this host where it is here."""
        hosts_that_fail: set[str] = set()
        with ExitStack() as stack:
            for sha256 in sorted(set(files.values())):
                stack.enter_context(self._locks[sha256])
            here, others = self.contents(), dict[str, Sequence[tuple[str, str]]]()
            with suppress(StoreError):
                others.update(self._holders(set(files.values())))
            for path, sha256 in files.items():
                place = path_below(folder / _FILES, path)
                place.parent.mkdir(parents=True, exist_ok=True)
                if not _link(here.get(sha256), place, sha256):
                    sources = [*others.get(sha256, ()), (origin, path)]
                    self._fetch(path, sha256, place, sources, hosts_that_fail)
                here[sha256] = place

    def _fetch(
        self,
        path: str,
        sha256: str,
        place: Path,
        sources: Sequence[tuple[str, str]],
        hosts_that_fail: set[str],
    ) -> None:
        """Fetch a file from the first of its sources that sends it, hosts that fail last."""
        reasons = []
        for host, there in sorted(sources, key=lambda source: source[0] in hosts_that_fail):
            try:
                device = self._devices.open(DeviceSpec("linux", host))
                device.pull(there, place, timeout_s=_FETCH_S)
            except HarnessError as error:
                hosts_that_fail.add(host)
                reasons.append(f"{host} does not send it: {error}")
                continue
            if _have({place: sha256}):
                return
            reasons.append(f"{host} changed it after it was submitted")
        raise HostFileError(path, f"it is not on this host, and {'; '.join(reasons)}")


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


def _link(source: Path | None, place: Path, sha256: str) -> bool:
    """Link a file of this host; return whether it is there and has its content."""
    if source is None:
        return False
    try:
        os.link(source, place)
    except OSError:  # it is just being removed
        return False
    if not _have({place: sha256}):
        place.unlink()
        return False
    return True
