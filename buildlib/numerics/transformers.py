"""A checkpoint as transformers computes it: a reading of its files that is not ours.

torch and transformers run in a child process, which takes their memory with it.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.config import DecoderConfig, other_reading
from buildlib.checkpoint.layout import CONFIG_FILE
from buildlib.errors import BuildError, ModelWarning, RunnerDiedError
from buildlib.graph import interface
from buildlib.graph.shape import GraphShape
from buildlib.numerics.child import ChildProcess
from buildlib.numerics.runners import Arrays, Port, Ports

ReferenceEngine = Literal["onnx", "transformers"]
"""What computes a reference: our own float ONNX, or transformers."""

_WORKER = "buildlib.numerics.transformers_worker"
_LIBRARIES = ("torch", "transformers")
PYTHON_VARIABLE = "QNNFARM_REFERENCE"
"""Environment variable that names another Python with these libraries."""
_NO_REFERENCE = "has no reference"
_VERSIONS = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        print(name, importlib.metadata.version(name), sep="=")
    except importlib.metadata.PackageNotFoundError:
        pass
"""
_TIMEOUT_S = 1800.0  # a large checkpoint from a cold disk
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class TransformersProcess(ChildProcess):
    """A worker that imports torch and transformers, for a model in Hugging Face layout.

    Args:
        module: the worker.
        failure: what the folder is or has not where it fails, for errors.

    Raises:
        BuildError: torch or transformers is not installed.
    """

    def __init__(self, module: str, folder: Path, failure: str = _NO_REFERENCE) -> None:
        self._folder, self._failure = folder, failure
        require_installed(folder, failure)
        super().__init__(module, str(folder), _TIMEOUT_S, _OFFLINE, reference_python())

    def request(self, header: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Send a request and return the answer.

        Raises:
            BuildError: the child refused, died, or took too long.
        """
        try:
            return super().request(header, arrays)
        except RunnerDiedError as error:
            raise BuildError(f"{self._folder} {self._failure}: {error.reason}") from error


class TransformersModel(TransformersProcess):
    """A `TokenModel` of a checkpoint in Hugging Face layout, in float32 on the CPU.

    Args:
        load: False looks for its family alone, and there is nothing to feed.

    Raises:
        BuildError: torch or transformers is not installed, or cannot load the model.
    """

    largest_ar = 128

    def __init__(self, folder: Path, *, load: bool = True) -> None:
        super().__init__(_WORKER, folder)
        _warn_of_other_reading(folder)
        try:
            self.request({"folder": str(folder.absolute()), "load": load}, {})
        except BaseException:
            self.close()
            raise

    def reset(self) -> None:
        """Forget all tokens."""
        self.request({"reset": True}, {})

    def feed(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append `tokens` to the context and return logits [len(tokens), vocab] after each."""
        _, answer = self.request({}, {"tokens": np.array(tokens, np.int32)})
        logits: npt.NDArray[np.float32] = answer["logits"]
        return logits


def reference_python() -> str:
    """Return the interpreter that has torch and transformers: `QNNFARM_REFERENCE`, or this one."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def require_installed(folder: Path, failure: str = _NO_REFERENCE) -> None:
    """Check that torch and transformers are installed, for the model in `folder`."""
    try:
        installed_versions()
    except BuildError as error:
        raise BuildError(f"{folder} {failure}: {error}") from error


@cache
def require_family(folder: Path) -> None:
    """Check that transformers has code for the model in `folder`, which takes seconds once."""
    TransformersModel(folder, load=False).close()


def installed_versions() -> dict[str, str]:
    """Return the versions of torch and transformers.

    Raises:
        BuildError: one of them is not installed.
    """
    return dict(_versions_in(reference_python()))


@cache
def _versions_in(python: str) -> Mapping[str, str]:
    versions = {}
    try:
        command = [python, "-P", "-c", _VERSIONS, *_LIBRARIES]
        output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        versions = dict(line.split("=", 1) for line in output.split())
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise BuildError(f"{python} of {PYTHON_VARIABLE} cannot be run: {error}") from error
    for name in _LIBRARIES:
        if name not in versions:
            install = (
                f"pip install 'qnnfarm[reference]', or name a Python that has it by "
                f"{PYTHON_VARIABLE}"
                if python == sys.executable
                else f"{python} -m pip install {' '.join(_LIBRARIES)} onnx"
            )
            raise BuildError(f"{name} is not installed: {install}")
    return versions


def _warn_of_other_reading(folder: Path) -> None:
    version = installed_versions()["transformers"]
    difference = other_reading(folder / CONFIG_FILE, int(version.partition(".")[0]))
    if difference is not None:
        what = f"{folder / CONFIG_FILE} is of another major release than transformers {version}"
        text = f"{what}, which reads it differently: {difference}"
        warnings.warn(text, ModelWarning, stacklevel=1)


class TransformersPart(TransformersModel):
    """`PartRunner` of the canonical model at `shape`, call after call; gives logits alone."""

    def __init__(self, folder: Path, config: DecoderConfig, shape: GraphShape) -> None:
        super().__init__(folder)
        ids = Port(interface.INPUT_IDS, np.dtype(np.int32), (1, shape.ar))
        mask = Port(interface.ATTENTION_MASK, np.dtype(np.float32), (1, 1, shape.ar, shape.cl))
        dims = (1, shape.ar, config.vocab_size)
        logits = Port(interface.LOGITS, np.dtype(np.float32), dims)
        self.ports = Ports({ids.name: ids, mask.name: mask}, {logits.name: logits})

    def run(self, feeds: Arrays) -> Arrays:
        """Return the logits after all tokens of a call."""
        return {interface.LOGITS: self.feed(feeds[interface.INPUT_IDS][0].tolist())[None]}
