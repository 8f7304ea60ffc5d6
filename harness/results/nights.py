"""Nights: the one rule by which runs are put together over time."""

from collections.abc import Callable, Hashable, Iterable
from datetime import datetime, timedelta
from typing import TypeVar

NIGHT = timedelta(hours=12)
Item = TypeVar("Item")


def group_nights(
    items: Iterable[Item], at: Callable[[Item], datetime], same: Callable[[Item], Hashable]
) -> list[list[Item]]:
    """Group items into nights: what is the same, and began within twelve hours of the first.

    Args:
        items: oldest first.
        at: when an item began.
        same: its commit, or what else must not change within a night.
    """
    nights: list[list[Item]] = []
    began, kept = None, None
    for item in items:
        moment, mark = at(item), same(item)
        if began is None or mark != kept or moment - began >= NIGHT:
            nights.append([])
            began, kept = moment, mark
        nights[-1].append(item)
    return nights
