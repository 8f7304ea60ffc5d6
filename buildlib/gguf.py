"""Header of a GGUF file: keys of the model, types, shapes and places of its tensors.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (MIT), version 2 and 3.
"""

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Self

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
        34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    }
)  # fmt: skip
_LONGEST_TEXT = 1 << 24
_MOST = 1 << 24
"""Entries of an array, keys or tensors of a file."""
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
"""Bytes to which tensors are aligned where no key says otherwise."""


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


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Facts of a GGUF file about its model.

    Attributes:
        keys: numbers and texts, such as `general.name`; arrays are left out.
        parameters: number of weights.
        precision: type of most weights: `Q4_0`; empty for one that is not known here.
        tensors: by name.
    """

    keys: Mapping[str, str | int | float | bool]
    parameters: int
    precision: str
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the header of a file.

        Raises:
            InputFileError: it cannot be read, or is no GGUF file of version 2 or 3.
        """
        try:
            with path.open("rb") as file:
                return cls._read(file)
        except OSError as error:
            raise InputFileError(str(path), error.strerror or str(error)) from error
        except (UnicodeDecodeError, ValueError, struct.error) as error:
            raise InputFileError(str(path), f"it is no GGUF file: {error}") from error

    @classmethod
    def _read(cls, file: BinaryIO) -> Self:
        magic, version, tensors, pairs = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF" or version not in {2, 3}:
            raise ValueError("it does not begin with GGUF of version 2 or 3")
        keys: dict[str, str | int | float | bool] = {}
        for _ in range(_bounded(pairs)):
            key = _read_text(file)
            value = _read_value(file, *struct.unpack("<I", file.read(4)))
            if value is not None:
                keys[key] = value
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
        return cls(keys, weights.total(), precision, by_name)

    @property
    def name(self) -> str:
        """Name that the file gives the model; empty if it gives none."""
        return str(self.keys.get("general.name", ""))

    @property
    def context_length(self) -> int | None:
        """Tokens of the longest context that the model was made for."""
        value = self.keys.get(f"{self.keys.get('general.architecture')}.context_length")
        return value if isinstance(value, int) and value > 0 else None


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


def _read_value(file: BinaryIO, kind: int) -> str | int | float | bool | None:
    """Read a value; of an array, read past it and return None."""
    if kind == _TEXT:
        return _read_text(file)
    if kind == _ARRAY:
        inner, count = struct.unpack("<IQ", file.read(12))
        if inner in _SCALARS:
            file.seek(struct.calcsize(_SCALARS[inner]) * _bounded(count), 1)
        else:
            for _ in range(_bounded(count)):
                _read_value(file, _inner(inner))
        return None
    if kind not in _SCALARS:
        raise ValueError(f"a value is of the unknown type {kind}")
    layout = _SCALARS[kind]
    (value,) = struct.unpack(layout, file.read(struct.calcsize(layout)))
    return value  # type: ignore[no-any-return]


def _inner(kind: int) -> int:
    if kind != _TEXT:
        raise ValueError(f"an array holds values of the type {kind}")
    return kind
