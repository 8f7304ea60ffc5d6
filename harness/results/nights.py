"""Nights and branches: the rules by which all runs of a database are put together over time.

A night holds the runs of one commit, on whichever hosts. It ends with a pause of twelve hours
without one, or eighteen hours after it began. Nights are those of the whole database, whichever of
its runs are looked at: a model that runs twice in a long night has one night, and `gate`, histories
and reports have the same ones.

Histories follow a branch forwards. What was measured off that line, as the steps of a bisection
are, stays out of them (`find_strays`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from harness.results.provenance import git_branch_history, git_default_branch
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


def find_strays(heads: Iterable[RunHead], main: str | None) -> frozenset[str]:
    """Find the runs that are off the line of their history's branch; returns their ids.

    Runs of other branches are no strays, they have histories of their own. A stray has no branch
    (detached HEAD), though an earlier or the same night of its subject has; or its commit is older
    than one of an earlier night. Git says so where the repository of the working folder has the
    commit on the branch; else a commit is older that comes again after another one.
    """
    subjects = defaultdict[str, list[RunHead]](list)
    for head in heads:
        subjects[head.subject].append(head)
    ages: dict[str | None, Mapping[str | None, int]] = {}
    strays = set[str]()
    for some in subjects.values():
        branch = choose_branch([head.branch for head in some], main)
        if branch not in ages:
            commits = git_branch_history(Path.cwd(), branch) if branch else ()
            ages[branch] = {commit: age for age, commit in enumerate(commits)}
        on_line = (head for head in some if head.commit and (head.branch or branch) == branch)
        strays |= _strays_of_subject(on_line, ages[branch])
    return frozenset(strays)


def _strays_of_subject(heads: Iterable[RunHead], ages: Mapping[str | None, int]) -> set[str]:
    strays, known, newest = set[str](), set[str | None](), None
    least_age, has_branch = len(ages), False
    for night in group_nights(heads):
        has_branch = has_branch or any(head.branch for head in night)
        on_branch = [head for head in night if head.branch or not has_branch]
        strays |= {head.id for head in night} - {head.id for head in on_branch}
        commit = night[0].commit
        age = ages.get(commit)
        if on_branch and (commit in known - {newest} if age is None else age > least_age):
            strays |= {head.id for head in on_branch}
        elif on_branch:
            known.add(commit)
            newest, least_age = commit, least_age if age is None else age
    return strays
