"""SeqMSE: the step of each channel that gives the least error of the layer's output.

AIMET's "Sequential MSE": layer by layer, a few steps below the one that covers the largest weight
are tried, with the inputs that the layers quantized before give; weights round to the nearest.
"""

from functools import partial

import numpy as np

from buildlib.quantize.bitwidths import WeightFormat
from buildlib.quantize.techniques.arguments import SeqMseArguments
from buildlib.quantize.techniques.layerwise import LayerInputs, LayerwiseTechnique, Solution
from buildlib.quantize.weight_grids import (
    Weights,
    full_steps,
    round_to,
    stored_steps,
)

_DEFAULTS = SeqMseArguments()


def solve(
    weights: Weights,
    fmt: WeightFormat,
    inputs: LayerInputs,
    arguments: SeqMseArguments = _DEFAULTS,
) -> Solution:
    """Return the weights rounded with the best steps; blocks of a channel shrink together."""
    full = full_steps(weights, fmt)
    aim = weights @ inputs.cross
    best = np.full(len(weights), np.inf)
    steps, values = full.copy(), weights.copy()
    for part in np.linspace(1.0, 0.4, arguments.num_candidates):
        candidate = round_to(weights, stored_steps(full * part, fmt, weights.shape[1]), fmt.bits)
        error = (candidate * (candidate @ inputs.hessian - 2 * aim)).sum(axis=1)
        better = error < best
        best[better], steps[better] = error[better], full[better] * part
        values[better] = candidate[better]
    return Solution(values, steps)


def layerwise(name: str, arguments: SeqMseArguments) -> LayerwiseTechnique:
    """Make the technique of its arguments."""
    return LayerwiseTechnique(name, partial(solve, arguments=arguments))
