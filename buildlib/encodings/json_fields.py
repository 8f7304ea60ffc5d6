"""Typed access to fields of encodings in JSON.

Arrays are checked as arrays, so a million scales cost no more than reading them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from buildlib.encodings.model import Encoding
from buildlib.validation import first_fault

Json = dict[str, Any]
Plain = TypeVar("Plain", str, int, dict[str, Any], list[Any])

_SHOWN = 60
_LARGEST_INT = 1 << 40


class MalformedError(ValueError):
    """A file violates its format; the text says how, in one line."""


def shown(value: object) -> str:
    """Return a value of the file as a short line for a message."""
    text = str(value)[: _SHOWN + 1] if isinstance(value, str) else repr(value)[: _SHOWN + 1]
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def field(entry: Json, key: str, kind: type[Plain]) -> Plain:
    """Return the value of a required key."""
    value = entry.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MalformedError(f"{key} is {shown(value)}")
    return value


def optional(entry: Json, key: str, kind: type[Plain]) -> Plain | None:
    """Return the value of a key that may be missing or null."""
    return None if entry.get(key) is None else field(entry, key, kind)


def boolean(entry: Json, key: str) -> bool:
    """Return a boolean, which format 0.6.1 writes as a string; missing is False."""
    value = entry.get(key, False)
    values = {True: True, False: False, "True": True, "False": False, "true": True, "false": False}
    if not isinstance(value, bool | str) or value not in values:
        raise MalformedError(f"{key} is {shown(value)}")
    return values[value]


def floats(entry: Json, key: str) -> npt.NDArray[np.float64]:
    """Return a number, or numbers nested to any depth, as an array."""
    return _numbers(entry, key).astype(np.float64)


def integers(entry: Json, key: str) -> npt.NDArray[np.int64]:
    """Return integers as an array; 3.0 counts as an integer."""
    array = _numbers(entry, key)
    if array.size and not (np.abs(array) < _LARGEST_INT).all():
        raise MalformedError(f"{key} holds a number out of range")
    whole = array.astype(np.int64)
    if array.dtype.kind == "f" and not (whole == array).all():
        raise MalformedError(f"{key} holds a fraction, which no grid here has")
    return whole


def flat(array: npt.NDArray[Any]) -> tuple[Any, ...]:
    """Return the numbers of an array in their order."""
    return tuple(array.reshape(-1).tolist())


def small_integers(entry: Json, key: str) -> npt.NDArray[np.uint8]:
    """Return integers of [1, 255] as an array."""
    array = integers(entry, key)
    if array.size and not (array.min() >= 1 and array.max() <= 255):
        raise MalformedError(f"{key} holds a number outside 1 to 255")
    return array.astype(np.uint8)


def _numbers(entry: Json, key: str) -> npt.NDArray[Any]:
    value = entry.get(key)
    try:
        array = np.array(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise MalformedError(f"{key} is no array of numbers") from error
    if array.dtype.kind not in "iuf":
        raise MalformedError(f"{key} is {shown(value)}")
    if array.size == 0:
        raise MalformedError(f"{key} is empty")
    return array


def read_entry(entry: object, grid: Callable[[Json], Json]) -> Encoding:
    """Read one encoding of a list; `grid` reads everything except the name."""
    if not isinstance(entry, dict):
        raise MalformedError(f"an encoding is {shown(entry)}")
    return make_encoding(field(entry, "name", str), lambda: grid(entry))


def make_encoding(name: str, grid: Callable[[], Json]) -> Encoding:
    """Make the encoding of a tensor; errors name the tensor."""
    try:
        return Encoding(name=name, **grid())
    except ValidationError as error:
        fault = first_fault(error)
        where = f"{fault.key}: " if fault.key else ""
        raise MalformedError(f"{shown(name)}: {where}{fault.reason}") from error
    except MalformedError as error:
        raise MalformedError(f"{shown(name)}: {error}") from error
