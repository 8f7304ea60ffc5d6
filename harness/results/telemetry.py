"""Telemetry in few bytes: all series of one repetition as one value of the database.

The value is zlib data. Inside is a line of JSON, then columns of little-endian numbers:

    {"v": 1, "columns": [n, ...], "series": [[channel, unit, time column, decimals], ...]}

First come the time columns: microseconds, as 64-bit differences from one sample to the next;
series that were sampled together share one. Then come the values of each series. Sensors speak in
decimals: where a few digits give every value back to the bit, they are 64-bit integers of that many
decimals, and the smallest of all stands for a sample that gave nothing. Otherwise `decimals` is -1,
and they are 64-bit floats, NaN for nothing. The bytes of a column are transposed (all first bytes,
all second bytes, ...), because sensors repeat themselves in their high bytes, and zlib sees that.

What is read is not trusted: sizes are bounded before anything is made of them.
"""

import json
import math
import zlib
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NoReturn

from harness.errors import TelemetryRecordError
from harness.results.records import MOST_SAMPLES, MOST_SERIES, TelemetrySeries

_WIDTH = 8
_LARGEST_HEAD = 2**20
_LARGEST = _LARGEST_HEAD + 2 * MOST_SAMPLES * _WIDTH
_PER_SECOND = 1e6
_FLOATS, _MOST_DECIMALS = -1, 6
_NOTHING, _LARGEST_INTEGER = -(2**63), 2**53

Named = tuple[str, str, int, int]


def pack(series: Sequence[TelemetrySeries]) -> bytes:
    """The series of one repetition as stored.

    Raises:
        TelemetryRecordError: too many of them, or a channel is there twice.
    """
    _check_amount(len(series), sum(len(one.t_s) for one in series))
    channels = [one.channel for one in series]
    if len(set(channels)) != len(channels):
        twice = next(name for name in channels if channels.count(name) > 1)
        raise TelemetryRecordError(twice, "it is there twice")
    times = {one.t_s: None for one in series}
    order = {moments: index for index, moments in enumerate(times)}
    encoded = [_encode(one.values) for one in series]
    head = {
        "v": 1,
        "columns": [len(moments) for moments in order],
        "series": [
            [one.channel, one.unit, order[one.t_s], decimals]
            for one, (decimals, _) in zip(series, encoded, strict=True)
        ],
    }
    parts = [json.dumps(head, separators=(",", ":")).encode(), b"\n"]
    parts += [_transposed(_differences(moments)) for moments in order]
    parts += [_transposed(column) for _, column in encoded]
    return zlib.compress(b"".join(parts), 9)


def unpack(data: bytes) -> tuple[TelemetrySeries, ...]:
    """The series out of a stored value.

    Raises:
        TelemetryRecordError: this was not written by `pack`.
    """
    plain = _inflate(data)
    text, _, body = plain.partition(b"\n")
    lengths, named = _head(text)
    _check_amount(len(named), sum(lengths[index] for _, _, index, _ in named))
    wanted = _WIDTH * (sum(lengths) + sum(lengths[index] for _, _, index, _ in named))
    if len(body) != wanted:
        _damaged(f"{len(body)} bytes of samples where {wanted} were announced")
    columns = _Columns(body)
    times = [
        tuple(step / _PER_SECOND for step in accumulate(columns.take("q", length)))
        for length in lengths
    ]
    return tuple(
        TelemetrySeries(
            channel,
            unit,
            times[index],
            _decode(columns.take("d" if decimals == _FLOATS else "q", lengths[index]), decimals),
        )
        for channel, unit, index, decimals in named
    )


class _Columns:
    """Takes one column after the other."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, kind: str, length: int) -> "array[int] | array[float]":
        end = self._at + length * _WIDTH
        piece = self._body[self._at : end]
        self._at = end
        plain = bytearray(len(piece))
        for byte in range(_WIDTH):
            plain[byte::_WIDTH] = piece[byte * length : (byte + 1) * length]
        column: array[int] | array[float] = array(kind)
        column.frombytes(bytes(plain))
        return column


def _encode(values: Sequence[float | None]) -> "tuple[int, array[int] | array[float]]":
    for decimals in range(_MOST_DECIMALS + 1):
        scale = 10**decimals
        integers = [_NOTHING if v is None else _scaled(v, scale) for v in values]
        if None not in integers:
            return decimals, array("q", (n for n in integers if n is not None))
    return _FLOATS, array("d", (math.nan if v is None else v for v in values))


def _scaled(value: float, scale: int) -> int | None:
    """The value in units of 1/scale, if that gives it back to the bit."""
    if abs(value) * scale > _LARGEST_INTEGER:
        return None
    scaled = round(value * scale)
    same = scaled / scale == value and math.copysign(1, scaled) == math.copysign(1, value)
    return scaled if same else None


def _decode(column: "array[int] | array[float]", decimals: int) -> tuple[float | None, ...]:
    if decimals == _FLOATS:
        return tuple(None if math.isnan(v) else v for v in column)
    return tuple(None if n == _NOTHING else n / 10**decimals for n in column)


def _differences(moments: Sequence[float]) -> "array[int]":
    steps = [round(moment * _PER_SECOND) for moment in moments]
    return array("q", (after - before for before, after in zip([0, *steps], steps, strict=False)))


def _transposed(column: "array[int] | array[float]") -> bytes:
    plain = column.tobytes()
    return b"".join(plain[byte::_WIDTH] for byte in range(_WIDTH))


def _inflate(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, _LARGEST)
    except zlib.error as error:
        _damaged(str(error))
    if not inflater.eof or inflater.unused_data:
        _damaged("it is cut, too long, or followed by something else")
    return plain


def _head(text: bytes) -> tuple[list[int], list[Named]]:
    if len(text) > _LARGEST_HEAD:
        _damaged("its head is too long")
    try:
        head = json.loads(text)
        if head["v"] != 1:
            _damaged("a newer qnnfarm wrote it")
        lengths, named = head["columns"], head["series"]
        plain = all(type(n) is int and 0 <= n <= MOST_SAMPLES for n in lengths) and all(
            type(channel) is str
            and type(unit) is str
            and type(index) is type(decimals) is int
            and index in range(len(lengths))
            and decimals in range(_FLOATS, _MOST_DECIMALS + 1)
            for channel, unit, index, decimals in named
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TelemetryRecordError("*", f"its head cannot be read: {error}") from error
    if not plain:
        _damaged("its head holds what it cannot")
    return lengths, [tuple(one) for one in named]


def _check_amount(series: int, samples: int) -> None:
    if series > MOST_SERIES or samples > MOST_SAMPLES:
        reason = f"{series} series with {samples} samples are more than one repetition may have"
        raise TelemetryRecordError("*", f"{reason}: {MOST_SERIES} with {MOST_SAMPLES}")


def _damaged(reason: str) -> NoReturn:
    raise TelemetryRecordError("*", f"what is stored is damaged: {reason}")
