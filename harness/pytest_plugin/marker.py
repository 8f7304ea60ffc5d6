"""`@pytest.mark.device(...)`: a test's requirements of its devices."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from harness.devices.spec import device_types
from harness.pool.requirement import Requirement


class MarkerError(ValueError):
    """A marker with arguments that it does not take."""


def read_marker(item: pytest.Item) -> Requirement:
    """Merge the markers of a test, its class and its module.

    The closest one wins; tags add up.

    Raises:
        MarkerError: one of them is wrong.
    """
    values: dict[str, Any] = {}
    tags: frozenset[str] = frozenset()
    for mark in reversed(list(item.iter_markers("device"))):
        if mark.args:
            raise MarkerError(f"takes keywords only, not {mark.args[0]!r}")
        tags |= _tags(mark.kwargs.get("tags", ()))
        values |= _check(mark.kwargs)
    return Requirement(tags=tags, **values)


def check_marker(item: pytest.Item) -> None:
    """Check a test's markers when it is collected.

    Raises:
        pytest.Collector.CollectError: one line.
    """
    try:
        marker = read_marker(item)
    except MarkerError as error:
        raise pytest.Collector.CollectError(f"{item.name}: @pytest.mark.device {error}") from error
    names = getattr(item, "fixturenames", ())
    if marker.count > 1 and "device" in names:
        raise pytest.Collector.CollectError(
            f"{item.name}: @pytest.mark.device(count={marker.count}) gives `devices`, not `device`"
        )


def _check(keywords: Mapping[str, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for keyword, value in keywords.items():
        key = keyword
        match keyword:
            case "soc" | "hexagon" | "name":
                good = value is None or (isinstance(value, str) and bool(value))
                words = "a text"
            case "type":
                good = value is None or value in tuple(device_types())
                words = f"one of {', '.join(device_types())}"
            case "tags":
                continue  # they add up, and are read by themselves
            case "count":
                good, words = _is_whole(value, 1), "a whole number from 1"
            case "free_bytes":
                good, words = _is_whole(value, 0), "a whole number of bytes"
                key = "min_free_bytes"
            case _:
                names = "soc, hexagon, type, name, tags, free_bytes, count"
                raise MarkerError(f"does not know {keyword!r}: it knows {names}")
        if not good:
            raise MarkerError(f"{keyword} is {value!r}, not {words}")
        values[key] = value
    return values


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _tags(value: object) -> frozenset[str]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, Iterable):
        raise MarkerError(f"tags is {value!r}, not texts")
    tags = list(words)
    if not all(isinstance(tag, str) and tag for tag in tags):
        raise MarkerError(f"tags is {value!r}, not texts")
    return frozenset(tags)
