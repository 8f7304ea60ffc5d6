"""Import of an artifact of any runtime.

import_artifact(Path("hybrid_llama_qnn.pte"), Path("container"), tokenizer=path)
"""

import dataclasses
import tempfile
from os import PathLike
from pathlib import Path
from typing import Protocol, cast

from buildlib.container.container import GenAIContainer
from buildlib.entry_points import entry_names, load_entry
from buildlib.errors import InputFileError
from buildlib.foreign.artifact import ForeignArtifact, write_artifact
from buildlib.paths import user_path
from buildlib.targets import Target

DOOR = "artifacts"


class ArtifactReader(Protocol):
    """Entry point of `qnnfarm.artifacts`, which is a module, by the name of the runtime."""

    def is_artifact(self, path: Path) -> bool:
        """Return whether a file or folder is of this runtime."""
        ...

    def read_artifact(self, path: Path, folder: Path, tokenizer: Path | None) -> ForeignArtifact:
        """Read it; what has to be unpacked goes into a folder.

        Args:
            tokenizer: that the user named.
        """
        ...


def import_artifact(
    source: str | PathLike[str],
    dest: str | PathLike[str],
    *,
    target: Target | None = None,
    tokenizer: Path | None = None,
    name: str | None = None,
    bos: int | None = None,
    eos: tuple[int, ...] = (),
    weight_sharing: bool | None = None,
) -> GenAIContainer:
    """Write the container of an artifact of any runtime that an installed package reads.

    A container there is replaced.

    Args:
        target: phone or emulator; by default the phone of the binaries' SoC.
        tokenizer, name, bos, eos, weight_sharing: in place of those of the files, as in
            `ForeignArtifact`.

    Raises:
        InputFileError: it is none of them, lacks a fact, or is for another target.
        ContainerError: the destination cannot be written, or may not be replaced.
    """
    path = user_path(source)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-import-") as scratch:
        artifact = _read(path, Path(scratch), tokenizer)
        artifact = dataclasses.replace(
            artifact,
            name=name or artifact.name,
            bos=artifact.bos if bos is None else bos,
            eos=eos or artifact.eos,
            weight_sharing=artifact.weight_sharing if weight_sharing is None else weight_sharing,
        )
        return write_artifact(artifact, user_path(dest), target=target, exist_ok=True)


def _read(path: Path, scratch: Path, tokenizer: Path | None) -> ForeignArtifact:
    names = entry_names(DOOR)
    for reader in (cast("ArtifactReader", load_entry(DOOR, name)) for name in names):
        if reader.is_artifact(path):
            artifact = reader.read_artifact(path, scratch, tokenizer)
            return dataclasses.replace(artifact, tokenizer=tokenizer or artifact.tokenizer)
    reason = f"no installed package imports it; there are readers for {', '.join(names)}"
    raise InputFileError(str(path), reason)
