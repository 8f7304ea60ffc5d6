"""Grids of weights: steps for each channel or block, and the encodings that say them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.encodings.model import Encoding
from buildlib.errors import EncodingsError
from buildlib.quantize.bitwidths import WeightFormat

Weights = npt.NDArray[np.float32]
"""Weights [out, in], whatever the order of their axes in the model."""

_CHUNK_VALUES = 1 << 20
_CACHED_VALUES = 1 << 16  # of a search, in the cache of a core
_SMALLEST_SCALE = 1e-9
_LPBQ_BITS, _LPBQ_FULL_BITS = 4, 8
_FACTORS = 1 << (_LPBQ_FULL_BITS - _LPBQ_BITS)
SHRINKAGES = np.linspace(1.0, 0.4, 25)
"""Parts of the step that covers the largest magnitude, which a search of steps tries."""


def full_steps(weights: Weights, fmt: WeightFormat) -> npt.NDArray[np.float64]:
    """Return the steps [out, blocks] that cover the largest magnitude of each block.

    Without blocks a channel is one.
    """
    magnitudes = np.abs(_in_blocks(weights, fmt)).max(axis=2)
    if fmt.block_size is None:
        return _channel_steps(magnitudes, fmt.bits)
    steps: npt.NDArray[np.float64] = magnitudes.astype(np.float64) / ((1 << (fmt.bits - 1)) - 1)
    return np.maximum(steps, _SMALLEST_SCALE, out=steps)


def _channel_steps(magnitudes: npt.NDArray[Any], bits: int) -> npt.NDArray[np.float64]:
    """Return the steps of channels; one without weights has the largest of all.

    Its bias lies on a grid of that step times that of the input, whose int32 a bias with a step of
    next to nothing would leave.
    """
    steps: npt.NDArray[np.float64] = magnitudes.astype(np.float64) / ((1 << (bits - 1)) - 1)
    steps[magnitudes == 0.0] = steps.max(initial=0.0)
    return np.maximum(steps, _SMALLEST_SCALE, out=steps)


def fit_steps(
    weights: Weights, fmt: WeightFormat, importance: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """Return the steps [out, blocks] of the least square error of the weights.

    In blocks the widest block of a channel decides the scale of the channel, and the others take
    the multiples of it that suit them best, as LPBQ stores them.

    Args:
        weights: to round to the nearest.
        importance: factor of the error of each input, such as its mean square.
    """
    blocks, full = _in_blocks(weights, fmt), full_steps(weights, fmt)
    factor = importance.astype(np.float32).reshape(1, *blocks.shape[1:])
    if fmt.block_size is None:
        return full * _best_multiples(blocks, full, factor, fmt.bits, SHRINKAGES)
    channels, widest = np.arange(len(blocks)), full.argmax(axis=1)
    own = (blocks[channels, widest, None], full[channels, widest, None], factor[0, widest, None])
    scales = own[1] * _best_multiples(*own, fmt.bits, SHRINKAGES) / _FACTORS
    factors = _best_multiples(blocks, scales, factor, fmt.bits, np.arange(1.0, _FACTORS + 1))
    factors[channels, widest] = _FACTORS
    return factors * scales


def _best_multiples(
    blocks: Weights,
    steps: npt.NDArray[np.float64],
    factor: npt.NDArray[np.float32],
    bits: int,
    multiples: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return the multiple [out, blocks] of a step that has the least error in each block.

    Args:
        blocks: weights [out, blocks, inputs].
        steps: [out, blocks] or [out, 1].
        factor: of the square error of each weight; its shape broadcasts to that of the blocks.
    """
    half = 1 << (bits - 1)
    found = np.ones(blocks.shape[:2])
    rows = max(1, _CACHED_VALUES // blocks[0].size)
    for start in range(0, len(blocks), rows):
        some = slice(start, start + rows)
        one = steps[some, :, None]
        scaled = np.divide(blocks[some], one, dtype=np.float32, casting="same_kind")
        factors = np.broadcast_to(factor if len(factor) == 1 else factor[some], scaled.shape)
        best, rounded, error = found[some] * np.inf, np.empty_like(scaled), np.empty_like(scaled)
        for multiple in multiples:
            np.multiply(scaled, np.float32(1 / multiple), out=error)
            np.clip(np.rint(error, out=rounded), -half, half - 1, out=rounded)
            np.subtract(rounded, error, out=error)
            np.square(error, out=error)
            sums = np.einsum("obi,obi->ob", error, factors) * multiple**2
            better = sums < best
            best[better], found[some][better] = sums[better], multiple
    return found


def stored_steps(steps: npt.NDArray[Any], fmt: WeightFormat, width: int) -> Weights:
    """Return the step of each weight, [out, in] or [out, 1], as an encoding can say it."""
    if fmt.block_size is None:
        return steps.astype(np.float32)
    scales, factors = _lpbq_factors(steps)
    block_steps = factors.astype(np.float32) * scales.astype(np.float32)[:, None]
    return np.repeat(block_steps, width // block_steps.shape[1], axis=1)


def round_to(weights: Weights, steps: Weights, bits: int) -> Weights:
    """Return weights rounded to the nearest integer multiple of their steps, saturated."""
    half = 1 << (bits - 1)
    rounded: Weights = np.clip(np.rint(weights / steps), -half, half - 1) * steps
    return rounded


def encode_steps(name: str, steps: npt.NDArray[Any], fmt: WeightFormat, axis: int) -> Encoding:
    """Return the encoding of a weight by its steps [out, blocks].

    Args:
        steps: for LPBQ those of each block, which its encoding rounds to multiples of a channel's.
        axis: axis of the channels in the stored tensor.
    """
    if not np.isfinite(steps).all():
        raise EncodingsError(name, "its values are not finite")
    if fmt.block_size is None:
        half = 1 << (fmt.bits - 1)
        return Encoding(
            name=name,
            dtype="INT",
            enc_type="PER_CHANNEL",
            bw=fmt.bits,
            is_sym=True,
            scale=tuple(steps[:, 0].tolist()),
            offset=(-half,) * len(steps),
            axis=axis,
        )
    scales, factors = _lpbq_factors(steps)
    return Encoding(
        name=name,
        dtype="INT",
        enc_type="LPBQ",
        bw=_LPBQ_FULL_BITS,
        compressed_bw=_LPBQ_BITS,
        is_sym=True,
        scale=tuple(scales.tolist()),
        offset=(-(1 << (_LPBQ_FULL_BITS - 1)),) * len(scales),
        block_size=fmt.block_size,
        per_block_int_scale=factors.tobytes(),
        axis=axis,
        block_axis=1 - axis,
    )


def per_channel_encoding(name: str, weights: npt.NDArray[Any], axis: int, bits: int) -> Encoding:
    """Return the symmetric encoding that covers each channel's largest magnitude."""
    others = tuple(a for a in range(weights.ndim) if a != axis)
    parts = [np.abs(rows).max(axis=others) for rows in chunks(weights)]
    magnitudes = np.concatenate(parts) if axis == 0 else np.max(parts, axis=0)
    steps = _channel_steps(magnitudes, bits)[:, None]
    return encode_steps(name, steps, WeightFormat(bits), axis)


def lpbq_encoding(name: str, weights: npt.NDArray[Any], axis: int, block_size: int) -> Encoding:
    """Return the LPBQ encoding of a weight.

    Each weight has 4 bits, the scale of each block along the other axis has 4, and each channel has
    one float scale: the largest block scale of a channel is 16 of its steps.

    Args:
        weights: [out, in] if `axis` is 0, [in, out] if it is 1.
        block_size: divides the number of inputs.
    """
    if weights.ndim != 2 or weights.shape[1 - axis] % block_size:
        reason = f"blocks of {block_size} for a weight of shape {list(weights.shape)}"
        raise EncodingsError(name, reason)
    fmt = WeightFormat(_LPBQ_BITS, block_size)
    by_channel = np.asarray(weights if axis == 0 else weights.T, np.float32)
    return encode_steps(name, full_steps(by_channel, fmt), fmt, axis)


def chunks(weights: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.float32]]:
    """Yield some rows at a time, as float32; a scalar as one row."""
    rows = weights.reshape(1) if weights.ndim == 0 else weights
    step = max(1, _CHUNK_VALUES // max(1, rows[:1].size))
    for start in range(0, len(rows), step):
        yield np.asarray(rows[start : start + step], np.float32)


def _in_blocks(weights: Weights, fmt: WeightFormat) -> Weights:
    """Return weights as [out, blocks, inputs of a block]."""
    return weights.reshape(len(weights), -1, fmt.block_size or weights.shape[1])


def _lpbq_factors(
    steps: npt.NDArray[Any],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint8]]:
    """Return the scale of each channel, and the integer that each block multiplies it by."""
    scales = steps.max(axis=1) / _FACTORS
    factors = np.clip(np.ceil(steps / scales[:, None] - 1e-9), 1, _FACTORS)
    return scales, factors.astype(np.uint8)
