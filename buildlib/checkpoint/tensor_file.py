"""One safetensors file: its header, checked before any tensor is read, and writing another.

Format (https://github.com/huggingface/safetensors): u64 little-endian header length, a JSON object
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}` with offsets from the header's end, data.
"""

import itertools
import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

from buildlib.closeable import Closeable
from buildlib.errors import ModelFileError
from buildlib.files import check_file, sync_file

StoredDtype = Literal["F16", "BF16", "F32"]
"""Types of the tensors of a checkpoint."""

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_RANK = 8
_ALIGNMENT = 64
_DTYPES: tuple[StoredDtype, ...] = get_args(StoredDtype)
_NUMPY: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BOOL": np.dtype(np.bool_),
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
}


@dataclass(frozen=True)
class TensorRef:
    """Location of a tensor, which is read on demand.

    Attributes:
        dtype: as the file spells it; other than `StoredDtype` only if `read_header` may take it.
        offset: of the first byte from the start of the file.
    """

    name: str
    dtype: StoredDtype
    shape: tuple[int, ...]
    path: Path
    offset: int
    n_bytes: int

    def numpy(self) -> npt.NDArray[Any]:
        """Return the tensor as a read-only view of the mapped file, in its stored type."""
        return np.memmap(
            self.path, _NUMPY[self.dtype], mode="r", offset=self.offset, shape=self.shape
        )

    def rows(self, start: int, stop: int, name: str) -> "TensorRef":
        """Return entries [start, stop) along the first axis, as a tensor of the same file."""
        n_bytes = self.n_bytes // self.shape[0]
        shape, offset = (stop - start, *self.shape[1:]), self.offset + start * n_bytes
        return TensorRef(name, self.dtype, shape, self.path, offset, (stop - start) * n_bytes)


_EXPONENTS: dict[str, int] = {"F16": 0xF800, "BF16": 0xFF00, "F32": 0xFF000000}
"""Bits of infinity without its sign, shifted left by one: the least that is not a finite number."""
_CHUNK_BYTES = 4 << 20


