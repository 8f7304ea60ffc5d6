"""Weights of matrices: which axis their channels are, and grids that cover their values."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.encodings.model import Encoding
from buildlib.errors import EncodingsError

_CHUNK_VALUES = 1 << 20
_SMALLEST_SCALE = 1e-9
_LPBQ_BITS, _LPBQ_FULL_BITS = 4, 8


def channel_axis(node: ir.Node, index: int) -> int | None:
    """The axis of output channels if input `index` of `node` is a matrix's weight, else None."""
    if index != 1:
        return None
    if node.op_type == "Gemm":
        return 0 if node.attributes.get_int("transB", 0) else 1
    if node.op_type == "MatMul":
        weight = node.inputs[1]
        rank = len(weight.shape) if weight is not None and weight.shape is not None else 2
        return rank - 1
    return 0 if node.op_type == "Conv" else None


def value_range(name: str, weights: npt.NDArray[Any]) -> tuple[float, float]:
    """The smallest and the largest value.

    Raises:
        EncodingsError: a value is not finite.
    """
    low, high = np.inf, -np.inf
    for rows in _chunks(weights):
        low, high = min(low, float(rows.min())), max(high, float(rows.max()))
    _check_finite(name, np.array([low, high]))
    return low, high


def per_channel(name: str, weights: npt.NDArray[Any], axis: int, bits: int) -> Encoding:
    """The symmetric grids that cover each channel's largest magnitude.

    Raises:
        EncodingsError: a weight is not finite.
    """
    others = tuple(a for a in range(weights.ndim) if a != axis)
    parts = [np.abs(rows).max(axis=others) for rows in _chunks(weights)]
    magnitudes = np.concatenate(parts) if axis == 0 else np.max(parts, axis=0)
    _check_finite(name, magnitudes)
    half = 1 << (bits - 1)
    scales = np.maximum(magnitudes.astype(np.float64) / (half - 1), _SMALLEST_SCALE)
    return Encoding(
        name=name,
        dtype="INT",
        enc_type="PER_CHANNEL",
        bw=bits,
        is_sym=True,
        scale=tuple(scales.tolist()),
        offset=(-half,) * len(scales),
        axis=axis,
    )


def lpbq(name: str, weights: npt.NDArray[Any], axis: int, block_size: int) -> Encoding:
    """4 bits for each weight, 4 for the scale of each block along the other axis, one float each
    channel: the largest block scale of a channel is 16 of its steps.

    Args:
        name: of the tensor.
        weights: [out, in] if `axis` is 0, [in, out] if it is 1.
        axis: of the channels.
        block_size: divides the number of inputs.

    Raises:
        EncodingsError: a weight is not finite, or blocks do not divide the inputs.
    """  # noqa: D205
    if weights.ndim != 2 or weights.shape[1 - axis] % block_size:
        reason = f"blocks of {block_size} for a weight of shape {list(weights.shape)}"
        raise EncodingsError(name, reason)
    by_channel = np.asarray(weights, np.float32) if axis == 0 else np.asarray(weights.T, np.float32)
    blocks = np.abs(by_channel.reshape(len(by_channel), -1, block_size)).max(axis=2)
    _check_finite(name, blocks)
    wanted = np.maximum(blocks.astype(np.float64) / ((1 << (_LPBQ_BITS - 1)) - 1), _SMALLEST_SCALE)
    steps = 1 << (_LPBQ_FULL_BITS - _LPBQ_BITS)
    scales = wanted.max(axis=1) / steps
    factors = np.clip(np.ceil(wanted / scales[:, None] - 1e-9), 1, steps).astype(np.uint8)
    return Encoding(
        name=name,
        dtype="INT",
        enc_type="LPBQ",
        bw=_LPBQ_FULL_BITS,
        compressed_bw=_LPBQ_BITS,
        is_sym=True,
        scale=tuple(scales.tolist()),
        offset=(-(1 << (_LPBQ_FULL_BITS - 1)),) * len(scales),
        block_size=block_size,
        per_block_int_scale=factors.tobytes(),
        axis=axis,
        block_axis=1 - axis,
    )


def _chunks(weights: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.float32]]:
    """Some rows at a time, as float32; a number alone as one row."""
    rows = weights.reshape(1) if weights.ndim == 0 else weights
    step = max(1, _CHUNK_VALUES // max(1, rows[:1].size))
    for start in range(0, len(rows), step):
        yield np.asarray(rows[start : start + step], np.float32)


def _check_finite(name: str, values: npt.NDArray[Any]) -> None:
    if not np.isfinite(values).all():
        raise EncodingsError(name, "its values are not finite")
