"""Sizes and ages as people write them."""

import os
import re
from datetime import timedelta
from functools import cache

from pydantic import ByteSize, TypeAdapter

from buildlib.errors import InvalidOptionError

LIMIT_VARIABLE = "QNNFARM_CACHE_LIMIT"
_NUMBER_AND_UNIT = re.compile(r"\d+(\.\d+)?\s*[a-z]*", re.IGNORECASE)
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.IGNORECASE)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_size(text: str, option: str) -> int:
    """Read a size as pydantic's `ByteSize` does: `50GB`, `1.5 GiB`, `1000`; `5Gi` too.

    Raises:
        InvalidOptionError: it is not a size; names the option.
    """
    size = text.strip()
    try:
        if not _NUMBER_AND_UNIT.fullmatch(size):  # of more than that, ByteSize reads the beginning
            raise ValueError
        return _size_type().validate_python(f"{size}b" if size.lower().endswith("i") else size)
    except ValueError:
        reason = f"{text!r} is not a size such as 50GB or 512MiB"
        raise InvalidOptionError(option, reason, ()) from None


def parse_age(text: str, option: str) -> timedelta:
    """Return the time span of `30d`, `12h`, `90m`, `45s` or `2w`."""
    match = _AGE.fullmatch(text.strip())
    try:
        if match:
            return timedelta(**{_UNITS[match[2].lower()]: float(match[1])})
    except OverflowError:
        pass
    raise InvalidOptionError(option, f"{text!r} is not a time span such as 30d or 12h", ())


@cache
def _size_type() -> TypeAdapter[ByteSize]:
    return TypeAdapter(ByteSize)  # which takes 20 ms, and few commands need it


def default_limit() -> int | None:
    """Return the limit of `QNNFARM_CACHE_LIMIT` in bytes; `None` is no limit."""
    text = os.environ.get(LIMIT_VARIABLE)
    return parse_size(text, LIMIT_VARIABLE) if text else None


def size_text(size_bytes: int) -> str:
    """Format as `1.2 GB`: decimal units, as sizes are given to `parse_size`."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def age_text(seconds: float) -> str:
    """Format as `4 s`, `12 min`, `3 h` or `9 d`."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
