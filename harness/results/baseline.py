"""Resolution of a baseline: which stored runs a branch, a commit, a date or `previous` means.

It gives points: nights, commits, or the span of a week, of days or of commits. Of several that a
reference could mean, each cell takes the first at which it has results. Nights and dates are those
of the main branch, which is also the base of other branches (`harness.results.nights`).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

from harness.errors import NotStoredError, WrongUseError
from harness.results.nights import find_main_branch, find_strays, group_nights
from harness.results.provenance import git_history
from harness.results.records import RunHead

PREVIOUS = "previous"
MOST_POINTS = 30
"""Nights or commits, newest first, among which cells look for results."""
_DAY = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_DATE = re.compile(rf"{_DAY}(?:[T ][0-9:]{{4,8}}(?:Z|[+-][0-9:]{{4,5}})?)?")
_WEEK = re.compile(r"[0-9]{4}-W[0-9]{2}")
_DAYS = re.compile(rf"({_DAY})\.\.({_DAY})")
_HEX = re.compile(r"[0-9a-f]{4,40}")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class BaselinePoint:
    """Runs that belong to one commit, one night, or one span of them.

    Attributes:
        heads: at least one.
    """

    heads: tuple[RunHead, ...]

    @property
    def runs(self) -> tuple[str, ...]:
        """Ids of the runs."""
        return tuple(head.id for head in self.heads)

    @property
    def began(self) -> datetime:
        """The beginning of the first run."""
        return min(head.created_at for head in self.heads)

    @property
    def ended(self) -> datetime:
        """The beginning of the last run."""
        return max(head.created_at for head in self.heads)

    @property
    def name(self) -> str:
        """The commits, newest first, with the day of the newest run."""
        newest_first = sorted(self.heads, key=lambda head: head.created_at, reverse=True)
        commits = list(dict.fromkeys(head.commit[:12] for head in newest_first if head.commit))
        more = [f"{len(commits) - _SHOWN} more"] if len(commits) > _SHOWN else []
        return ", ".join((*commits[:_SHOWN], *more, f"{self.ended:%Y-%m-%d}"))


def find_candidate(
    heads: Sequence[RunHead], reference: str, runs: Collection[str], location: str
) -> BaselinePoint:
    """Find the judged runs: the named ones, those of a reference, or else the newest night.

    Args:
        heads: of all runs of the store, oldest first.
    """
    if runs:
        ids = frozenset(runs)
        run_heads = [head for head in heads if head.id in ids]
        if not run_heads:
            raise NotStoredError(location, "results for these runs")
        return BaselinePoint(tuple(run_heads))
    newest = next(find_nights(heads), None)
    if newest is None:
        raise NotStoredError(
            location, f"results for {reference or 'the newest results'!r}: it has no runs"
        )
    if not reference:
        return newest
    return find_points(heads, reference, None, location)[0]


def find_points(
    heads: Sequence[RunHead], reference: str, judged: BaselinePoint | None, location: str
) -> list[BaselinePoint]:
    """Find the points that a reference means, the best one first, without the judged runs.

    Raises:
        NotStoredError: nothing that is stored is meant.
        WrongUseError: the reference is ambiguous or no reference.
    """
    if not reference or reference.startswith("-") or not reference.isprintable():
        raise WrongUseError(
            f"{reference[:40]!r} is no baseline: give previous, a date, a week, a branch, a commit "
            "or a range of days or commits"
        )
    main = find_main_branch(heads)
    others = heads
    if judged is not None:
        own = set(judged.runs)
        others = [head for head in heads if head.id not in own]
    points = list(islice(_resolve(others, reference, judged, main), MOST_POINTS))
    if not points:
        raise NotStoredError(location, f"results for {reference!r}: {_known(others)}")
    return points


def find_nights(heads: Iterable[RunHead]) -> Iterator[BaselinePoint]:
    """Group runs into nights, the one with the newest run first."""
    nights = [BaselinePoint(tuple(night)) for night in group_nights(heads)]
    return iter(sorted(nights, key=lambda night: night.ended, reverse=True))


def _resolve(
    heads: Sequence[RunHead], reference: str, judged: BaselinePoint | None, main: str | None
) -> Iterator[BaselinePoint]:
    strays = find_strays(heads, main)
    on_main = (head for head in heads if head.id not in strays)
    base = [head for head in on_main if not head.branch or head.branch == main] or heads
    if reference == PREVIOUS:
        base = base if judged is None else _reached(base, judged, main)
        nights = find_nights(base)
        yield from (night for night in nights if judged is None or night.ended < judged.began)
    elif _DATE.fullmatch(reference):
        end = _end_of(reference)
        yield from find_nights(head for head in base if head.created_at < end)
    elif span := _span_of(reference):
        within = tuple(head for head in base if span[0] <= head.created_at < span[1])
        yield from [BaselinePoint(within)] if within else []
    elif ".." in reference:
        yield from _commit_span(heads, base, reference)
    elif on_branch := [head for head in heads if head.branch == reference]:
        yield from _commits(reversed(on_branch))
    elif commit := _find_commit(heads, reference):
        yield BaselinePoint(tuple(head for head in heads if head.commit == commit))
    else:
        yield from _commits(_in_order(heads, git_history(Path.cwd(), reference)))


def _reached(base: Sequence[RunHead], judged: BaselinePoint, main: str | None) -> Sequence[RunHead]:
    """Leave out later commits of a branch's base, as far as git knows."""
    tip = judged.heads[-1]
    if not tip.commit or not tip.branch or tip.branch == main:
        return base
    reachable = set(git_history(Path.cwd(), tip.commit))
    return [head for head in base if head.commit in reachable] or base


