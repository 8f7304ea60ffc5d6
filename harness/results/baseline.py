"""Resolution of a baseline: which stored runs a branch, a commit, a date or `previous` means.

Runs of one commit that began within twelve hours are a night (`harness.results.nights`). Of several
points that a reference could mean, each cell takes the first at which it has results.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from harness.errors import NoBaselineError, WrongUseError
from harness.results.nights import group_nights
from harness.results.provenance import git_history
from harness.results.records import RunHead

PREVIOUS = "previous"
MOST_POINTS = 30
"""Nights or commits, newest first, among which cells look for results."""
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ][0-9:]{4,8}(?:Z|[+-][0-9:]{4,5})?)?")
_HEX = re.compile(r"[0-9a-f]{4,40}")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Point:
    """Runs that belong to one commit, or to one night.

    Attributes:
        name: the commit with the day of its newest run.
    """

    name: str
    runs: tuple[str, ...]
    began: datetime
    ended: datetime

    @classmethod
    def of(cls, heads: Sequence[RunHead]) -> "Point":
        """Make it from at least one run."""
        moments = [head.created_at for head in heads]
        commits = tuple(dict.fromkeys(head.commit[:12] for head in heads if head.commit))
        name = ", ".join((*commits[:_SHOWN], f"{max(moments):%Y-%m-%d}"))
        return cls(name, tuple(head.id for head in heads), min(moments), max(moments))


def find_candidate(
    heads: Sequence[RunHead], reference: str, runs: Collection[str], location: str
) -> Point:
    """Find what is judged: the named runs, those of a reference, or else the newest night.

    Args:
        heads: of all runs of the store, oldest first.

    Raises:
        NoBaselineError: there is no such run.
    """
    if runs:
        chosen = [head for head in heads if head.id in set(runs)]
        if not chosen:
            raise NoBaselineError(location, "these runs", "it has none of them")
        return Point.of(chosen)
    newest = next(find_nights(heads), None)
    if newest is None:
        raise NoBaselineError(location, reference or "the newest results", "it has no runs")
    if not reference:
        return newest
    return find_points(heads, reference, None, location)[0]


def find_points(
    heads: Sequence[RunHead], reference: str, judged: Point | None, location: str
) -> list[Point]:
    """Find the points that a reference means, the best one first, without the judged runs.

    Raises:
        NoBaselineError: nothing that is stored is meant.
        WrongUseError: the reference is ambiguous or no reference.
    """
    if not reference or reference.startswith("-") or not reference.isprintable():
        raise WrongUseError(
            f"{reference[:40]!r} is no baseline: give previous, a date, a branch or a commit"
        )
    others = heads
    if judged is not None:
        own = set(judged.runs)
        others = [head for head in heads if head.id not in own]
    found = list(_limited(_resolve(others, reference, judged)))
    if not found:
        raise NoBaselineError(location, reference, _known(others))
    return found


def find_nights(heads: Iterable[RunHead]) -> Iterator[Point]:
    """Group runs into nights, newest first."""
    ordered = sorted(heads, key=lambda head: head.created_at)
    nights = group_nights(ordered, lambda head: head.created_at, lambda head: head.commit)
    # The newest run of a night comes first, as in the store's lists.
    return (Point.of(night[::-1]) for night in reversed(nights))


def _resolve(heads: Sequence[RunHead], reference: str, judged: Point | None) -> Iterator[Point]:
    if reference == PREVIOUS:
        before = judged.began if judged else None
        yield from find_nights(h for h in heads if before is None or h.created_at < before)
        return
    if _DATE.fullmatch(reference):
        end = _end_of(reference)
        yield from find_nights(h for h in heads if h.created_at < end)
        return
    on_branch = [head for head in heads if head.branch == reference]
    if on_branch:
        yield from _commits(reversed(on_branch))
        return
    if _HEX.fullmatch(reference.lower()):
        named = [h for h in heads if h.commit and h.commit.lower().startswith(reference.lower())]
        commits = {head.commit for head in named}
        if len(commits) > 1:
            listed = ", ".join(sorted(str(commit)[:12] for commit in commits)[:_SHOWN])
            raise WrongUseError(f"{reference} is the beginning of several commits: {listed}")
        if named:
            yield Point.of(named)
            return
    order = {commit: number for number, commit in enumerate(git_history(Path.cwd(), reference))}
    reachable = [head for head in heads if head.commit in order]
    yield from _commits(sorted(reachable, key=lambda head: order[str(head.commit)]))


def _commits(heads: Iterable[RunHead]) -> Iterator[Point]:
    """Yield a point for each commit, in the order of the runs."""
    grouped: dict[str | None, list[RunHead]] = {}
    for head in heads:
        grouped.setdefault(head.commit, []).append(head)
    yield from map(Point.of, grouped.values())


def _limited(points: Iterable[Point]) -> Iterator[Point]:
    for number, point in enumerate(points):
        if number >= MOST_POINTS:
            return
        yield point


def _end_of(date: str) -> datetime:
    """Return the moment that a date means: its end, if it names a day only."""
    try:
        moment = datetime.fromisoformat(date)
    except ValueError as error:
        raise WrongUseError(f"{date} is no date: give one as 2026-11-20") from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment + timedelta(days=1) if len(date) == len("2026-11-20") else moment


def _known(heads: Sequence[RunHead]) -> str:
    """Say what the store has instead, for the error."""
    if not heads:
        return "all its runs are among those to judge"
    branches = sorted({head.branch for head in heads if head.branch})
    newest = [point.name for point, _ in zip(find_nights(heads), range(_SHOWN), strict=False)]
    words = f"the branches {', '.join(branches[:_SHOWN])} and " if branches else ""
    return f"it has {words}results of {'; '.join(newest)}"
