"""Turnover of histories: subjects that are not measured any more, and those that are new.

A history that ends has no loss to tell, so its end is told.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from harness.results.history import Series
from harness.results.identity import Subject
from harness.results.nights import LONGEST

NEWS = timedelta(days=14)
"""Time for which an end or a beginning is news."""
_MISSED = timedelta(hours=36)
"""Pause of a nightly subject after which it has missed a night."""
_MIN_NIGHTS = 3
"""Nights of what is measured regularly."""
_MOST_DIFFERENCES = 2
"""Fields in which a successor may differ: as in its precision."""


@dataclass(frozen=True, slots=True)
class _Life:
    """First and last night of a subject, and their number."""

    subject: Subject
    name: str
    first: datetime
    last: datetime
    nights: int

    @classmethod
    def of(cls, series: Sequence[Series]) -> "_Life":
        ends = [(one.nights[0].at, one.nights[-1].at, len(one.nights)) for one in series]
        first, last, nights = zip(*ends, strict=True)
        newest = series[0].newest
        return cls(Subject.of(newest), series[0].name, min(first), max(last), max(nights))

    def is_over(self, newest: datetime) -> bool:
        """Return whether it has missed two of its usual nights."""
        usual = (self.last - self.first) / max(self.nights - 1, 1)
        return newest - self.last > max(_MISSED, 2 * usual)


def find_turnover(series: Iterable[Series], newest: datetime | None = None) -> tuple[str, ...]:
    """Say which subjects have ended or begun of late, newest first.

    A subject ends where it has missed two of its usual nights, or one as another began that differs
    from it in little: in its precision, say.

    Args:
        newest: time of the newest run of the store; by default of these series.
    """
    subjects: dict[str, list[Series]] = {}
    for each in series:
        subjects.setdefault(each.subject, []).append(each)
    lives = [_Life.of(group) for group in subjects.values()]
    regular = [one for one in lives if one.nights >= _MIN_NIGHTS]
    newest = newest or max((one.last for one in lives), default=None)
    if newest is None or not regular:
        return ()
    oldest = min(one.first for one in regular)
    starts = [one for one in lives if one.first > max(newest - NEWS, oldest + _MISSED)]
    news: list[tuple[datetime, str]] = []
    for one in regular:
        if newest - one.last > NEWS:
            continue
        successor, words = _find_successor(one, starts)
        if successor is not None:
            starts.remove(successor)
        if successor is not None or one.is_over(newest):
            news.append((one.last, f"{one.name}: no results since {one.last:%Y-%m-%d}{words}"))
    for group in subjects.values():
        for night, words in group[0].swaps.items():
            at = group[0].nights[night].at
            if newest - at <= NEWS:
                text = f"{group[0].name}: since {at:%Y-%m-%d} on {words}, whose level is its own"
                news.append((at, text))
    news += [(one.first, f"{one.name}: first results on {one.first:%Y-%m-%d}") for one in starts]
    return tuple(text for _, text in sorted(news, reverse=True))


def _find_successor(life: _Life, begun: Sequence[_Life]) -> tuple[_Life | None, str]:
    """Return the successor of a subject that ended, and its differences in words."""
    near = [
        (one, differences)
        for one in begun
        for differences in [life.subject.differences(one.subject)]
        if one.first - life.last >= LONGEST and len(differences) <= _MOST_DIFFERENCES
    ]
    if not near:
        return None, ""
    one, fields = min(near, key=lambda pair: (len(pair[1]), pair[0].first))
    changes = [f"{name} {old or 'none'} → {new or 'none'}" for name, (old, new) in fields.items()]
    return one, f"; since {one.first:%Y-%m-%d} with {', '.join(changes)}"
