"""Nights and branches: the rules by which all runs of a database are put together over time.

A night holds the runs of one commit, on whichever hosts. It ends with a pause of twelve hours
without one, or eighteen hours after it began. Nights are those of the whole database, whichever of
its runs are looked at: a model that runs twice in a long night has one night, and `gate`, histories
and reports have the same ones.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from harness.results.provenance import git_default_branch
from harness.results.records import RunHead

PAUSE = timedelta(hours=12)
LONGEST = timedelta(hours=18)


def group_nights(heads: Iterable[RunHead]) -> list[list[RunHead]]:
    """Group runs into nights, in the order in which these began; runs are oldest first."""
    nights: list[list[RunHead]] = []
    newest: dict[str | None, list[RunHead]] = {}
    for head in sorted(heads, key=lambda head: (head.created_at, head.id)):
        night = newest.get(head.commit)
        if (
            night is None
            or head.created_at - night[-1].created_at >= PAUSE
            or head.created_at - night[0].created_at >= LONGEST
        ):
            night = newest[head.commit] = []
            nights.append(night)
        night.append(head)
    return nights


def find_main_branch(heads: Iterable[RunHead]) -> str | None:
    """Find the branch whose history counts, among those that runs have.

    It is the default branch of the repository around the working folder, else the most frequent
    one; None where no run has a branch.
    """
    counts = Counter(head.branch for head in heads if head.branch)
    if not counts:
        return None
    default = git_default_branch(Path.cwd())
    return default if default in counts else counts.most_common(1)[0][0]


def choose_branch(branches: Sequence[str | None], main: str | None) -> str | None:
    """Choose the branch of one history: the main one, or the most frequent where it has no run."""
    counts = Counter(branch for branch in branches if branch)
    return main if main in counts or not counts else counts.most_common(1)[0][0]
