"""GPTQ: weights are rounded input by input, and those that follow make up for the error.

Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", 2022. Inputs are taken by falling diagonal of the Hessian (`act_order` of
the authors' code), and each channel's step, or block's, is that of the least error of its weights,
weighted with the mean squares of their inputs.
"""

import numpy as np
import numpy.typing as npt

from buildlib.quantize.bitwidths import WeightFormat
from buildlib.quantize.techniques.arguments import GptqArguments
from buildlib.quantize.techniques.layerwise import LayerInputs, Matrix, Solution
from buildlib.quantize.weight_grids import Weights, fit_steps, round_to, stored_steps

_DEFAULTS = GptqArguments()


def solve(
    weights: Weights,
    fmt: WeightFormat,
    inputs: LayerInputs,
    arguments: GptqArguments = _DEFAULTS,
) -> Solution:
    """Return weights of small output error on the inputs as seen."""
    steps = fit_steps(weights, fmt, inputs.hessian.diagonal() + inputs.damping)
    stored = stored_steps(steps, fmt, weights.shape[1])
    order = np.arange(weights.shape[1])
    if arguments.act_order:
        order = np.argsort(-inputs.hessian.diagonal(), kind="stable")
    size = arguments.block_size
    return Solution(round_in_order(weights, stored, fmt.bits, inputs.inverse, order, size), steps)


def round_in_order(
    weights: Weights,
    steps: Weights,
    bits: int,
    inverse: Matrix,
    order: npt.NDArray[np.intp],
    block_size: int,
) -> Weights:
    """Round weights input by input; what is left open takes up the error of what is done.

    Args:
        weights: [out, in].
        steps: [out, in] or [out, 1].
        bits: of the integers.
        inverse: of the damped Hessian, [in, in].
        order: of the inputs.
        block_size: inputs that are done before the weights behind them are corrected.
    """
    upper = np.linalg.cholesky(inverse[np.ix_(order, order)]).T.astype(np.float32)
    width = len(order)
    by_input = np.broadcast_to(steps, weights.shape).T[order]
    open_weights = np.ascontiguousarray(weights.T[order])
    for begin in range(0, width, block_size):
        end = min(begin + block_size, width)
        errors = np.empty((end - begin, len(weights)), np.float32)
        for row in range(begin, end):
            rounded = round_to(open_weights[row], by_input[row], bits)
            error = (open_weights[row] - rounded) / upper[row, row]
            open_weights[row + 1 : end] -= np.outer(upper[row, row + 1 : end], error)
            open_weights[row] = rounded
            errors[row - begin] = error
        open_weights[end:] -= upper[begin:end, end:].T @ errors
    found = np.empty_like(open_weights)
    found[order] = open_weights
    return np.ascontiguousarray(found.T)
