"""Files that jobs of a lab name: they lie in a folder that all its hosts see.

A host uses them only where they have the content that they had when the job was submitted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from buildlib.errors import BuildError
from buildlib.paths import plain_path
from harness.deploy.deployment import DeployFile
from harness.deploy.digests import hash_files
from harness.errors import HarnessError, HostFileError
from harness.plans.cell_runner import ModelCache
from harness.plans.cells import Cell
from harness.runtimes.bundles.bundle import pushed_files

_ELSEWHERE = "is not what was submitted: put it into a folder that all hosts of the lab see"


def _checked(files: Mapping[str, str]) -> Mapping[str, str]:
    for path, sha256 in files.items():
        if not path.startswith("/") or ".." in path.split("/") or len(bytes.fromhex(sha256)) != 32:
            raise ValueError(f"{path!r:.200} with the hash {sha256!r:.80} is no file of a host")
    return files


Files = Annotated[Mapping[str, str], AfterValidator(_checked)]
"""SHA-256 of files by their absolute paths."""


class CellFiles(BaseModel):
    """Files that a cell reads, beside its container.

    Attributes:
        inputs: files that its workload reads, and those that are pushed with it.
        push: files that are pushed with it, as `pushed_files` takes them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: Files = {}
    push: tuple[str, ...] = ()


def find_files(cells: Sequence[Cell], push: tuple[str, ...]) -> Iterator[CellFiles]:
    """Yield the files of each of the cells, every one of which is hashed once.

    Args:
        push: files that are pushed with containers, as `pushed_files` takes them.
    """
    digests: dict[str, str] = {}
    for cell in cells:
        pushes = pushed_files(push if cell.workload.needs_container else (), cell.folder)
        inputs = [*_inputs(cell), *(str(plain_path(file.path)) for file in pushes.values())]
        digests |= hashes(path for path in inputs if path not in digests)
        yield CellFiles(
            inputs={path: digests[path] for path in inputs},
            push=tuple(f"{file.path}:{name}" for name, file in pushes.items()),
        )


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
        HostFileError: a file or the container is missing or another one, or has no hash.
    """
    path = cell.container
    try:
        if path is not None and models.open(path, cell.runtime).info.sha256 != cell.affinity:
            raise HostFileError(str(path), _ELSEWHERE)
    except (BuildError, HarnessError):
        raise HostFileError(str(path), _ELSEWHERE) from None
    pushes = pushed_files(files.push)
    named = [*_inputs(cell), *(str(plain_path(file.path)) for file in pushes.values())]
    for unknown in set(named) - files.inputs.keys():
        raise HostFileError(unknown, "it was submitted without a hash")
    check_files(files.inputs)
    return pushes


def _inputs(cell: Cell) -> list[str]:
    names = (getattr(cell.workload, key) for key in cell.workload.input_keys)
    return [str(plain_path(cell.folder / name)) for name in names if name is not None]
