"""GPTAQ: GPTQ towards the outputs of the float model, with the inputs that a device will see.

Li, Yin, Lee, Xiao, Panda, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric
Calibration", 2025. Its objective `|Q x - W x_real|^2` is GPTQ's about the weights that solve it
without rounding: `|(Q - W') x|^2 + const` with `W' = W + W E[(x_real - x) x^T] E[x x^T]^-1`, drawn
to W by the damping of the Hessian. With the Cholesky factor `L L^T` of the Hessian its errors are
`(Q - W') L = (Q - W) L - W E[(x_real - x) x^T] L^-T`: GPTQ's, but for a product that is known
before the first weight is rounded. The steps are those of W.
"""

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
    same = inputs.real is inputs.seen
    missed = None if same else inputs.missed(weights, by_size=arguments.act_order)
    return gptq.solve(weights, fmt, inputs, arguments, missed)
