"""`Tensor`: an array that is loaded when it is written, and safetensors files of any type.

Format of safetensors: `buildlib.checkpoint.tensor_file`. Files are laid out as its own library
does, tensors of wide types first, so that each is aligned to its type.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.tensor_file import read_header
from buildlib.files import atomic_write

_CHUNK_BYTES = 64 << 20
_RAW: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype("<u2"), "bool": np.dtype(np.uint8)}
_SAFETENSORS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "F64": "float64",
    "I64": "int64", "U64": "uint64",
}  # fmt: skip
"""Our names of types by those of safetensors, in the order in which its library ranks them."""
_PLAIN = {*_SAFETENSORS.values(), "complex64", "complex128"}


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """Return the type of the array that holds a type; bytes for those that NumPy cannot hold."""
    if dtype in _RAW:
        return _RAW[dtype]
    return np.dtype(dtype) if dtype in _PLAIN else np.dtype(np.uint8)


@dataclass(frozen=True)
class Tensor:
    """A named tensor, whose values are read or computed on demand.

    Attributes:
        dtype: NumPy's name of the type, `bfloat16`, or a packed type of mllm such as `q4_0`.
        n_bytes: its size in a file.
        load: returns the values, `stored_dtype(dtype)`, of any shape with as many bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int
    load: Callable[[], npt.NDArray[Any]]

    @classmethod
    def computed(
        cls, name: str, dtype: str, shape: tuple[int, ...], load: Callable[[], npt.NDArray[Any]]
    ) -> Self:
        """Make a tensor of a type that NumPy has, from its function."""
        return cls(name, dtype, shape, math.prod(shape) * stored_dtype(dtype).itemsize, load)

    @classmethod
    def of(cls, name: str, array: npt.NDArray[Any]) -> Self:
        """Make a tensor of an array."""
        return cls.computed(name, array.dtype.name, array.shape, lambda: array)

    @classmethod
    def mapped(
        cls, name: str, dtype: str, shape: tuple[int, ...], place: tuple[Path, int, int]
    ) -> Self:
        """Make a tensor that lies in a file; loading maps it.

        Args:
            place: file, offset and number of bytes.
        """
        return cls(name, dtype, shape, place[2], partial(_map, place, stored_dtype(dtype), shape))


def _map(
    place: tuple[Path, int, int], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    path, offset, n_bytes = place
    if not n_bytes:
        return np.empty(shape, dtype)
    if math.prod(shape) * dtype.itemsize != n_bytes:  # packed
        shape = (n_bytes,)
    return np.memmap(path, dtype, mode="r", offset=offset, shape=shape)


def write_data(file: BinaryIO, tensor: Tensor) -> None:
    """Append the values of a tensor to a file, some megabytes at a time."""
    array = np.ascontiguousarray(tensor.load())
    data = array.reshape(-1).view(np.uint8)
    if array.dtype != stored_dtype(tensor.dtype) or len(data) != tensor.n_bytes:
        msg = f"{tensor.name}: {array.dtype} {array.shape} for {tensor.dtype} {tensor.shape}"
        raise AssertionError(msg)
    starts = range(0, len(data), _CHUNK_BYTES)
    file.writelines(data[start : start + _CHUNK_BYTES].data for start in starts)


def read_safetensors(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a safetensors file by name, in the order of their names."""
    refs = read_header(path, _SAFETENSORS)
    return {
        name: Tensor.mapped(
            name, _SAFETENSORS[ref.dtype], ref.shape, (ref.path, ref.offset, ref.n_bytes)
        )
        for name, ref in sorted(refs.items())
    }


def write_safetensors(path: Path, tensors: Iterable[Tensor]) -> None:
    """Write a safetensors file, one tensor in memory at a time."""
    types = {ours: (rank, theirs) for rank, (theirs, ours) in enumerate(_SAFETENSORS.items())}
    tensors = sorted(tensors, key=lambda tensor: (-types[tensor.dtype][0], tensor.name))
    header: dict[str, Any] = {}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.n_bytes
        header[tensor.name] = {
            "dtype": types[tensor.dtype][1],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            write_data(file, tensor)
