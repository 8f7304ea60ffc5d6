"""Embedding files and tables of the runners: raw rows, requantized between integer encodings.

An integer q of a file means ``(q + offset) * scale``. Standard library only, Python 3.8+.
"""

import array
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Dict, NamedTuple, Optional

if TYPE_CHECKING:
    from device_scripts import genie_api
else:  # beside this file on the device
    import genie_api

TYPES = {"int8": "b", "int16": "h", "uint8": "B", "uint16": "H", "float32": "f"}
_USAGE = "PATH, or PATH,TYPE,SCALE,OFFSET with TYPE one of int8, int16, uint8, uint16"
_RANGES = {"b": (-128, 127), "h": (-32768, 32767), "B": (0, 255), "H": (0, 65535)}


class RowEncoding(NamedTuple):
    """Meaning of the numbers of a file.

    Attributes:
        code: Of the type, as `array` names it.
    """

    code: str
    scale: float
    offset: int


class EmbeddingFile(NamedTuple):
    """A file of rows; without an encoding they are as the graph's input has them."""

    path: str
    encoding: Optional[RowEncoding]

    @classmethod
    def parse(cls, text: str) -> "EmbeddingFile":
        """Read ``PATH`` or ``PATH,TYPE,SCALE,OFFSET``; raises `ValueError`."""
        if text.endswith(",float32"):
            return cls(text[: -len(",float32")], RowEncoding("f", 1.0, 0))
        words = text.rsplit(",", 3)
        if len(words) < 4:
            if len(words) > 1 and any(word in TYPES for word in words[1:]):
                raise ValueError(_USAGE)
            return cls(text, None)
        path, kind, scale, offset = words
        if not path or kind not in TYPES or kind == "float32" or not float(scale) > 0:
            raise ValueError(_USAGE)
        return cls(path, RowEncoding(TYPES[kind], float(scale), int(offset)))


class EmbeddingRows:
    """A table of rows by token id, which gives each as the graph's input has it.

    Args:
        table: The file; with an encoding its rows are requantized.
        target: Encoding of the graph's input; needed if the table has an encoding.
    """

    def __init__(self, table: EmbeddingFile, target: Optional[RowEncoding] = None) -> None:
        if table.encoding is not None and target is None:
            raise genie_api.FatalError(
                "the encoding of an embedding table goes with that of the graph's input, which "
                "--embedding_file names"
            )
        self._file, self._target = table, target
        self._rows = genie_api.read_file(table.path, "embedding table")
        self._known: Dict[float, float] = {}

    def __call__(self, token: int, size: int) -> bytes:
        """Return the row of a token, of ``size`` bytes as the graph's input has it."""
        source, target = self._file.encoding, self._target
        if source is None or target is None:
            width = size
        else:
            width = size // _itemsize(target) * _itemsize(source)
        row = self._rows[token * width : (token + 1) * width]
        if token < 0 or len(row) < width or len(self._rows) % width:
            raise genie_api.FatalError(
                f"{self._file.path} has no row of {width} bytes for token {token}"
            )
        if source is None or target is None or source == target:
            return row
        return requantize(row, source, target, self._known)


def requantize(
    row: bytes, source: RowEncoding, target: RowEncoding, known: Dict[float, float]
) -> bytes:
    """Return numbers in another encoding, rounded to the nearest.

    Args:
        known: Results so far, which are reused: rows hold few different integers.
    """
    values = _numbers(source.code, row)
    if target.code == "f":
        return _bytes(array.array("f", [(v + source.offset) * source.scale for v in values]))
    low, high = _RANGES[target.code]
    results = []
    for value in values:
        result = known.get(value)
        if result is None:
            real = (value + source.offset) * source.scale
            result = known[value] = min(max(round(real / target.scale) - target.offset, low), high)
        results.append(int(result))
    return _bytes(array.array(target.code, results))


def read_rows(path: str) -> bytes:
    """Return the rows of an embedding file."""
    rows = genie_api.read_file(path, "embedding file")
    if not rows:
        raise genie_api.FatalError(f"{Path(path).name} holds no embedding")
    return rows


def _itemsize(encoding: RowEncoding) -> int:
    return array.array(encoding.code).itemsize


def _numbers(code: str, data: bytes) -> "array.array[float]":
    numbers: "array.array[float]" = array.array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _bytes(numbers: "array.array[float]") -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
