"""Files `.mllm`: the parameters of a model for mllm, read in versions 1 and 2, written in 2.

The format is that of https://github.com/UbiquitousLearning/mllm (MIT licence), as
`mllm/core/schema/ModelFileV{1,2}.hpp` and `pymllm/mobile/convertor/model_file_v2.py` have it:
little-endian, without padding.

    version 2   u32 0x519A, u32 2, name of the model (512 bytes), u32 lines of the table,
                u64 place of the table;
                a line (352 bytes): u32 number, u32 type, u64 bytes, u64 place, u64 rank,
                i32 shape (16 of them), name (256 bytes)
    version 1   i32 20012, u64 bytes of the table;
                a line: u32 bytes of the name, name, u64 bytes, u64 place, i32 type

Names end at their first zero byte; places count from the start of the file. Version 1 has no
shapes.
"""

import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from buildlib.errors import InputFileError
from buildlib.files import atomic_write, check_file
from plugins.mllm.tensors import Tensor, stored_dtype, write_data

_HEADER, _LINE = struct.Struct("<II512sIQ"), struct.Struct("<IIQQQ16i256s")
_HEADER_1, _NAME_1, _LINE_1 = struct.Struct("<iQ"), struct.Struct("<I"), struct.Struct("<QQi")
_MAGIC, _MAGIC_1 = 0x519A, 20012
_MODEL_NAME_BYTES, _NAME_BYTES, _MOST_DIMENSIONS = 512, 256, 16
_MOST_LINES, _MOST_TABLE_BYTES = 1 << 18, 64 << 20
_PLAIN = {
    0: "float32", 1: "float16", 16: "int8", 17: "int16", 18: "int32", 128: "bfloat16", 129: "uint8",
    130: "uint16", 131: "uint32", 132: "int64", 133: "uint64", 156: "bool", 201: "complex64",
    202: "complex128",
}  # fmt: skip
_PACKED = {
    2: "q4_0", 3: "q4_1", 8: "q8_0", 9: "q8_1", 10: "q8_pertensor", 12: "q4_k", 14: "q6_k",
    15: "q8_k", 19: "q4_0_4_4", 20: "q4_0_4_8", 21: "q4_0_8_8", 22: "q8_0_4_4", 23: "q3_k",
    24: "q2_k", 25: "q1_k", 26: "iq2_xxs", 27: "iq2_xs", 28: "iq1_s", 29: "iq1_m", 30: "iq2_s",
    134: "byte", 135: "mxfp4", 136: "int4", 137: "uint4", 138: "int2", 139: "uint2",
}  # fmt: skip
_TYPES = _PLAIN | _PACKED
_CODES = {name: code for code, name in _TYPES.items()} | {"bool": 129}  # as mllm's writer has it


@dataclass(frozen=True)
class ParameterFile:
    """A `.mllm` file whose table has been checked; its data is read on demand.

    Attributes:
        version: of the format, 1 or 2.
        model_name: empty in files of mllm's own writers, and in version 1.
        tensors: by name, in the order of the table.
    """

    path: Path
    version: int
    model_name: str
    tensors: Mapping[str, Tensor]
    n_bytes: int


def read_parameters(path: Path) -> ParameterFile:
    """Read and check header and table of a `.mllm` file, no data."""
    try:
        check_file(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_HEADER.size)
            kind = int.from_bytes(start[:4], "little")
            if kind == _MAGIC_1 and len(start) >= _HEADER_1.size:
                return _read_1(path, file, start, size)
            if kind != _MAGIC:
                raise InputFileError(str(path), "it is no .mllm file: it begins otherwise")
            return _read_2(path, file, start, size)
    except OSError as error:
        raise InputFileError(str(path), error.strerror or "it cannot be read") from error


def write_parameters(path: Path, tensors: Sequence[Tensor], model_name: str = "") -> None:
    """Write a `.mllm` file of version 2, one tensor in memory at a time.

    Args:
        path: of the file, which appears whole or not at all.
        tensors: in the order of the table.
        model_name: for the header, where mllm's own writers leave it empty.
    """
    place = _HEADER.size + len(tensors) * _LINE.size
    table = []
    for number, tensor in enumerate(tensors):
        name, shape = tensor.name.encode(), tensor.shape
        if not name or len(name) > _NAME_BYTES or b"\0" in name:
            reason = f"a name of it has {len(name)} bytes, and .mllm takes 1 to {_NAME_BYTES}"
            raise InputFileError(str(path), f"{reason}: {tensor.name[:40]!r}")
        if tensor.dtype not in _CODES:
            raise InputFileError(str(path), f"{tensor.name}: .mllm has no type {tensor.dtype}")
        if len(shape) > _MOST_DIMENSIONS or any(dim >= 1 << 31 for dim in shape):
            raise InputFileError(str(path), f"{tensor.name}: .mllm has no shape {list(shape)}")
        dims = (*shape, *(0,) * (_MOST_DIMENSIONS - len(shape)))
        facts = (number, _CODES[tensor.dtype], tensor.n_bytes, place, len(shape))
        table.append(_LINE.pack(*facts, *dims, name))
        place += tensor.n_bytes
    title = model_name.encode()[:_MODEL_NAME_BYTES]
    with atomic_write(path) as file:
        file.write(_HEADER.pack(_MAGIC, 2, title, len(tensors), _HEADER.size))
        file.writelines(table)
        for tensor in tensors:
            write_data(file, tensor)


