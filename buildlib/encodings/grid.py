"""Integer grids of tensors as ONNX stores them, and quantization onto them."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.encodings.model import Encoding
from buildlib.errors import EncodingsError

Floats = npt.NDArray[Any]

_UNSIGNED = {4: ir.DataType.UINT4, 8: ir.DataType.UINT8, 16: ir.DataType.UINT16}
_SIGNED = {4: ir.DataType.INT4, 8: ir.DataType.INT8, 16: ir.DataType.INT16}
ACTIVATION_BITS = (8, 16)
_COMPRESSED_BITS = 4


@dataclass(frozen=True)
class Grid:
    """An affine grid: the integer q of `dtype` means (q - zero_point) * scale.

    Attributes:
        scale: one value, or one for each channel.
        zero_point: one for each scale.
        block_size: LPBQ values along the input axis that share a scale.
        block_scale: a byte for each LPBQ block, channel by channel, that multiplies the scale
            of its channel.
    """

    dtype: np.dtype[Any]
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    block_size: int | None = None
    block_scale: bytes = b""

    @property
    def per_channel(self) -> bool:
        """True if every channel has its own scale."""
        return len(self.scale) > 1 or self.block_size is not None

    @property
    def bits(self) -> int:
        """Bits of an integer."""
        return int(ir.DataType.from_numpy(self.dtype).bitwidth)

    @cached_property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest integer of the type."""
        signed = self.dtype.name.startswith("int")
        low = -(1 << (self.bits - 1)) if signed else 0
        return low, low + (1 << self.bits) - 1

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest value of a grid of the whole tensor."""
        low, high = ((limit - self.zero_point[0]) * self.scale[0] for limit in self.limits)
        return low, high

    @cached_property
    def digest(self) -> str:
        """Identifies the grid; the same on every machine."""
        digest = hashlib.sha256(f"{self.dtype.name} {self.block_size}".encode())
        digest.update(np.array(self.scale, "<f8").tobytes())
        digest.update(np.array(self.zero_point, "<i8").tobytes())
        digest.update(self.block_scale)
        return digest.hexdigest()[:32]

    def quantize(self, values: npt.ArrayLike, axis: int = 0) -> npt.NDArray[Any]:
        """Round to even and saturate, as QuantizeLinear does; `axis` is that of the channels."""
        array = np.asarray(values, dtype=np.float32)
        layout = self.layout(array.shape, axis)
        integers: npt.NDArray[Any] = layout.quantize(array, 0).astype(self.dtype)
        return integers

    def dequantize(self, integers: npt.NDArray[Any], axis: int = 0) -> npt.NDArray[np.float32]:
        """Return the values that the integers stand for, computed as DequantizeLinear does."""
        layout = self.layout(integers.shape, axis)
        steps = integers.astype(np.float32).reshape(layout.view) - layout.zero
        return (steps * layout.scale).astype(np.float32).reshape(integers.shape)

    def layout(self, shape: tuple[int, ...], axis: int) -> "Layout":
        """Lay the grid over a tensor with channels along `axis`.

        Raises:
            ValueError: channels or blocks do not fit the shape; the text says how.
        """
        work = np.float64 if self.bits > 16 else np.float32
        zero: Floats = np.array(self.zero_point, work)
        scale = np.array(self.scale, np.float32)
        if self.block_size is None:
            dims = [1] * len(shape)
            if self.per_channel:
                if not shape or shape[axis] != len(scale):
                    raise ValueError(f"{len(scale)} channels for a weight of shape {list(shape)}")
                dims[axis] = -1
            view = shape or (1,)
            dims = dims or [1]
            return Layout(self, view, scale.astype(work).reshape(dims), zero.reshape(dims), 1)
        return self._block_layout(shape, axis, scale, zero)

    def _block_layout(
        self, shape: tuple[int, ...], axis: int, scale: npt.NDArray[np.float32], zero: Floats
    ) -> "Layout":
        size = self.block_size or 1
        if len(shape) != 2 or axis not in {0, 1} or shape[1 - axis] % size:
            raise ValueError(f"blocks of {size} for a weight of shape {list(shape)}")
        n_channels, n_blocks = shape[axis], shape[1 - axis] // size
        if len(scale) != n_channels or len(self.block_scale) != n_channels * n_blocks:
            sizes = f"{len(scale)} channels, {len(self.block_scale)} blocks of {size}"
            raise ValueError(f"{sizes} for a weight of shape {list(shape)}")
        factors = np.frombuffer(self.block_scale, np.uint8).reshape(n_channels, n_blocks)
        scale, zero = factors.astype(np.float32) * scale[:, None], zero[:, None]
        if axis == 0:
            view: tuple[int, ...] = (n_channels, n_blocks, size)
            return Layout(self, view, scale[:, :, None], zero[:, :, None], 1)
        view = (n_blocks, size, n_channels)
        return Layout(self, view, scale.T[:, None, :], zero.T[:, None, :], size)


@dataclass(frozen=True)
class Layout:
    """A grid laid over a tensor, so that its rows can be quantized independently.

    Attributes:
        view: the tensor's shape with blocks as an axis of their own.
        scale: broadcasts against `view`; `zero` too.
        rows: rows of the tensor in one row of the view.
    """

    grid: Grid
    view: tuple[int, ...]
    scale: Floats
    zero: Floats
    rows: int

    def quantize(self, values: npt.NDArray[Any], start: int) -> npt.NDArray[Any]:
        """Quantize the rows from `start` on, to the smallest type that numpy has.

        Args:
            values: whole rows of the view, with the tensor's other axes.
            start: the first row, a multiple of `rows`.
        """
        count = values.size // max(1, int(np.prod(self.view[1:])))
        part = slice(start // self.rows, start // self.rows + count)
        shape = (count, *self.view[1:])
        scale, zero = (a if a.shape[0] == 1 else a[part] for a in (self.scale, self.zero))
        work = values.astype(self.scale.dtype, copy=False).reshape(shape) / scale
        np.rint(work, out=work)
        if zero.any():
            work += zero
        np.clip(work, *self.grid.limits, out=work)
        bits = max(8, self.grid.bits)
        signed = self.grid.limits[0] < 0
        return work.astype(f"{'' if signed else 'u'}int{bits}").reshape(values.shape)


def activation_grid(encoding: Encoding) -> Grid:
    """Return the grid of an activation: unsigned, with the negated offset as its zero point.

    A symmetric one of 16 bits is signed. HTP multiplies by an int16 operand with all of its bits,
    and takes the upper eight of a uint16 one (seen with QNN 2.51; `convert_operands`).
    """
    if encoding.dtype != "INT" or encoding.enc_type != "PER_TENSOR":
        raise EncodingsError(encoding.name, "an activation must be INT and PER_TENSOR")
    if encoding.bw not in ACTIVATION_BITS:
        raise EncodingsError(encoding.name, f"{encoding.bw} bits; activations have 8 or 16")
    zero_point = tuple(-offset for offset in encoding.offset)
    if encoding.is_sym and zero_point == (1 << 15,):
        return Grid(_SIGNED[16].numpy(), encoding.scale, (0,))
    return Grid(_UNSIGNED[encoding.bw].numpy(), encoding.scale, zero_point)


def weight_grid(encoding: Encoding) -> Grid:
    """Return the grid of a weight: signed with zero point 0 if symmetric, else unsigned.

    Strictly symmetric grids, which leave out the lowest integer, may count from one below the half.

    Raises:
        EncodingsError: no grid of 4, 8 or 16 bit integers, LPBQ of other than 4 bits, or a float
            scale for each block, which ends the HTP compiler (seen with QNN 2.51).
    """
    if encoding.dtype != "INT":
        raise EncodingsError(encoding.name, f"{encoding.dtype}; INT can be built")
    if encoding.enc_type == "PER_BLOCK":
        raise EncodingsError(encoding.name, "PER_BLOCK, which HTP cannot compile; export LPBQ")
    bits = encoding.stored_bits
    if encoding.enc_type == "LPBQ":
        if bits != _COMPRESSED_BITS:
            raise EncodingsError(encoding.name, f"LPBQ of {bits} bits; of 4 it can be built")
        zeros = (0,) * len(encoding.scale)
        blocks = encoding.per_block_int_scale
        return Grid(_SIGNED[bits].numpy(), encoding.scale, zeros, encoding.block_size, blocks)
    if bits not in _UNSIGNED:
        raise EncodingsError(encoding.name, f"{bits} bits; weights have 4, 8 or 16")
    half = 1 << (bits - 1)
    zero_point = tuple(-offset for offset in encoding.offset)
    if not encoding.is_sym:
        return Grid(_UNSIGNED[bits].numpy(), encoding.scale, zero_point)
    strict = set(zero_point) <= {half, half - 1}
    zero_point = tuple(0 if strict else zero - half for zero in zero_point)
    return Grid(_SIGNED[bits].numpy(), encoding.scale, zero_point)
