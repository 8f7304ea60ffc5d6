"""Massive channels of the residual stream spread over others: the model computes the same.

First tokens, delimiters and the like carry a number of 20,000 in one channel of most models, beside
medians of 2 (Sun et al., "Massive Activations in Large Language Models", 2024, arXiv 2402.17762),
and all 16 bits of a grid that reaches it leave the others a few steps. A rotation spreads it over
all channels, at no cost on a device. Where norms behind attention and MLP make it, none can be
folded into the weights; there the channel is split into copies.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buildlib.errors import InvalidOptionError
from buildlib.graph import interface
from buildlib.numerics.segment_loop import SegmentLoop
from buildlib.quantize.techniques.base import FloatModel
from buildlib.quantize.techniques.rotation import Rotation, coarsening, rotation_of, write_rotated
from buildlib.quantize.techniques.splitting import find_massive, split_of, write_split

_FAR = 1024.0
"""Largest absolute value of hidden states, over their median, from which on they are rotated.

A step of 16 bits is a 64th of the median there.
"""
_COARSER = 8.0
"""Growth of the steps of a weight above which nothing is rotated; Qwen2.5-Coder-0.5B has 3.7."""
_TOKENS = 128


@dataclass(frozen=True)
class Spreading:
    """`WeightTechnique` that rotates or splits a model whose hidden states reach far.

    A model with encodings, or whose hidden states were changed before, stays as it is.

    Attributes:
        rotates: or only splits.
    """

    name: str
    rotates: bool = True

    def optimize(
        self, model: FloatModel, folder: Path, progress: Callable[[int, int], None] | None = None
    ) -> FloatModel:
        """Write the changed model; text of 128 tokens tells how far hidden states reach."""
        if model.encodings.by_name() or describe_spreading(model.path):
            return model
        if copies := find_massive(model.path):
            return model.changed(write_split(model.path, copies, folder), model.encodings)
        if self.rotates and _reach(model) >= _FAR:
            with suppress(InvalidOptionError):  # something stands between: it stays
                if coarsening(model.path) <= _COARSER:
                    return Rotation(self.name).optimize(model, folder, progress)
        return model


def describe_spreading(path: Path) -> str:
    """Say how the hidden states of a model were changed; empty if they were not."""
    if copies := split_of(path):
        return "channels split: " + ", ".join(f"{c} into {n}" for c, n in copies.items())
    return "" if rotation_of(path) is None else "rotated"


def write_spread_alike(path: Path, like: Path, folder: Path) -> Path:
    """Rotate or split a float model as another one was; return its path if that one was neither.

    Args:
        path: the model as it was before.
        folder: as `WeightTechnique.optimize` takes it.
    """
    if copies := split_of(like):
        return write_split(path, copies, folder)
    seed = rotation_of(like)
    return path if seed is None else write_rotated(path, seed, folder)


def _reach(model: FloatModel) -> float:
    """Return the largest absolute value of hidden states, over their median, of all layers."""
    ar = interface.require_shape(model.path).ar
    text = max(model.token_windows, key=len, default=())[: max(_TOKENS, ar)]
    ratios = [1.0]
    with SegmentLoop(model.path, model.config, [text]) as loop:
        hidden = None
        for index in range(loop.n_segments - 1):  # behind the last there are logits
            hidden = loop.run(index, hidden)
            assert hidden is not None  # noqa: S101  (not that of the head)
            sizes = np.abs(hidden)
            ratios.append(float(sizes.max() / max(float(np.median(sizes)), 1e-30)))
    return max(ratios)
