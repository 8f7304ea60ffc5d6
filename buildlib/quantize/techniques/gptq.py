"""GPTQ: weights are rounded input by input, and those that follow make up for the error.

Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", 2022. Inputs are taken by falling diagonal of the Hessian (`act_order` of
the authors' code), and each channel's step, or block's, is that of the least error of its weights,
weighted with the mean squares of their inputs.
"""

import numpy as np

from buildlib.quantize.bitwidths import WeightFormat
from buildlib.quantize.techniques.arguments import GptqArguments
from buildlib.quantize.techniques.layerwise import Factor, LayerInputs, Matrix, Solution
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
    factor = inputs.factor(by_size=arguments.act_order)
    return Solution(round_in_order(weights, stored, fmt.bits, factor, arguments.block_size), steps)


def round_in_order(
    weights: Weights, steps: Weights, bits: int, factor: Factor, block_size: int
) -> Weights:
    """Round weights input by input; what is left open takes up the error of what is done.

    With the Cholesky factor `L` of the Hessian the squared output error is the sum over inputs of
    `(e L)^2`, and input `j` of `e L` depends on the errors of `j` and of the inputs behind it:
    rounded from the last to the first, each weight can make up for those behind it, and what that
    leaves is the least that rounding alone allows. These are the roundings of GPTQ, without the
    inverse of the Hessian (Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's Nearest
    Plane Algorithm", 2025).

    Args:
        weights: [out, in].
        steps: [out, in] or [out, 1].
        bits: of the integers.
        factor: of the damped Hessian.
        block_size: inputs that are done one by one; blocks correct others by matrix products.
    """
    order = factor.order
    # By input from here on: [in, out].
    wanted = np.ascontiguousarray(weights.T[order])
    by_input = steps.T if steps.shape[1] == 1 else steps.T[order]
    by_input = np.broadcast_to(by_input, wanted.shape)
    rounding = _Rounding(wanted, by_input, bits, factor.lower, block_size)
    rounding.round(0, len(order))
    found = np.empty_like(wanted)
    found[order] = rounding.found
    return np.ascontiguousarray(found.T)


class _Rounding:
    """Weights [in, out] that are rounded from the last input to the first."""

    def __init__(
        self, wanted: Weights, steps: Weights, bits: int, lower: Matrix, block_size: int
    ) -> None:
        self.found = wanted.copy()  # first corrected, then rounded
        self._errors = wanted  # of what is rounded; before that what is wanted
        self._steps = steps
        self._bits = bits
        self._lower = lower.astype(np.float32, copy=False)
        self._diagonal = self._lower.diagonal()[:, None].copy()
        self._block_size = block_size

    def round(self, begin: int, end: int) -> None:
        """Round inputs that those behind them have corrected; by halves, for large products."""
        if end - begin <= self._block_size:
            for row in reversed(range(begin, end)):
                if row + 1 < end:
                    self._correct(row, row + 1, end)
                self.found[row] = round_to(self.found[row], self._steps[row], self._bits)
                self._errors[row] -= self.found[row]
            return
        middle = (begin + end) // 2
        self.round(middle, end)
        self._correct(begin, middle, end)
        self.round(begin, middle)

    def _correct(self, begin: int, middle: int, end: int) -> None:
        """Correct inputs up to `middle` for the errors of those from there to `end`."""
        part = self._lower[middle:end, begin:middle].T @ self._errors[middle:end]
        part /= self._diagonal[begin:middle]
        self.found[begin:middle] += part
