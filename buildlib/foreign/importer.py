"""Import of an artifact, whatever runtime it is for.

import_artifact(Path("hybrid_llama_qnn.pte"), Path("container"), tokenizer=path)
"""

import dataclasses
import tempfile
from os import PathLike
from pathlib import Path

from buildlib.container.container import GenAIContainer
from buildlib.errors import InputFileError
from buildlib.foreign import executorch, mllm
from buildlib.foreign.artifact import Artifact, write_artifact
from buildlib.paths import user_path
from buildlib.targets import Target


def import_artifact(
    source: str | PathLike[str],
    dest: str | PathLike[str],
    *,
    target: Target | None = None,
    tokenizer: Path | None = None,
    name: str | None = None,
    bos: int | None = None,
    eos: tuple[int, ...] = (),
) -> GenAIContainer:
    """Write the container of an artifact: ExecuTorch's `.pte`, or a folder of mllm.

    A container there is replaced.

    Args:
        target: phone or emulator; by default the phone of the binaries' SoC.
        tokenizer, name, bos, eos: in place of those of the files; see `Artifact`.

    Raises:
        InputFileError: it is none of them, lacks a fact, or is for another target.
        CheckpointError: a file beside its binaries cannot be read.
        InvalidBinaryError: a binary cannot be read.
        ContainerError: the destination cannot be written, or may not be replaced.
    """
    path = user_path(source)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-import-") as scratch:
        artifact = _read(path, Path(scratch), tokenizer)
        completed = dataclasses.replace(
            artifact,
            name=name or artifact.name,
            bos=artifact.bos if bos is None else bos,
            eos=eos or artifact.eos,
        )
        return write_artifact(completed, user_path(dest), target=target, exist_ok=True)


def _read(path: Path, scratch: Path, tokenizer: Path | None) -> Artifact:
    if mllm.is_artifact(path):
        artifact = mllm.read_artifact(path)
        return dataclasses.replace(artifact, tokenizer=tokenizer or artifact.tokenizer)
    if path.is_dir():
        reason = "it is no folder of mllm: that has one *.bin, one config*.json and tokenizer.json"
        raise InputFileError(str(path), reason)
    return executorch.read_artifact(path, scratch, tokenizer)
