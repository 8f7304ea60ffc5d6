"""GPTAQ: GPTQ towards the outputs of the float model, with the inputs that a device will see.

Li, Yin, Lee, Xiao, Panda, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric
Calibration", 2025. Its objective `|Q x - W x_real|^2` is GPTQ's about the weights that solve it
without rounding: `|(Q - W') x|^2 + const` with `W' = W + W E[(x_real - x) x^T] E[x x^T]^-1`. So the
weights become W' first, drawn to W by the damping of the Hessian, and GPTQ rounds those.
"""

import numpy as np

from buildlib.quantize.bitwidths import WeightFormat
from buildlib.quantize.techniques import gptq
from buildlib.quantize.techniques.arguments import GptqArguments
from buildlib.quantize.techniques.layerwise import LayerInputs, Solution
from buildlib.quantize.weight_grids import Weights

_DEFAULTS = GptqArguments()


def solve(
    weights: Weights,
    fmt: WeightFormat,
    inputs: LayerInputs,
    arguments: GptqArguments = _DEFAULTS,
) -> Solution:
    """Return weights whose outputs on the inputs as seen are near the float model's."""
    if inputs.real is not inputs.seen:
        factor = inputs.factor(by_size=arguments.act_order)
        moved = np.empty(weights.T.shape, np.float32)
        moved[factor.order] = factor.solve(inputs.missed(weights)[factor.order])
        weights = weights + moved.T
    return gptq.solve(weights, fmt, inputs, arguments)
