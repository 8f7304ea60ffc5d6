"""Values of JSON that other programs wrote."""

import math
from collections.abc import Mapping
from typing import Any

Entry = Mapping[str, Any]
UNREADABLE = (
    AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""Errors of a reader that meets something else than it expects."""


def number(value: object) -> float:
    """Return a finite number.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return float(value)


def is_scalar(value: object) -> bool:
    """Return whether a setting can be kept."""
    return isinstance(value, str | int | float | bool)


def reason_of(error: Exception) -> str:
    """Say why an entry cannot be read."""
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)