def _read_2(path: Path, file: BinaryIO, start: bytes, size: int) -> ParameterFile:
    if len(start) < _HEADER.size:
        raise InputFileError(str(path), f"it ends in its header, which takes {_HEADER.size} bytes")
    _, version, title, count, place = _HEADER.unpack(start)
    if version != 2:
        raise InputFileError(str(path), f"it is .mllm of version {version}; 1 and 2 are read here")
    end = place + count * _LINE.size
    if place < _HEADER.size or end > size or count > _MOST_LINES:
        reason = f"its header tells of a table of {count} lines at {place}, in {size} bytes"
        raise InputFileError(str(path), reason)
    file.seek(place)
    table = file.read(end - place)
    lines = []
    for number, (_, code, n_bytes, at, rank, *rest) in enumerate(_LINE.iter_unpack(table)):
        if rank > _MOST_DIMENSIONS:
            reason = f"it has {rank} dimensions, and the format {_MOST_DIMENSIONS} at most"
            raise _refuse(path, number, rest[-1], reason)
        lines.append(_Line(number, rest[-1], code, n_bytes, at, tuple(rest[:rank])))
    tensors = _check_lines(path, lines, end, size)
    return ParameterFile(path, 2, _text(title), tensors, size)


def _read_1(path: Path, file: BinaryIO, start: bytes, size: int) -> ParameterFile:
    _, n_bytes = _HEADER_1.unpack(start[: _HEADER_1.size])
    end = _HEADER_1.size + n_bytes
    if end > size or n_bytes > _MOST_TABLE_BYTES:
        reason = f"its header tells of a table of {n_bytes} bytes, in {size} bytes"
        raise InputFileError(str(path), reason)
    file.seek(_HEADER_1.size)
    table = file.read(n_bytes)
    lines: list[_Line] = []
    at = 0
    while at < len(table):
        rest = len(table) - at - _NAME_1.size
        length = _NAME_1.unpack_from(table, at)[0] if rest >= 0 else 0
        if rest < length + _LINE_1.size:
            raise _refuse(path, len(lines), b"", "the table ends in it")
        at += _NAME_1.size
        name = table[at : at + length]
        size_of, place, code = _LINE_1.unpack_from(table, at + length)
        at += length + _LINE_1.size
        width = stored_dtype(_TYPES.get(code, "byte")).itemsize
        lines.append(_Line(len(lines), name, code, size_of, place, (size_of // width,)))
    tensors = _check_lines(path, lines, end, size)
    return ParameterFile(path, 1, "", tensors, size)


@dataclass(frozen=True)
class _Line:
    """A line of the table, not checked yet."""

    number: int
    name: bytes
    code: int
    n_bytes: int
    place: int
    shape: tuple[int, ...]


def _check_lines(path: Path, lines: Sequence[_Line], end: int, size: int) -> dict[str, Tensor]:
    """Return the tensors of a table that ends at `end`, in a file of `size` bytes."""
    tensors: dict[str, Tensor] = {}
    for line in lines:
        fault = next(_faults(line, tensors, end, size), None)
        if fault is not None:
            raise _refuse(path, line.number, line.name, fault)
        name = _text(line.name)
        place = (path, line.place, line.n_bytes)
        tensors[name] = Tensor.mapped(name, _TYPES[line.code], line.shape, place)
    nonempty = sorted((line for line in lines if line.n_bytes), key=lambda line: line.place)
    for one, other in itertools.pairwise(nonempty):
        if one.place + one.n_bytes > other.place:
            raise _refuse(path, other.number, other.name, f"it overlaps {_text(one.name)[:80]!r}")
    return tensors


def _faults(line: _Line, before: Mapping[str, Tensor], end: int, size: int) -> Iterator[str]:
    name = line.name.partition(b"\0")[0]
    try:
        text = name.decode()
    except UnicodeDecodeError:
        yield "its name is not UTF-8"
        return
    if not text:
        yield "it has no name"
    if text in before:
        yield "a line before it has its name"
    if line.code not in _TYPES:
        yield f"there is no type {line.code}"
    if any(dim < 0 for dim in line.shape):
        yield f"its shape is {list(line.shape)}"
    width = stored_dtype(_TYPES.get(line.code, "byte")).itemsize
    if line.code in _PLAIN and math.prod(line.shape) * width != line.n_bytes:
        yield f"{line.n_bytes} bytes for {_PLAIN[line.code]} {list(line.shape)}"
    if line.n_bytes and line.place < end:
        yield f"it lies at {line.place}, before the end of the table at {end}"
    if line.place + line.n_bytes > size:
        yield f"it ends at {line.place + line.n_bytes}, after the end of the file at {size}"


def _refuse(path: Path, number: int, name: bytes, reason: str) -> InputFileError:
    where = f"line {number} of its table"
    if text := _text(name)[:80]:
        where += f", {text!r}"
    return InputFileError(str(path), f"it is damaged: {where}: {reason}")


def _text(name: bytes) -> str:
    return name.partition(b"\0")[0].decode(errors="replace")
