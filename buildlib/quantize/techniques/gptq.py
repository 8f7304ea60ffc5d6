"""GPTQ and GPTAQ: weights are rounded input by input, and those that follow make up for the error.

Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", 2022. Inputs are taken by falling diagonal of the Hessian (`act_order` of
the authors' code), and each channel's step, or block's, is that of the least error of its weights,
weighted with the mean squares of their inputs.

GPTAQ rounds towards the outputs of the float model, with the inputs that a device will see: Li,
Yin, Lee, Xiao, Panda, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration",
2025. Its objective `|Q x - W x_real|^2` is GPTQ's about the weights that solve it without rounding:
`|(Q - W') x|^2 + const` with `W' = W + W E[(x_real - x) x^T] E[x x^T]^-1`, drawn to W by the
damping of the Hessian. With the Cholesky factor `L L^T` of the Hessian its errors are `(Q - W') L =
(Q - W) L - W E[(x_real - x) x^T] L^-T`: GPTQ's, but for a product that is known before the first
weight is rounded. The steps are those of W.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from buildlib.quantize.bitwidths import WeightFormat
from buildlib.quantize.techniques.arguments import GptqArguments
from buildlib.quantize.techniques.layerwise import Factor, LayerInputs, Matrix, Solution
from buildlib.quantize.weight_grids import Weights, fit_steps, round_to, stored_steps

_DEFAULTS = GptqArguments()
_CHANNELS = 1024  # that one thread rounds at a time: a block of their inputs lies in its cache


def solve(
    weights: Weights,
    fmt: WeightFormat,
    inputs: LayerInputs,
    arguments: GptqArguments = _DEFAULTS,
    *,
    to_float: bool = False,
) -> Solution:
    """Return weights [out, in] of small output error on the inputs as seen.

    With `to_float` (GPTAQ) the error is that from the outputs of the float model on its own inputs.
    """
    float_errors = None
    if to_float and inputs.real is not inputs.seen:
        float_errors = inputs.missed(weights, by_size=arguments.act_order)
    factor = inputs.factor(by_size=arguments.act_order)
    importance = inputs.sizes + inputs.damping
    values = np.empty(weights.shape, np.float32)

    def solve_channels(some: slice) -> npt.NDArray[np.float64]:
        steps = fit_steps(weights[some], fmt, importance)
        weight_steps = stored_steps(steps, fmt, weights.shape[1])
        channel_errors = None if float_errors is None else float_errors[some]
        result = round_in_order(
            weights[some], weight_steps, fmt.bits, factor, arguments.block_size, channel_errors
        )
        values[some] = result
        return steps

    return Solution(values, np.concatenate(_by_channels(solve_channels, len(weights))))


def _by_channels(work: Callable[[slice], Matrix], n_channels: int) -> list[Matrix]:
    """Return the results of some channels at a time, computed on all cores."""
    some = [slice(start, start + _CHANNELS) for start in range(0, n_channels, _CHANNELS)]
    if len(some) == 1:
        return [work(some[0])]
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1), ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(work, some))


def round_in_order(
    weights: Weights,
    steps: Weights,
    bits: int,
    factor: Factor,
    block_size: int,
    missed: Matrix | None = None,
) -> Weights:
    """Round weights input by input, each making up for the errors of those before it.

    With the Cholesky factor `L` of the Hessian the squared output error is the sum over inputs of
    `(e L)^2`, and input `j` of `e L` depends on the errors of `j` and of the inputs behind it:
    rounded from the last to the first, each weight can make up for those behind it, and the rest is
    the least error that rounding alone allows. These are the roundings of GPTQ, without the
    inverse of the Hessian (Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's Nearest
    Plane Algorithm", 2025).

    Args:
        weights: [out, in].
        steps: [out, in] or [out, 1].
        factor: of the damped Hessian.
        block_size: inputs that are done one by one; blocks correct others by matrix products.
        missed: [out, in] in order, added to `e L`: errors from before, to be made up for.
    """
    order = factor.order
    rounding = _Rounding(
        np.take(weights, order, axis=1),
        steps if steps.shape[1] == 1 else np.take(steps, order, axis=1),
        bits,
        factor.lower,
        block_size,
    )
    if missed is not None:
        rounding.values += missed / rounding.diagonal
    rounding.round(0, len(order))
    return np.take(rounding.values, np.argsort(order), axis=1)


class _Rounding:
    """Weights [out, in] that are rounded from the last input to the first."""

    def __init__(
        self, weights: Weights, steps: Weights, bits: int, lower: Matrix, block_size: int
    ) -> None:
        self.values = weights.copy()  # first corrected, then rounded
        self.diagonal = lower.diagonal().astype(np.float32)
        self._errors = weights  # of rounded inputs; of the others, the weights themselves
        self._steps = np.broadcast_to(steps, weights.shape)
        self._bits = bits
        self._lower = lower.astype(np.float32, copy=False)
        self._block_size = block_size

    def round(self, begin: int, end: int) -> None:
        """Round inputs that those behind them have corrected; by halves, for large products."""
        if end - begin <= self._block_size:
            self._round_block(slice(begin, end))
            return
        middle = (begin + end) // 2
        self.round(middle, end)
        part = self._errors[:, middle:end] @ self._lower[middle:end, begin:middle]
        part /= self.diagonal[begin:middle]
        self.values[:, begin:middle] += part
        self.round(begin, middle)

    def _round_block(self, block: slice) -> None:
        """Round inputs one by one, in arrays [in, out] of their own."""
        values, errors, steps = (
            np.ascontiguousarray(one[:, block].T)
            for one in (self.values, self._errors, self._steps)
        )
        parts = (self._lower[block, block] / self.diagonal[block]).T
        for row in reversed(range(len(values))):
            values[row] += parts[row, row + 1 :] @ errors[row + 1 :]
            values[row] = round_to(values[row], steps[row], self._bits)
            errors[row] -= values[row]
        self.values[:, block], self._errors[:, block] = values.T, errors.T
