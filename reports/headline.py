"""Headline of a report: the verdict over everything, the first thing to read.

It is that of the alerts, whatever part of the histories a report shows, and that of `qnnfarm gate`
where a baseline was asked for. Only where something was judged and nothing is open, acknowledged or
suspected is it good. The page, its summary in a terminal and its JSON carry the same.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from harness.results.alerts import Alert, group_alerts
from harness.results.gate import Gate
from harness.results.gate_formats import cells_of, sides, summarize
from harness.results.history import describe_drifts
from harness.results.records import Run
from harness.results.stability import was_throttled
from harness.results.turnover import find_turnover
from harness.results.verdicts import Verdict
from harness.words import percent, pluralize, stand_in
from reports.changes import ShownChange
from reports.content import Results, Section
from reports.summary import group_by
from reports.text import listing

MOST_NAMED = 3
"""Regressions and the like that are named; the tables have all."""
RECENT = timedelta(hours=24)
"""A failure or a comparison this long before the newest run belongs to the verdict."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict over everything.

    Attributes:
        level: `bad`, `doubt`, `good`, or `none` where there is nothing to judge.
        lines: its reasons.
    """

    level: Literal["bad", "doubt", "good", "none"]
    words: str
    lines: tuple[str, ...]


def judge_page(results: Results, sections: Sequence[Section]) -> Headline:
    """Judge the results of a report."""
    changes = [change for section in sections for change in section.changes]
    worse = [alert for alert in results.alerts if alert.state == "open"]
    known_alerts = [alert for alert in results.alerts if alert.state == "acknowledged"]
    suspects = [one for one in changes if one.is_suspect]
    lost = list(_lost_comparisons(results, sections))
    wrong = [row for section in sections for row in section.rows if row.output == "doubtful"]
    recent = _recent(results)
    failures = [run for run in recent if run.status in {"failed", "interrupted"}]
    gate = results.gate
    lines = [*(_describe_gate(gate) if gate else ()), *_describe(worse), *lost[:MOST_NAMED]]
    lines += [f"Doubtful output: {row.name} on {row.subject.place}" for row in wrong[:MOST_NAMED]]
    lines += [*_others(changes), *_describe_suspects(suspects)]
    lines += _describe_throttled(recent)
    lines += describe_drifts(results.series)[:MOST_NAMED]
    lines += find_turnover(results.series)[:MOST_NAMED]
    parts = [f"Against {gate.reference}: {summarize(gate)}"] if gate else []
    counts = {
        "regression": len(group_alerts(worse)) + len(lost),
        "doubtful output": len(wrong),
        "acknowledged regression": len(group_alerts(known_alerts)),
        "suspected regression": _count_causes(suspects),
    }
    parts += [pluralize(number, noun) for noun, number in counts.items() if number]
    if failures:
        runs = "run" if len(failures) == 1 else "runs"
        parts.append(f"{len(failures)} recent {runs} without a result")
    words, reasons = listing(tuple(parts)), tuple(lines)
    verdict = gate.verdict if gate else None
    if worse or lost or wrong or verdict is Verdict.REGRESSED:
        return Headline("bad", words, reasons)
    if known_alerts or suspects or failures or verdict is Verdict.NO_VERDICT:
        return Headline("doubt", words, reasons)
    if gate is not None:
        return Headline("good", words, reasons)
    return _quiet(results, sections, changes, lines)


def _quiet(
    results: Results,
    sections: Sequence[Section],
    changes: Sequence[ShownChange],
    lines: Sequence[str],
) -> Headline:
    """Return the headline where nothing is wrong, or nothing could be judged."""
    judged = sum(one.status not in {Verdict.NO_VERDICT, "expected"} for one in changes)
    judged += sum(
        comparison.verdict is not Verdict.NO_VERDICT
        for section in sections
        for group in section.comparisons
        for _, comparison in group.metrics
    )
    if judged:
        words = f"Nothing regressed in {pluralize(judged, 'comparison')}"
        return Headline("good", words, tuple(lines))
    return Headline("none", "No verdict yet", (*lines, _explain(results, changes)))


def _explain(results: Results, changes: Sequence[ShownChange]) -> str:
    """Say why there is no verdict."""
    if not results.measured:
        return "There are no results yet."
    verdict = Verdict.NO_VERDICT
    reasons = Counter(one.note if one.verdict is verdict else one.status for one in changes)
    if reasons:
        counts = (f"{note} in {number} of {len(changes)}" for note, number in reasons.most_common())
        return f"Of the comparisons with earlier nights: {listing(tuple(counts))}."
    return "A verdict needs a past to compare with: some nights of the same, or a --baseline."


def _describe(alerts: Sequence[Alert]) -> Iterator[str]:
    """Yield the greatest losses with their alerts, those of one subject and night in one line."""
    greatest_first = sorted(alerts, key=lambda one: (-one.size, one.id))
    for _, alike in group_by(greatest_first, lambda one: (one.name, one.began_at))[:MOST_NAMED]:
        losses = ", ".join(f"{one.metric.label} {one.loss} (alert {one.id})" for one in alike)
        yield f"{alike[0].name}, since {alike[0].began_at:%Y-%m-%d}: {losses}"


def _describe_gate(gate: Gate) -> Iterator[str]:
    yield f"Judged: {sides(gate)}"
    telling = [cell for cell in gate.cells if cell.verdict is not Verdict.NO_DIFFERENCE]
    for cell in telling[:MOST_NAMED]:
        change = cells_of(cell)[2]
        where = f"{cell.name}{f' ({stand_in(cell.key.runtime)})' if cell.key.emulator else ''}"
        yield f"{cell.metric.label} of {where}: {change}, {cell.reason}"


def _others(changes: Sequence[ShownChange]) -> Iterator[str]:
    """Count the changes that are settled or for the better."""
    counts = Counter(one.status for one in changes)
    words = [f"{counts[one]} {one}" for one in ("expected", "fixed", "improved") if counts[one]]
    if words:
        yield f"Besides: {listing(tuple(words))}"


def _describe_suspects(suspects: Sequence[ShownChange]) -> Iterator[str]:
    for _, alike in group_by(suspects, lambda one: one.series.subject)[:MOST_NAMED]:
        losses = ", ".join(f"{one.series.metric.label} {percent(one.ratio - 1)}" for one in alike)
        name = alike[0].series.name
        yield f"{name}, last night only: {losses}; {alike[0].note}"


def _count_causes(suspects: Sequence[ShownChange]) -> int:
    """Count causes as `group_alerts` does: of one subject, or of one metric at one commit."""
    causes: list[set[object]] = []
    for one in suspects:
        signs = {one.series.subject, (one.series.metric.key, one.since.commit)}
        same = [cause for cause in causes if cause & signs]
        causes = [cause for cause in causes if cause not in same] + [signs.union(*same)]
    return len(causes)


def _lost_comparisons(results: Results, sections: Sequence[Section]) -> Iterator[str]:
    """Return recent comparisons in which B lost."""
    if not results.measured:
        return
    since = results.measured[-1].run.created_at - RECENT
    for section in sections:
        for group in section.comparisons:
            for metric, comparison in group.metrics:
                if comparison.verdict is Verdict.REGRESSED and group.runs[-1].created_at >= since:
                    models = " and ".join(group.models)
                    yield f"{metric.label} of {models}, compared: {comparison.reason}"


def _describe_throttled(runs: Sequence[Run]) -> Iterator[str]:
    """Name the devices that throttled, those that did most often first."""
    counts = Counter(run.device.serial for run in runs)
    throttled = Counter(run.device.serial for run in runs if was_throttled(run))
    for serial, number in throttled.most_common(MOST_NAMED):
        runs_of_it = pluralize(counts[serial], "run")
        yield f"{serial} throttled in {number} of {runs_of_it} of the last day"


def _recent(results: Results) -> list[Run]:
    """Return the runs of the last day."""
    runs = [one.run for one in results.measured]
    return [run for run in runs if run.created_at > runs[-1].created_at - RECENT]
