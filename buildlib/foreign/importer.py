"""Import of an artifact of any runtime.

import_artifact(Path("hybrid_llama_qnn.pte"), Path("container"), tokenizer=path)
"""

import dataclasses
import tempfile
from os import PathLike
from pathlib import Path

from buildlib.container.container import GenAIContainer
from buildlib.errors import InputFileError
from buildlib.foreign import executorch, mllm, powerserve
from buildlib.foreign.artifact import ForeignArtifact, write_artifact
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
    weight_sharing: bool | None = None,
) -> GenAIContainer:
    """Write the container of an artifact: ExecuTorch's `.pte`, or a folder of mllm or PowerServe.

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
    if powerserve.is_artifact(path):
        artifact = powerserve.read_artifact(path, scratch)
    elif mllm.is_artifact(path):
        artifact = mllm.read_artifact(path)
    elif path.is_dir():
        raise InputFileError(
            str(path),
            "it is no folder of mllm, which has a *.bin and a config_X.json, nor of PowerServe, "
            "which has model.json and qnn/config.json",
        )
    else:
        return executorch.read_artifact(path, scratch, tokenizer)
    return dataclasses.replace(artifact, tokenizer=tokenizer or artifact.tokenizer)
