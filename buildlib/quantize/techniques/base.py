"""`WeightTechnique`, the Protocol of techniques that change weights, and their model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.model import Encodings
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.calibration import Range

Factors = Mapping[str, npt.NDArray[np.float32]]
"""Factors by the name of a constant or cache; each broadcasts to it as stored."""


@dataclass(frozen=True)
class FloatModel:
    """A whole float model, and all that a technique needs to know of it.

    Attributes:
        path: in canonical form, weights beside it.
        encodings: of some of its values. A weight that has one stays as it is.
        token_windows: text in tokens.
        bits: of the weights to quantize.
        n_calibrating: of the windows, so many from the first on are those that calibrate the
            model. A technique that runs them with the final weights observes ranges on the way.
        ranges: smallest and largest value of each activation over the windows that calibrate, by
            name; None where no technique has observed them.
        factors: that constants and caches of the model have been multiplied with, by name.
    """

    path: Path
    encodings: Encodings
    config: DecoderConfig
    token_windows: Sequence[Sequence[int]]
    bits: Bitwidths
    n_calibrating: int = 0
    ranges: Mapping[str, Range] | None = None
    factors: Factors = field(default_factory=dict)

    def changed(self, path: Path, encodings: Encodings) -> "FloatModel":
        """Return the model that a technique made of this one; its ranges are unknown."""
        return replace(self, path=path, encodings=encodings, ranges=None)


class WeightTechnique(Protocol):
    """A change of a float model."""

    @property
    def name(self) -> str:
        """Its name in recipes."""
        ...

    def optimize(
        self, model: FloatModel, folder: Path, progress: Callable[[int, int], None] | None = None
    ) -> FloatModel:
        """Write a changed `model.onnx` into `folder`, with files of new weights beside it.

        Memory holds the weights and inputs of one layer.

        Args:
            folder: empty, on the file system of the model, so that unchanged weights are linked.
            progress: told (layers done, layers in all).

        Raises:
            InvalidOptionError: the technique cannot do this model; says why.
            BuildError: the text cannot calibrate this model.
            ModelFileError: the model cannot be read or run; or it is not a whole model, or more
                than one value connects two layers.
        """
        ...