def _span_of(reference: str) -> tuple[datetime, datetime] | None:
    """Return the beginning and the end of a week, `2026-W47`, or of days, `DATE..DATE`."""
    if _WEEK.fullmatch(reference):
        first = _moment(f"{reference}-1")
        return first, first + timedelta(days=7)
    days = _DAYS.fullmatch(reference)
    return (_moment(days[1]), _end_of(days[2])) if days else None


def _commit_span(
    heads: Sequence[RunHead], base: Sequence[RunHead], reference: str
) -> Iterator[BaselinePoint]:
    """Yield the commits after the first one until the second: those of git, else by time."""
    within = _in_order(heads, git_history(Path.cwd(), reference))
    first, _, last = (_find_commit(heads, name) for name in reference.partition(".."))
    if not within and first and last:
        ends = {c: max(h.created_at for h in heads if h.commit == c) for c in (first, last)}
        within = [h for h in base if ends[first] < h.created_at <= ends[last] and h.commit != first]
    if within:
        yield BaselinePoint(tuple(within))


def _find_commit(heads: Sequence[RunHead], beginning: str) -> str | None:
    if not _HEX.fullmatch(beginning.lower()):
        return None
    hashes = {head.commit for head in heads if head.commit}
    commits = sorted(commit for commit in hashes if commit.lower().startswith(beginning.lower()))
    if len(commits) > 1:
        names = ", ".join(commit[:12] for commit in commits[:_SHOWN])
        raise WrongUseError(f"{beginning} is the beginning of several commits: {names}")
    return commits[0] if commits else None


def _in_order(heads: Iterable[RunHead], commits: Iterable[str]) -> list[RunHead]:
    """Return the runs of commits in the order of these."""
    order = {commit: number for number, commit in enumerate(commits)}
    reachable = [head for head in heads if head.commit in order]
    return sorted(reachable, key=lambda head: order[str(head.commit)])


def _commits(heads: Iterable[RunHead]) -> Iterator[BaselinePoint]:
    """Yield a point for each commit, in the order of the runs."""
    by_commit: dict[str | None, list[RunHead]] = {}
    for head in heads:
        by_commit.setdefault(head.commit, []).append(head)
    yield from (BaselinePoint(tuple(group)) for group in by_commit.values())


def _end_of(date: str) -> datetime:
    """Return the moment that a date means: its end, if it names a day only."""
    return _moment(date) + timedelta(days=1 if len(date) == len("2026-11-20") else 0)


def _moment(date: str) -> datetime:
    try:
        moment = datetime.fromisoformat(date)
    except ValueError as error:
        raise WrongUseError(f"{date} is no date: give one as 2026-11-20") from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _known(heads: Sequence[RunHead]) -> str:
    """List the branches and nights of the store, for the error."""
    if not heads:
        return "all its runs are among those to judge"
    branches = sorted({head.branch for head in heads if head.branch})
    newest = [point.name for point, _ in zip(find_nights(heads), range(_SHOWN), strict=False)]
    words = f"the branches {', '.join(branches[:_SHOWN])} and " if branches else ""
    return f"it has {words}results of {'; '.join(newest)}"
