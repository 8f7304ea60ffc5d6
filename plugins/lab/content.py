"""Files that jobs of a lab name: they lie in a folder that all its hosts see.

A host uses them only where they have the content that they had when the job was submitted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from buildlib.paths import plain_path, user_path
from harness.deploy.deployment import DeployFile
from harness.deploy.digests import hash_files
from harness.errors import HostFileError, WrongUseError
from harness.plans.cell_runner import ModelCache
from harness.plans.cells import Cell
from harness.runtimes.bundles.bundle import pushed_files
from harness.runtimes.description import DescribedModel

_ELSEWHERE = "is not what was submitted: put it into a folder that all hosts of the lab see"


def _checked(files: Mapping[str, str]) -> Mapping[str, str]:
    for path, sha256 in files.items():
        if not path.startswith("/") or ".." in path.split("/") or len(bytes.fromhex(sha256)) != 32:
            raise ValueError(f"{path!r:.200} with the hash {sha256!r:.80} is no file of a host")
    return files


Files = Annotated[Mapping[str, str], AfterValidator(_checked)]
"""SHA-256 of files by their absolute paths."""


class CellFiles(BaseModel):
    """Files that a cell reads.

    Attributes:
        files: of its container, its workload, and those that are pushed with it.
        push: files that are pushed with it, as `pushed_files` takes them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: Files = {}
    push: tuple[str, ...] = ()


def find_files(
    cells: Sequence[Cell], push: tuple[str, ...], models: ModelCache
) -> Iterator[CellFiles]:
    """Yield the files of each of the cells, every one of which is hashed once.

    Args:
        push: files that are pushed with containers, as `pushed_files` takes them.

    Raises:
        WrongUseError: a cell would keep files of its own on one host.
        HostFileError: a file is missing.
    """
    digests: dict[str, str] = {}
    for cell in cells:
        pushes = pushed_files(push if cell.workload.needs_container else (), cell.folder)
        texts = tuple(f"{file.path}:{name}" for name, file in pushes.items())
        paths = [str(path) for path in _read_by(cell, texts, models)]
        digests |= hashes(path for path in paths if path not in digests)
        yield CellFiles(files={path: digests[path] for path in paths}, push=texts)


def hashes(paths: Iterable[Path | str]) -> dict[str, str]:
    """Return the SHA-256 of files by their absolute paths."""
    digests = hash_files(sorted({plain_path(Path(path)) for path in paths}))
    return {str(path): digest.sha256 for path, digest in digests.items()}


def check_files(files: Files) -> None:
    """Check that files are on this host, with their content.

    Raises:
        HostFileError: one is not.
    """
    for path, sha256 in files.items():
        if not Path(path).is_file() or hashes([path])[path] != sha256:
            raise HostFileError(path, _ELSEWHERE)


def check_cell(cell: Cell, files: CellFiles, models: ModelCache) -> dict[str, DeployFile]:
    """Check that this host has what a cell was submitted with; return what is pushed with it.

    Raises:
        WrongUseError: it would keep files of its own on this host.
        HostFileError: a file or the container is missing or another one, or has no hash.
    """
    check_files(files.files)
    for path in _read_by(cell, files.push, models):
        if str(path) not in files.files:
            raise HostFileError(str(path), "it was submitted without a hash")
    container = cell.container
    if container and models.open(container, cell.runtime).info.sha256 != cell.affinity:
        raise HostFileError(str(container), _ELSEWHERE)
    return pushed_files(files.push)


def _read_by(cell: Cell, push: tuple[str, ...], models: ModelCache) -> Iterator[Path]:
    """Yield the files that a cell reads; of its container, before it is opened."""
    workload = cell.workload
    if getattr(workload, "save", None) or getattr(workload, "restore", None):
        raise WrongUseError(f"{cell.label}: `save` and `restore` are of one host: leave out --lab")
    names = [getattr(workload, key) for key in workload.input_keys]
    names.append(getattr(workload, "reference", None))
    for name in filter(None, names):
        yield from _files_in(cell.folder / user_path(name))
    for file in pushed_files(push).values():
        yield plain_path(file.path)
    if cell.container is None:
        return
    yield from _files_in(cell.container)
    model = models.open(cell.container, cell.runtime)
    if isinstance(model, DescribedModel):
        for path in model.named_files():
            yield from _files_in(path)


def _files_in(path: Path) -> Iterator[Path]:
    """Yield a file, or the files below a folder."""
    path = plain_path(path)
    if not path.is_dir():
        yield path
    for below in path.rglob("*") if path.is_dir() else ():
        if below.is_file():
            yield below
