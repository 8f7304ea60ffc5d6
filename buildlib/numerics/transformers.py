"""A checkpoint as transformers computes it: a reading of its files that is not ours.

torch and transformers run in a child process, which takes their memory with it.
"""

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Sequence
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
_TIMEOUT_S = 1800.0  # a large checkpoint from a cold disk
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class TransformersModel(ChildProcess):
    """A `TokenModel` of a checkpoint in Hugging Face layout, in float32 on the CPU.

    Args:
        load: False looks for its family alone, and there is nothing to feed.

    Raises:
        BuildError: torch or transformers is not installed, or cannot load the model.
    """

    largest_ar = 128

    def __init__(self, folder: Path, *, load: bool = True) -> None:
        self._folder = folder
        require_installed(folder)
        _warn_of_other_reading(folder)
        super().__init__(_WORKER, str(folder), _TIMEOUT_S, _OFFLINE)
        try:
            self.request({"folder": str(folder.absolute()), "load": load}, {})
        except BaseException:
            self.close()
            raise

    def request(self, header: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Send a request and return the answer.

        Raises:
            BuildError: the child refused, died, or took too long.
        """
        try:
            return super().request(header, arrays)
        except RunnerDiedError as error:
            raise BuildError(f"{self._folder} has no reference: {error.reason}") from error

    def reset(self) -> None:
        """Forget all tokens."""
        self.request({"reset": True}, {})

    def feed(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append `tokens` to the context and return logits [len(tokens), vocab] after each."""
        _, answer = self.request({}, {"tokens": np.array(tokens, np.int32)})
        logits: npt.NDArray[np.float32] = answer["logits"]
        return logits


def require_installed(folder: Path) -> None:
    """Check that torch and transformers are installed, for the model in `folder`."""
    for name in _LIBRARIES:
        if importlib.util.find_spec(name) is None:
            reason = f"{name} is not installed: pip install 'qnnfarm[reference]'"
            raise BuildError(f"{folder} has no reference: {reason}")


@cache
def require_family(folder: Path) -> None:
    """Check that transformers has code for the model in `folder`, which takes seconds once."""
    TransformersModel(folder, load=False).close()


def installed_versions() -> dict[str, str]:
    """Return the versions of torch and transformers."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def _warn_of_other_reading(folder: Path) -> None:
    version = importlib.metadata.version("transformers")
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
        dims = (1, shape.ar, config.vocab_size)
        logits = Port(interface.LOGITS, np.dtype(np.float32), dims)
        self.ports = Ports({ids.name: ids}, {logits.name: logits})

    def run(self, feeds: Arrays) -> Arrays:
        """Return the logits after all tokens of a call."""
        return {interface.LOGITS: self.feed(feeds[interface.INPUT_IDS][0].tolist())[None]}
