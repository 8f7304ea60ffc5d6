"""`Grid`: the integers of one tensor as ONNX stores them, and the arithmetic between."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.encodings.model import Encoding
from buildlib.errors import EncodingsError

_UNSIGNED: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16)}
_SIGNED: dict[int, np.dtype[Any]] = {8: np.dtype(np.int8), 16: np.dtype(np.int16)}


@dataclass(frozen=True)
class Grid:
    """An integer q of `dtype` means (q - zero_point) * scale.

    Attributes:
        scale: one value, or one for each channel.
        zero_point: as many as scales.
    """

    dtype: np.dtype[Any]
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]

    @property
    def per_channel(self) -> bool:
        """Whether every channel has its own scale."""
        return len(self.scale) > 1

    def quantize(self, values: npt.ArrayLike, axis: int = 0) -> npt.NDArray[Any]:
        """Round to even and saturate, as QuantizeLinear does; `axis` is the channels'."""
        array = np.asarray(values, dtype=np.float32)
        limits = np.iinfo(self.dtype)
        scale, zero = self._broadcast(array.ndim, axis)
        steps = np.rint(array / scale) + zero
        stored: npt.NDArray[Any] = np.clip(steps, limits.min, limits.max).astype(self.dtype)
        return stored

    def dequantize(self, integers: npt.NDArray[Any], axis: int = 0) -> npt.NDArray[np.float32]:
        """The values the integers stand for, computed as DequantizeLinear does."""
        scale, zero = self._broadcast(integers.ndim, axis)
        result: npt.NDArray[np.float32] = (integers.astype(np.float32) - zero) * scale
        return result

    def _broadcast(
        self, rank: int, axis: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        scale = np.array(self.scale, dtype=np.float32)
        zero = np.array(self.zero_point, dtype=np.float32)
        if not self.per_channel:
            return scale.reshape(()), zero.reshape(())
        dims = [1] * rank
        dims[axis] = -1
        return scale.reshape(dims), zero.reshape(dims)


def activation_grid(encoding: Encoding) -> Grid:
    """Activations are unsigned: the zero point is the negated offset.

    Raises:
        EncodingsError: no 8 or 16 bit integer grid of the whole tensor.
    """
    if encoding.dtype != "INT" or encoding.enc_type != "PER_TENSOR":
        raise EncodingsError(encoding.name, "an activation must be INT and PER_TENSOR")
    if encoding.bw not in _UNSIGNED:
        raise EncodingsError(encoding.name, f"{encoding.bw} bits; activations have 8 or 16")
    zero_point = tuple(-offset for offset in encoding.offset)
    return Grid(_UNSIGNED[encoding.bw], encoding.scale, zero_point)


def weight_grid(encoding: Encoding) -> Grid:
    """Symmetric weights are signed with zero point 0, others unsigned.

    Raises:
        EncodingsError: no 8 or 16 bit integer grid of the tensor or its channels.
    """
    if encoding.dtype != "INT" or encoding.enc_type not in {"PER_TENSOR", "PER_CHANNEL"}:
        reason = f"{encoding.dtype} {encoding.enc_type}; INT PER_TENSOR or PER_CHANNEL can be built"
        raise EncodingsError(encoding.name, reason)
    if encoding.bw not in _UNSIGNED:
        raise EncodingsError(encoding.name, f"{encoding.bw} bits; weights have 8 or 16")
    if not encoding.is_sym:
        zero_point = tuple(-offset for offset in encoding.offset)
        return Grid(_UNSIGNED[encoding.bw], encoding.scale, zero_point)
    half = 1 << (encoding.bw - 1)
    shifted = tuple(-offset - half for offset in encoding.offset)
    return Grid(_SIGNED[encoding.bw], encoding.scale, shifted)
