"""Weights of matrices: which axis their channels are, and the grid of each channel."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.encodings.model import Encoding
from buildlib.errors import EncodingsError


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


def per_channel(name: str, weights: npt.NDArray[Any], axis: int, bits: int) -> Encoding:
    """The symmetric grids that cover each channel's largest magnitude.

    Raises:
        EncodingsError: a weight is not finite.
    """
    others = tuple(a for a in range(weights.ndim) if a != axis)
    magnitudes = np.abs(weights).max(axis=others).astype(np.float64)
    if not np.isfinite(magnitudes).all():
        raise EncodingsError(name, "its values are not finite")
    half = 1 << (bits - 1)
    scales = np.maximum(magnitudes / (half - 1), 1e-9)
    return Encoding(
        name=name,
        dtype="INT",
        enc_type="PER_CHANNEL",
        bw=bits,
        is_sym=True,
        scale=tuple(scales.tolist()),
        offset=(-half,) * len(scales),
    )
