"""Telemetry encoding: all series of one repetition as one compact value of the database.

The value is zlib data. Inside is a line of JSON, then columns of little-endian numbers:

    {"v": 1, "columns": [n, ...], "series": [[channel, unit, time column, decimals], ...]}

First come the time columns: microseconds, as 64-bit differences from one sample to the next;
series that were sampled together share one. Then come the values of each series. Sensors speak in
decimals: where a few digits give every value back to the bit, they are 64-bit integers of that many
decimals, and the smallest of all stands for a sample that gave nothing. Otherwise `decimals` is -1,
and they are 64-bit floats, NaN for nothing. The bytes of a column are transposed (all first bytes,
all second bytes, ...), because sensors repeat themselves in their high bytes, and zlib sees that:
it takes half of what `numpy.savez_compressed` does.

Stored values are not trusted: sizes are bounded before anything is allocated.
"""

import json
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from harness.errors import TelemetryRecordError
from harness.results.records import MAX_SAMPLES, MAX_SERIES, TelemetrySeries

_WIDTH = 8
_LARGEST_HEAD = 2**20
_LARGEST = _LARGEST_HEAD + 2 * MAX_SAMPLES * _WIDTH
_PER_SECOND = 1e6
_FLOATS, _MOST_DECIMALS = -1, 6
_INTEGER, _FLOAT = "<i8", "<f8"
_NOTHING, _LARGEST_INTEGER = -(2**63), 2**53

Header = tuple[str, str, int, int]
"""Of one series: channel, unit, time column, decimals."""


def pack(series: Sequence[TelemetrySeries]) -> bytes:
    """Encode the series of one repetition.

    Raises:
        TelemetryRecordError: too many of them, or a channel is there twice.
    """
    _check_amount(len(series), sum(len(one.t_s) for one in series))
    channels = [one.channel for one in series]
    if len(set(channels)) != len(channels):
        twice = next(name for name in channels if channels.count(name) > 1)
        raise TelemetryRecordError(twice, "it is there twice")
    order = {moments: index for index, moments in enumerate({one.t_s: None for one in series})}
    columns_of = [_encode(one.values) for one in series]
    head = {
        "v": 1,
        "columns": [len(moments) for moments in order],
        "series": [
            [one.channel, one.unit, order[one.t_s], decimals]
            for one, (decimals, _) in zip(series, columns_of, strict=True)
        ],
    }
    times = (np.rint(np.asarray(moments) * _PER_SECOND).astype(_INTEGER) for moments in order)
    columns = [*(np.diff(moments, prepend=0) for moments in times), *(c for _, c in columns_of)]
    plain = json.dumps(head, separators=(",", ":")).encode() + b"\n"
    return zlib.compress(plain + b"".join(map(_transpose, columns)), 9)


def unpack(data: bytes) -> tuple[TelemetrySeries, ...]:
    """Decode a stored value."""
    text, _, body = _inflate(data).partition(b"\n")
    lengths, headers = _head(text)
    sizes = [*lengths, *(lengths[index] for _, _, index, _ in headers)]
    _check_amount(len(headers), sum(sizes[len(lengths) :]))
    if len(body) != _WIDTH * sum(sizes):
        _damaged(f"{len(body)} bytes of samples where {_WIDTH * sum(sizes)} were announced")
    ends = np.cumsum([0, *sizes]) * _WIDTH
    columns = [body[start:end] for start, end in pairwise(ends)]
    times = [
        tuple((np.cumsum(_restore(column, _INTEGER)) / _PER_SECOND).tolist())
        for column in columns[: len(lengths)]
    ]
    return tuple(
        TelemetrySeries(channel, unit, times[index], _decode(column, decimals))
        for (channel, unit, index, decimals), column in zip(
            headers, columns[len(lengths) :], strict=True
        )
    )


def _transpose(column: npt.NDArray[np.generic]) -> bytes:
    return column.view(np.uint8).reshape(len(column), _WIDTH).T.tobytes()


def _restore(data: bytes, kind: str) -> npt.NDArray[np.generic]:
    rows = np.frombuffer(data, np.uint8).reshape(_WIDTH, len(data) // _WIDTH)
    return rows.T.copy().view(kind).reshape(-1)


def _encode(values: Sequence[float | None]) -> tuple[int, npt.NDArray[np.generic]]:
    """Return the number of decimals and the integers; floats where none is exact."""
    floats = np.array(values, dtype=_FLOAT)  # NaN for None
    reals = floats[~np.isnan(floats)]
    for decimals in range(_MOST_DECIMALS + 1):
        scale = 10**decimals
        with np.errstate(over="ignore"):
            multiples = np.rint(reals * scale)
        if np.any(np.abs(multiples) > _LARGEST_INTEGER):
            break
        whole = multiples.astype(_INTEGER)
        if np.array_equal(whole / scale, reals) and not np.any(np.signbit(reals) & (whole == 0)):
            integers = np.full(len(floats), _NOTHING, dtype=_INTEGER)
            integers[~np.isnan(floats)] = whole
            return decimals, integers
    return _FLOATS, floats


def _decode(data: bytes, decimals: int) -> tuple[float | None, ...]:
    column = _restore(data, _FLOAT if decimals == _FLOATS else _INTEGER)
    if decimals == _FLOATS:
        gaps, values = np.isnan(column), column
    else:
        gaps, values = column == _NOTHING, column / 10**decimals
    return tuple(
        None if gone else value for gone, value in zip(gaps.tolist(), values.tolist(), strict=True)
    )


def _inflate(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, _LARGEST)
    except zlib.error as error:
        _damaged(str(error))
    if not inflater.eof or inflater.unused_data:
        _damaged("it is cut, too long, or followed by something else")
    return plain


def _head(text: bytes) -> tuple[list[int], list[Header]]:
    if len(text) > _LARGEST_HEAD:
        _damaged("its head is too long")
    try:
        head = json.loads(text)
        if head["v"] != 1:
            _damaged("a newer qnnfarm wrote it")
        lengths, headers = head["columns"], head["series"]
        plain = all(type(n) is int and 0 <= n <= MAX_SAMPLES for n in lengths) and all(
            type(channel) is str
            and type(unit) is str
            and type(index) is type(decimals) is int
            and index in range(len(lengths))
            and decimals in range(_FLOATS, _MOST_DECIMALS + 1)
            for channel, unit, index, decimals in headers
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TelemetryRecordError("*", f"its head cannot be read: {error}") from error
    if not plain:
        _damaged("its head holds what it cannot")
    return lengths, [tuple(one) for one in headers]


def _check_amount(series: int, samples: int) -> None:
    if series > MAX_SERIES or samples > MAX_SAMPLES:
        reason = f"{series} series with {samples} samples are more than one repetition may have"
        raise TelemetryRecordError("*", f"{reason}: {MAX_SERIES} with {MAX_SAMPLES}")


def _damaged(reason: str) -> NoReturn:
    raise TelemetryRecordError("*", f"what is stored is damaged: {reason}")
