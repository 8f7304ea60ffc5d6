"""A GGUF file: keys of the model, and types, shapes, places and values of its tensors.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (MIT), version 2 and 3. Values of
quantized tensors need the extra `gguf`, whose package knows each type.
"""

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt

from buildlib.errors import InputFileError

_SCALARS = MappingProxyType(
    {
        0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
        10: "<Q", 11: "<q", 12: "<d",
    }
)  # fmt: skip
"""Types of values and their `struct` formats; 8 is a text and 9 an array."""
_TEXT, _ARRAY = 8, 9
_TYPES: Mapping[int, str] = MappingProxyType(
    {
        0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K",
        11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
        19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16",
        34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    }
)  # fmt: skip
_STORED: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype(ml_dtypes.bfloat16)}
)
"""Types whose values are stored as they are."""
_LONGEST_TEXT = 1 << 24
_MOST = 1 << 24
"""Entries of an array, keys or tensors of a file."""
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
"""Bytes to which tensors are aligned where no key says otherwise."""
_WITH_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
"""Kinds of BPE (`tokenizer.ggml.pre`) that begin a text with bos where no key says otherwise."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file.

    Attributes:
        shape: the fastest axis first.
        kind: number of its type.
        offset: of its data, in bytes of the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def type_name(self) -> str:
        """Its type: `Q4_0`; that of an unknown one is its number."""
        return _TYPES.get(self.kind, str(self.kind))


@dataclass(frozen=True, slots=True)
class _Array:
    """An array in a file: the type of its entries, their number, and where they begin."""

    kind: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Facts of a GGUF file about its model.

    Attributes:
        keys: numbers and texts, such as `general.name`; `array` reads the others.
        parameters: number of weights.
        precision: type of most weights: `Q4_0`; empty for one that is not known here.
        tensors: by name.
    """

    path: Path
    keys: Mapping[str, str | int | float | bool]
    parameters: int
    precision: str
    tensors: Mapping[str, GgufTensor]
    arrays: Mapping[str, _Array]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the header of a file.

        Raises:
            InputFileError: it cannot be read, or is no GGUF file of version 2 or 3.
        """
        try:
            with path.open("rb") as file:
                return cls._read(path, file)
        except OSError as error:
            raise InputFileError(str(path), error.strerror or str(error)) from error
        except (UnicodeDecodeError, ValueError, struct.error) as error:
            raise InputFileError(str(path), f"it is no GGUF file: {error}") from error

    @classmethod
    def _read(cls, path: Path, file: BinaryIO) -> Self:
        magic, version, tensors, pairs = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF" or version not in {2, 3}:
            raise ValueError("it does not begin with GGUF of version 2 or 3")
        keys: dict[str, str | int | float | bool] = {}
        arrays: dict[str, _Array] = {}
        for _ in range(_bounded(pairs)):
            key = _read_text(file)
            (kind,) = struct.unpack("<I", file.read(4))
            if kind == _ARRAY:
                arrays[key] = _skip_array(file)
            else:
                keys[key] = _read_value(file, kind)
        weights: Counter[int] = Counter()
        places: dict[str, GgufTensor] = {}
        for _ in range(_bounded(tensors)):
            name = _read_text(file)
            (count,) = struct.unpack("<I", file.read(4))
            if count > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {count} dimensions")
            shape = struct.unpack(f"<{count}Q", file.read(8 * count))
            kind, offset = struct.unpack("<IQ", file.read(12))
            weights[kind] += math.prod(shape)
            places[name] = GgufTensor(shape, kind, offset)
        step = int(keys.get("general.alignment", _ALIGNMENT))
        if not 0 < step <= _MOST:
            raise ValueError(f"it aligns tensors to {step} bytes")
        begin = -(-file.tell() // step) * step
        by_name = {name: replace(one, offset=begin + one.offset) for name, one in places.items()}
        most = weights.most_common(1)
        precision = _TYPES.get(most[0][0], "") if most else ""
        return cls(path, keys, weights.total(), precision, by_name, arrays)

    @property
    def name(self) -> str:
        """Name that the file gives the model; empty if it gives none."""
        return str(self.keys.get("general.name", ""))

    @property
    def architecture(self) -> str:
        """Architecture in llama.cpp's words, such as `qwen2`; empty if it names none."""
        return str(self.keys.get("general.architecture", ""))

    @property
    def context_length(self) -> int | None:
        """Tokens of the longest context that the model was made for."""
        value = self.keys.get(f"{self.architecture}.context_length")
        return value if isinstance(value, int) and value > 0 else None

    @property
    def adds_bos(self) -> bool:
        """True if llama.cpp begins a text with bos (its `src/llama-vocab.cpp`)."""
        usual = self.keys.get("tokenizer.ggml.pre") in _WITH_BOS
        usual = usual or self.keys.get("tokenizer.ggml.model") == "llama"
        return bool(self.keys.get("tokenizer.ggml.add_bos_token", usual))

    @property
    def types(self) -> dict[str, int]:
        """Weights of each type, the most first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.type_name] += math.prod(tensor.shape)
        return dict(counts.most_common())

    def array(self, key: str) -> list[Any]:
        """Read an array of numbers or texts; empty if there is none of that name."""
        place = self.arrays.get(key)
        if place is None:
            return []
        try:
            with self.path.open("rb") as file:
                file.seek(place.offset)
                if place.kind == _TEXT:
                    return [_read_text(file) for _ in range(place.count)]
                layout = np.dtype(_SCALARS[place.kind])
                values = np.fromfile(file, layout, place.count)
        except (OSError, ValueError, struct.error) as error:
            raise InputFileError(str(self.path), f"its {key} cannot be read: {error}") from error
        if len(values) < place.count:
            raise InputFileError(str(self.path), f"it is cut off in its {key}")
        return list(values.tolist())

    def rows(self, name: str) -> "GgufRows":
        """Open the rows of a tensor.

        Raises:
            InputFileError: there is no such tensor, it is not whole, or of a type without a reader.
        """
        if name not in self.tensors:
            raise InputFileError(str(self.path), f"it has no tensor {name}")
        return GgufRows(self.path, name, self.tensors[name])


class GgufRows:
    """Rows of one tensor, which are read and dequantized when they are asked for.

    Attributes:
        shape: of the tensor, the slowest axis first.
        dtype: of the values: float16 and bfloat16 stay what they are, all others are float32.
    """

    def __init__(self, path: Path, name: str, tensor: GgufTensor) -> None:
        self.shape = tensor.shape[::-1]
        self.dtype = _STORED.get(tensor.kind, np.dtype(np.float32))
        self._kind = tensor.kind
        self._fault = f"its tensor {name[:80]!r}"
        self._path = path
        length = self.shape[-1] if len(self.shape) > 1 else 1
        count = math.prod(self.shape) // max(1, length)
        block, block_bytes = self._block()
        if not count or not length or length % block:
            raise self._refuse(f"has rows of {length}, and blocks of {tensor.type_name} {block}")
        row_bytes = length // block * block_bytes
        excess = tensor.offset + count * row_bytes - path.stat().st_size
        if excess > 0:
            raise self._refuse(f"ends {excess} bytes past the end of the file; get it again")
        self._data = np.memmap(path, np.uint8, "r", tensor.offset, (count, row_bytes))

    def __getitem__(self, rows: slice | npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return rows [n, length], those of a vector [n, 1]."""
        data = np.ascontiguousarray(self._data[rows])
        if self._kind in _STORED:
            return data.view(self.dtype)
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            with np.errstate(all="ignore"):  # values are checked as those of any checkpoint
                values = dequantize(data, GGMLQuantizationType(self._kind))
        except NotImplementedError as error:
            raise self._refuse(f"is of a type that cannot be dequantized: {error}") from error
        return np.asarray(values, np.float32)

    def __len__(self) -> int:
        return len(self._data)

    def _block(self) -> tuple[int, int]:
        """Return the number of weights and of bytes of a block."""
        if self._kind in _STORED:
            return 1, self.dtype.itemsize
        try:
            from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        except ImportError as error:
            raise self._refuse("is quantized: pip install 'qnnfarm[gguf]'") from error
        try:
            return GGML_QUANT_SIZES[GGMLQuantizationType(self._kind)]
        except (KeyError, ValueError) as error:
            raise self._refuse(f"is of the unknown type {self._kind}") from error

    def _refuse(self, reason: str) -> InputFileError:
        return InputFileError(str(self._path), f"{self._fault} {reason}")


def _bounded(count: int) -> int:
    if count > _MOST:
        raise ValueError(f"it says that it has {count} entries")
    return count


def _read_text(file: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", file.read(8))
    if size > _LONGEST_TEXT:
        raise ValueError(f"a text has {size} bytes")
    content = file.read(size)
    if len(content) < size:
        raise ValueError("it is cut off")
    return content.decode(errors="replace")


def _read_value(file: BinaryIO, kind: int) -> str | int | float | bool:
    if kind == _TEXT:
        return _read_text(file)
    if kind not in _SCALARS:
        raise ValueError(f"a value is of the unknown type {kind}")
    layout = _SCALARS[kind]
    (value,) = struct.unpack(layout, file.read(struct.calcsize(layout)))
    return value  # type: ignore[no-any-return]


def _skip_array(file: BinaryIO) -> _Array:
    kind, count = struct.unpack("<IQ", file.read(12))
    place = _Array(kind, _bounded(count), file.tell())
    if kind in _SCALARS:
        file.seek(struct.calcsize(_SCALARS[kind]) * count, 1)
    elif kind == _TEXT:
        for _ in range(count):
            _read_text(file)
    else:
        raise ValueError(f"an array holds values of the type {kind}")
    return place
