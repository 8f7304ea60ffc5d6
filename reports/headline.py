"""Headline of a report: the verdict over everything, the first thing to read.

It is the one of `qnnfarm gate` where a baseline was asked for, and that of the histories and their
alerts elsewhere; the page, its summary in a terminal and its JSON carry the same.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from harness.results.gate import Gate
from harness.results.gate_formats import cells_of, sides, summarize
from harness.results.records import Run
from harness.results.verdicts import Verdict
from harness.words import pluralize
from reports.changes import Change
from reports.text import listing, percent

if TYPE_CHECKING:
    from reports.page import Results, Section

MOST_NAMED = 3
"""Regressions and the like that are named; the tables have all."""
RECENT = timedelta(hours=24)
"""A failure or a comparison this long before the newest run belongs to the verdict."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict over everything.

    Attributes:
        level: `bad`, `doubt`, `good`, or `none` where there is nothing to judge.
        lines: what it rests on.
    """

    level: Literal["bad", "doubt", "good", "none"]
    words: str
    lines: tuple[str, ...]


def judge_page(results: "Results", sections: "Sequence[Section]") -> Headline:
    """Judge the results of a report."""
    changes = [change for section in sections for change in section.changes]
    worse = [] if results.gate else [one for one in changes if one.is_regression]
    lost = list(_lost_comparisons(results, sections))
    wrong = [row for section in sections for row in section.rows if row.output == "doubtful"]
    failed = _recent_failures(results)
    regressed = len(worse) + len(lost)
    gate = _describe_gate(results.gate) if results.gate else ()
    lines = [*gate, *_describe(worse), *lost[:MOST_NAMED]]
    lines += [f"Doubtful output: {row.name} on {row.subject.place}" for row in wrong[:MOST_NAMED]]
    said = []
    if results.gate is not None:
        said.append(f"Against {results.gate.reference}: {summarize(results.gate)}")
    elif regressed:
        said.append(pluralize(regressed, "regression"))
    if wrong:
        said.append(pluralize(len(wrong), "doubtful output"))
    if failed:
        runs = "run" if len(failed) == 1 else "runs"
        said.append(f"{len(failed)} recent {runs} without a result")
    lines += () if results.gate else _others(changes)
    verdict = results.gate.verdict if results.gate else None
    if regressed or wrong or verdict is Verdict.REGRESSED:
        return Headline("bad", listing(tuple(said)), tuple(lines))
    if failed or verdict is Verdict.NO_VERDICT:
        return Headline("doubt", listing(tuple(said)), tuple(lines))
    if verdict is not None:
        return Headline("good", listing(tuple(said)), tuple(lines))
    return _quiet(results, sections, changes, lines)


def _quiet(
    results: "Results",
    sections: "Sequence[Section]",
    changes: Sequence[Change],
    lines: Sequence[str],
) -> Headline:
    """Return the headline where nothing is wrong: what was judged, or why nothing was."""
    judged = sum(one.verdict is not Verdict.NO_VERDICT for one in changes)
    judged += sum(
        found.verdict is not Verdict.NO_VERDICT
        for section in sections
        for group in section.comparisons
        for _, found in group.metrics
    )
    if judged:
        words = f"Nothing regressed in {pluralize(judged, 'comparison')}"
        return Headline("good", words, tuple(lines))
    why = (
        "A verdict needs a past to compare with: some nights of the same, or a --baseline."
        if results.measured
        else "There are no results yet."
    )
    return Headline("none", "No verdict yet", (*lines, why))


def _describe(changes: Sequence[Change]) -> Iterator[str]:
    """Yield the worst changes with their alerts, those of one subject and night in one line."""
    for alike in _grouped(changes, lambda one: (one.series.subject, one.since.at))[:MOST_NAMED]:
        since = f"{alike[0].since.at:%Y-%m-%d}"
        found = ", ".join(
            f"{one.series.metric.label} {percent(one.ratio - 1)}"
            + (f" (alert {one.alert.id})" if one.alert else "")
            for one in alike
        )
        yield f"{_name(alike[0])}, since {since}: {found}"


def _name(change: Change) -> str:
    return f"{change.series.title}{' (emulator)' if change.series.emulator else ''}"


def _grouped(changes: Iterable[Change], key: Callable[[Change], Hashable]) -> list[list[Change]]:
    found: dict[Hashable, list[Change]] = {}
    for one in changes:
        found.setdefault(key(one), []).append(one)
    return list(found.values())


def _describe_gate(gate: Gate) -> Iterator[str]:
    yield f"Judged: {sides(gate)}"
    told = [cell for cell in gate.cells if cell.verdict is not Verdict.NO_DIFFERENCE]
    for cell in told[:MOST_NAMED]:
        change = cells_of(cell)[2]
        where = f"{cell.name}{' (emulator)' if cell.key.emulator else ''}"
        yield f"{cell.metric.label} of {where}: {change}, {cell.reason}"


def _others(changes: Sequence[Change]) -> Iterator[str]:
    """Yield changes that are no regression, but worth a look."""
    counts = {
        state: sum(one.status == state for one in changes)
        for state in ("acknowledged", "expected", "fixed", "improved")
    }
    words = [f"{number} {state}" for state, number in counts.items() if number]
    if words:
        yield f"Besides: {listing(tuple(words))}"
    suspects = [one for one in changes if one.is_suspect]
    for alike in _grouped(suspects, lambda one: one.series.subject)[:MOST_NAMED]:
        found = ", ".join(f"{one.series.metric.label} {percent(one.ratio - 1)}" for one in alike)
        yield f"{_name(alike[0])}, last night only: {found}; the next night will tell"


def _lost_comparisons(results: "Results", sections: "Sequence[Section]") -> Iterator[str]:
    """Return recent comparisons in which B lost."""
    if not results.measured:
        return
    since = results.measured[-1].run.created_at - RECENT
    for section in sections:
        for group in section.comparisons:
            for metric, found in group.metrics:
                if found.verdict is Verdict.REGRESSED and group.runs[-1].created_at >= since:
                    models = " and ".join(group.models)
                    yield f"{metric.label} of {models}, compared: {found.reason}"


def _recent_failures(results: "Results") -> list[Run]:
    if not results.measured:
        return []
    newest = results.measured[-1].run.created_at
    return [
        run
        for run in results.gaps
        if run.created_at > newest - RECENT and run.status in {"failed", "interrupted"}
    ]
