"""Ours beside transformers: one configuration through both, and what came of it."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import load_checkpoint_config
from buildlib.checkpoint.layout import CONFIG_FILE
from buildlib.closeable import Closeable
from buildlib.errors import BuildError
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from tests.buildlib.configurations import reference
from tests.buildlib.configurations.drawing import CONTEXT, N_TOKENS, VOCABULARY

TOLERANCE = 1e-4
TOKENS: list[int] = np.random.default_rng(5).integers(3, VOCABULARY, N_TOKENS).tolist()
_AR = 8

Logits = npt.NDArray[np.float32]
Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What transformers makes of a configuration.

    Attributes:
        raised: what it raised, or None.
        shapes: of the parameters.
        logits: [n, vocab], of one call over all tokens without a cache: with a cache it cuts off
            what a leftover `sliding_window` says even where its masks do not.
    """

    raised: str | None
    shapes: Mapping[str, list[int]]
    logits: Logits | None


@dataclass(frozen=True)
class Outcome:
    """What came of a configuration.

    Attributes:
        kind: `wrong` is what must never be; `refused by transformers` alone may be right by its
            evident meaning.
        why: what was said by who refused it.
        error: length of the difference of all logits over the length of the logits.
    """

    kind: Literal["right", "wrong", "refused", "refused by both", "refused by transformers"]
    why: str = ""
    error: float = 0.0


class Transformers(Closeable):
    """The child process that computes, in an environment with torch and transformers."""

    def __init__(self, python: str) -> None:
        self._child = subprocess.Popen(
            [python, str(Path(reference.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.version: str = self._read()["transformers"]

    def close(self) -> None:
        """End the child process."""
        self._child.communicate()

    def answer(self, folder: Path, config: Keys) -> Answer:
        """Let transformers compute from a `config.json`, which is written into the folder."""
        assert self._child.stdin is not None
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        asked = {"folder": str(folder), "tokens": TOKENS}
        self._child.stdin.write(json.dumps(asked) + "\n")
        self._child.stdin.flush()
        told = self._read()
        if "raised" in told:
            return Answer(told["raised"], {}, None)
        return Answer(None, told["shapes"], np.load(folder / "logits.npy"))

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        told: dict[str, Any] = json.loads(self._child.stdout.readline())
        return told


def compare(folder: Path, config: Keys, answer: Answer) -> Outcome:
    """Build from a checkpoint of the parameters that transformers made, and compare."""
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    tensors = {name: reference.random_tensor(name, dims) for name, dims in answer.shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    try:
        if answer.logits is None:
            load_checkpoint_config(folder / CONFIG_FILE)
            return Outcome("refused by transformers", answer.raised or "")
        ours = _logits(folder, folder / "out")
    except BuildError as error:
        return Outcome("refused" if answer.raised is None else "refused by both", str(error))
    apart = float(np.linalg.norm(ours - answer.logits) / np.linalg.norm(answer.logits))
    return Outcome("right" if apart <= TOLERANCE else "wrong", error=apart)


def _logits(folder: Path, out: Path) -> Logits:
    """Return logits [n, vocab] of three calls, the later of which read the cache."""
    checkpoint = Checkpoint.load(folder)
    model = export_onnx(checkpoint, GraphShape(_AR, CONTEXT), out)
    runner = OnnxRunner(model, n_threads=1)
    with HostLoop({_AR: [runner]}, checkpoint.config) as loop:
        return loop.feed(TOKENS)
