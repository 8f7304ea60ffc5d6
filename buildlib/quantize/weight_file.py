"""File of integer weights that quantized models refer to by offset.

The weights of a part are the same at every (AR, CL): they are written once, with an index beside
them, and every model of the part refers to that file.
"""

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.encodings.grid import Grid
from buildlib.errors import EncodingsError, ModelFileError
from buildlib.files import atomic_write, atomic_write_bytes
from buildlib.graph.files import tensor_array

_ALIGNMENT = 64
_CHUNK_VALUES = 1 << 18
_INDEX_VERSION = 1
_PACKED_BITS = 4
_MAX_WEIGHT_BITS = 16
_MAX_CLIPPING = 16.0  # calibrations may clip outliers, but not at this many times the kept range

BLOCK_SCALE = ".block_scale"


class WeightStore(Protocol):
    """Source of the integers of weights for a pass: a new file, or one written before."""

    def weight(
        self,
        name: str,
        source: ir.TensorProtocol,
        grid: Grid,
        axis: int,
        *,
        transposed: bool = False,
    ) -> ir.ExternalTensor:
        """Return the integers of `source` on `grid`, with channels along `axis`.

        With `transposed` they are stored with both axes exchanged; `axis` is that of the stored
        tensor.
        """
        ...

    def block_scale(self, name: str, array: npt.NDArray[np.uint8], grid: Grid) -> ir.ExternalTensor:
        """Return the integer scales of the blocks of weight `name`."""
        ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the file.

    Attributes:
        grid: its digest.
        dtype: ONNX name; INT4 and UINT4 are packed, the first in the low half of a byte.
    """

    name: str
    grid: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int

    def tensor(self, path: Path) -> ir.ExternalTensor:
        """Return an initializer for a model beside the file."""
        return ir.ExternalTensor(
            location=path.name,
            offset=self.offset,
            length=self.length,
            dtype=ir.DataType[self.dtype],
            shape=ir.Shape(self.shape),
            name=f"{self.name}_q",
            base_dir=path.parent,
        )


class WeightFile(ExitStack):
    """`WeightStore` that writes a new file, some megabytes at a time.

    The file takes its name at `finish`; an exception before that leaves nothing.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.stored: list[StoredTensor] = []
        self._size = 0

    def __enter__(self) -> Self:
        self._file = self.enter_context(atomic_write(self.path))
        return self

    def weight(
        self,
        name: str,
        source: ir.TensorProtocol,
        grid: Grid,
        axis: int,
        *,
        transposed: bool = False,
    ) -> ir.ExternalTensor:
        """Append the integers of a weight."""
        values = tensor_array(source).T if transposed else tensor_array(source)
        try:
            layout = grid.layout(values.shape, axis)
        except ValueError as error:
            raise EncodingsError(name, str(error)) from error
        offset = self._align()
        rows = values.reshape(1) if values.ndim == 0 else values
        width = max(1, rows[:1].size) * layout.rows
        step = max(1, _CHUNK_VALUES // width) * layout.rows
        rest, largest = np.empty(0, np.uint8), 0.0
        for start in range(0, len(rows), step):
            chunk = np.asarray(rows[start : start + step])
            largest = max(largest, float(chunk.max(initial=0.0)), -float(chunk.min(initial=0.0)))
            integers = layout.quantize(chunk, start)
            if grid.bits == _PACKED_BITS:
                flat = np.concatenate([rest, integers.reshape(-1).view(np.uint8)])
                even = len(flat) // 2 * 2
                rest, integers = flat[even:], pack_int4(flat[:even])
            self._write(np.ascontiguousarray(integers))
        if len(rest):
            self._write(pack_int4(np.append(rest, np.uint8(0))))
        _check_fit(name, grid, largest)
        dtype = ir.DataType.from_numpy(grid.dtype)
        return self._finish_tensor(name, grid.digest, dtype, values.shape, offset)

    def block_scale(self, name: str, array: npt.NDArray[np.uint8], grid: Grid) -> ir.ExternalTensor:
        """Append the integer scales of a weight's blocks."""
        offset = self._align()
        self._write(np.ascontiguousarray(array))
        shape, dtype = array.shape, ir.DataType.UINT8
        return self._finish_tensor(f"{name}{BLOCK_SCALE}", grid.digest, dtype, shape, offset)

    def finish(self, *, index: bool = False) -> None:
        """Give the file its name; with `index`, write its index too."""
        self.close()
        if index:
            data = {
                "version": _INDEX_VERSION,
                "size": self._size,
                "tensors": [asdict(stored) for stored in self.stored],
            }
            atomic_write_bytes(index_path(self.path), json.dumps(data, indent=1).encode() + b"\n")

    def _align(self) -> int:
        padding = -self._size % _ALIGNMENT
        self._file.write(bytes(padding))
        self._size += padding
        return self._size

    def _write(self, array: npt.NDArray[Any]) -> None:
        self._file.write(array.data)
        self._size += array.nbytes

    def _finish_tensor(
        self, name: str, digest: str, dtype: ir.DataType, shape: tuple[int, ...], offset: int
    ) -> ir.ExternalTensor:
        entry = StoredTensor(name, digest, dtype.name, tuple(shape), offset, self._size - offset)
        self.stored.append(entry)
        return entry.tensor(self.path)


class SharedWeights:
    """`WeightStore` that reads an existing file through its index.

    Raises:
        ModelFileError: it is not whole, or its index is no index.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = json.loads(index_path(path).read_text(encoding="utf-8"))
            if data["version"] != _INDEX_VERSION:
                raise ModelFileError(path, f"its index has version {data['version']}")
            tensors = [
                StoredTensor(**entry | {"shape": tuple(entry["shape"])})
                for entry in data["tensors"]
            ]
            whole = path.stat().st_size == data["size"]
        except OSError as error:
            raise ModelFileError(path, error.strerror or "cannot be read") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ModelFileError(path, "its index cannot be read") from error
        if not whole:
            raise ModelFileError(path, "it has not the size that its index says")
        self._tensors = {(stored.name, stored.grid, stored.shape): stored for stored in tensors}
        self._names = {stored.name for stored in tensors}

    def weight(
        self,
        name: str,
        source: ir.TensorProtocol,
        grid: Grid,
        axis: int,
        *,
        transposed: bool = False,
    ) -> ir.ExternalTensor:
        """Return the integers of a weight."""
        del axis
        shape = tuple(source.shape.numpy())
        return self._find(name, grid, shape[::-1] if transposed else shape)

    def block_scale(self, name: str, array: npt.NDArray[np.uint8], grid: Grid) -> ir.ExternalTensor:
        """Return the integer scales of a weight's blocks."""
        return self._find(f"{name}{BLOCK_SCALE}", grid, array.shape)

    def _find(self, name: str, grid: Grid, shape: tuple[int, ...]) -> ir.ExternalTensor:
        entry = self._tensors.get((name, grid.digest, shape))
        if entry is None:
            how = "on another grid, or in another shape" if name in self._names else "not at all"
            raise EncodingsError(name, f"{self.path.name} has this weight {how}")
        return entry.tensor(self.path)


def index_path(weights: Path) -> Path:
    """Return the path of the index of a weight file."""
    return weights.with_name(f"{weights.name}.json")


def _check_fit(name: str, grid: Grid, largest: float) -> None:
    """Refuse a grid made for other values: nearly all would saturate or become zero.

    HTP computes other numbers than the CPU on such a grid (seen with QNN 2.51).
    """
    steps = max(abs(limit - grid.zero_point[0]) for limit in grid.limits)
    reach = max(grid.scale) * steps * max(grid.block_scale, default=1)
    if largest > _MAX_CLIPPING * reach:
        reason = f"it reaches to {reach:.3g}, and the values to {largest:.3g}; it is of other ones"
        raise EncodingsError(name, reason)
    if 0.0 < largest < min(grid.scale) / 2 and grid.bits <= _MAX_WEIGHT_BITS:
        reason = f"its steps are {min(grid.scale):.3g}, and the values reach to {largest:.3g}"
        raise EncodingsError(name, reason)


def pack_int4(integers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pack an even number of 4-bit integers, two in a byte, the first in the low half."""
    pairs = integers.reshape(-1, 2)
    data = np.left_shift(pairs[:, 1], 4)
    data |= np.bitwise_and(pairs[:, 0], 0x0F)
    return data