def find_nonfinite(ref: TensorRef) -> tuple[tuple[int, ...] | None, bool]:
    """Return the place of the first NaN or infinity in a tensor, or None, and whether it is all 0.

    Bits are compared as integers, which is as fast for 16-bit floats as memory is read; numpy takes
    ten to a hundred times as long for `isfinite` of them.
    """
    width = _NUMPY[ref.dtype].itemsize
    bits = np.empty(_CHUNK_BYTES // width, np.dtype(f"<u{width}"))
    shifted = np.empty_like(bits)
    zero = True
    with ref.path.open("rb", buffering=0) as file:
        file.seek(ref.offset)
        start = 0
        while start < ref.n_bytes:
            size = min(_CHUNK_BYTES, ref.n_bytes - start)
            count = file.readinto(bits.view(np.uint8)[:size].data)
            count -= count % width
            if not count:
                raise ModelFileError(ref.path, f"tensor {ref.name[:80]!r}: the file ends in it")
            file.seek(ref.offset + start + count)
            chunk = np.left_shift(bits[: count // width], 1, out=shifted[: count // width])
            largest = chunk.max()
            zero &= largest == 0
            if largest >= _EXPONENTS[ref.dtype]:
                first = start // width + int(np.argmax(chunk >= _EXPONENTS[ref.dtype]))
                place = np.unravel_index(first, ref.shape)
                return tuple(int(index) for index in place), False
            start += count
    return None, bool(zero)


def read_header(path: Path, dtypes: Collection[str] = _DTYPES) -> dict[str, TensorRef]:
    """Return all tensors of a safetensors file, without reading their data.

    Args:
        dtypes: types that they may have.
    """
    try:
        check_file(path)
        with path.open("rb") as file:
            file_size = path.stat().st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ModelFileError(path, f"truncated: {file_size} bytes hold no header")
            (header_size,) = struct.unpack("<Q", prefix)
            if header_size > min(_MAX_HEADER_BYTES, file_size - 8):
                reason = f"header claims {header_size} bytes of a file of {file_size}"
                raise ModelFileError(path, reason)
            raw = file.read(header_size)
    except OSError as error:
        raise ModelFileError(path, error.strerror or "cannot be read") from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise ModelFileError(path, "header is no JSON object")
    data_start = 8 + header_size
    refs = {
        name: _ref(path, name, entry, data_start, file_size, dtypes)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    _check_places(path, refs, data_start, file_size)
    return refs


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        msg = "a key occurs twice"
        raise ValueError(msg)
    return entries


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _ref(
    path: Path,
    name: str,
    entry: Any,  # noqa: ANN401
    data_start: int,
    file_size: int,
    dtypes: Collection[str],
) -> TensorRef:
    def refuse(reason: str) -> ModelFileError:
        return ModelFileError(path, f"tensor {name[:80]!r}: {reason}")

    if not isinstance(entry, dict):
        raise refuse("its entry is no JSON object")
    dtype: Any = entry.get("dtype")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if dtype not in dtypes:
        raise refuse(f"type {str(dtype)[:20]} is none of {', '.join(dtypes)}")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(map(_is_size, shape)):
        raise refuse("its shape is not a short list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise refuse("data_offsets is not [begin, end]")
    begin, end = offsets
    n_bytes = math.prod(shape) * _NUMPY[dtype].itemsize
    if end - begin != n_bytes:
        raise refuse(f"{end - begin} bytes stored, its shape {shape} needs {n_bytes}")
    if data_start + end > file_size:
        excess = data_start + end - file_size
        raise refuse(f"ends {excess} bytes past the end of the file (truncated?)")
    return TensorRef(name, dtype, tuple(shape), path, data_start + begin, n_bytes)


def _check_places(path: Path, refs: dict[str, TensorRef], start: int, file_size: int) -> None:
    """Check that tensors fill the file, as the format has it: each byte belongs to one."""
    nonempty = sorted((ref for ref in refs.values() if ref.n_bytes), key=lambda ref: ref.offset)
    for first, second in itertools.pairwise(nonempty):
        if first.offset + first.n_bytes > second.offset:
            reason = f"tensors {first.name[:80]!r} and {second.name[:80]!r} overlap"
            raise ModelFileError(path, reason)
    ends = [start, *(ref.offset + ref.n_bytes for ref in nonempty)]
    for end, begin in zip(ends, [*(ref.offset for ref in nonempty), file_size], strict=True):
        if end != begin:
            reason = f"{begin - end} bytes from {end} on belong to no tensor; get the file again"
            raise ModelFileError(path, reason)


class SafetensorsWriter(Closeable):
    """A safetensors file with tensors that are written in any order, by rows.

    Args:
        path: made at once, in its full size; it is on disk when the block ends.
        tensors: type and shape of each by name.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[StoredDtype, tuple[int, ...]]]
    ) -> None:
        self.path = path
        self._refs: dict[str, TensorRef] = {}
        header: dict[str, object] = {}
        end = 0
        for name, (dtype, shape) in tensors.items():
            size = math.prod(shape) * _NUMPY[dtype].itemsize
            self._refs[name] = TensorRef(name, dtype, shape, path, end, size)
            offsets = [end, end := end + size]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        begin = 8 + len(text)
        for name, ref in self._refs.items():
            self._refs[name] = replace(ref, offset=begin + ref.offset)
        with path.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(begin + end)

    def close(self) -> None:
        """Bring the file to the disk."""
        sync_file(self.path)

    def write(self, name: str, array: npt.NDArray[Any], start: int = 0) -> None:
        """Write rows of a tensor, from row `start` on."""
        ref = self._refs[name]
        with self.path.open("r+b") as file:
            values = np.ascontiguousarray(array, _NUMPY[ref.dtype])
            file.seek(ref.offset + start * math.prod(ref.shape[1:]) * values.itemsize)
            file.write(values.view(np.uint8).data)

    def ref(self, name: str) -> TensorRef:
        """Return a tensor of the file, written or not."""
        return self._refs[name]
