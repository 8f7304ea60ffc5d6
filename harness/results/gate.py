"""Gate: new results against a baseline in the same store, each cell with a verdict.

The two sides did not take turns, so nothing falls out by itself as it does in
`harness.results.comparison`; `harness.results.statistics.unpaired` estimates the change. Of the
changes that a gate reports over all its cells, at most 5 % are expected to be none.
"""

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.results.alerts import UNSETTLED, Alert, by_series
from harness.results.baseline import BaselinePoint, find_candidate, find_points
from harness.results.identity import (
    Subject,
    container_label,
    container_name,
    describe_changes,
    with_values,
)
from harness.results.metrics import GATE_METRICS, Metric, Use, find_metric
from harness.results.records import Run
from harness.results.statistics.unpaired import MIN_SESSIONS, Sessions, estimate, find_discoveries
from harness.results.store import ResultsStore
from harness.results.verdicts import PERPLEXITY_THRESHOLD, THRESHOLD, Verdict, judge, worst_verdict
from harness.words import emulator_notice, percent, pluralize, soc_label

FALSE_DISCOVERY_RATE = 0.05
ACROSS = ("precision", "container", "device", "host", "tool", "scored")
"""Fields of a `Subject` in which both sides of a cell may differ where a user asks for it."""


@dataclass(frozen=True, slots=True)
class Side:
    """The sessions of one side of a cell.

    Attributes:
        point: the commit and time that they are of.
        mean: of the sessions' means.
    """

    point: str
    mean: float
    sessions: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GateCell:
    """One metric of one cell.

    Attributes:
        name: of the cell, for people.
        ratio: new over baseline; None where they could not be compared.
        low, high: the interval around it; None for a perplexity, which has no noise.
        p_value: two-sided, of no change, before the adjustment; None without an interval.
        reason: the verdict in words.
        runs: ids of the new runs.
        changed: facts that changed with them, which the reason names: versions, settings.
        alerts: unsettled losses of its history that began after the baseline; the reason names
            them.
        device: the serial of the device that the change is of, where the others did not change so.
    """

    key: Subject
    name: str
    metric: Metric
    verdict: Verdict
    reason: str
    baseline: Side | None = None
    candidate: Side | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    runs: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """The verdict over new results.

    Attributes:
        reference: the baseline as the user named it.
        candidate: the judged results, in words.
        new: names of the cells that have no baseline, and so no verdict.
        alerts: unsettled losses in the histories of the cells, whenever they began.
    """

    reference: str
    candidate: str
    threshold: float
    perplexity_threshold: float
    cells: tuple[GateCell, ...]
    new: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst of the cells' verdicts; improved only where nothing is uncertain."""
        return worst_verdict(cell.verdict for cell in self.cells)

    @property
    def has_emulator(self) -> bool:
        """True where any cell ran on the emulator."""
        return any(cell.key.emulator for cell in self.cells)

    @property
    def notice(self) -> str:
        """Warning about the speed of its virtual devices, where it has any."""
        return emulator_notice(cell.key.runtime for cell in self.cells if cell.key.emulator)


@dataclass(frozen=True, slots=True)
class GateOptions:
    """Options by which a gate judges.

    Attributes:
        across: fields of `Subject` that may differ.
        plan: only the runs of this plan, on both sides; empty for all runs.
    """

    metrics: Sequence[str] = GATE_METRICS
    threshold: float = THRESHOLD
    perplexity_threshold: float = PERPLEXITY_THRESHOLD
    across: Collection[str] = ()
    plan: str = ""


_DEFAULTS = GateOptions()


@dataclass(frozen=True, slots=True)
class _Group:
    """The runs of one cell at one point."""

    point: str
    runs: tuple[Run, ...]

    def sessions(self, metric: str) -> list[tuple[str, float]]:
        """Serial and mean of each session that has the metric."""
        done = [run for run in self.runs if run.status == "done" and run.values(metric)]
        return [(run.device.serial, statistics.fmean(run.values(metric))) for run in done]

    def side(self, metric: str) -> Side | None:
        sessions = self.sessions(metric)
        if not sessions:
            return None
        mean = statistics.fmean(mean for _, mean in sessions)
        serials = tuple(dict.fromkeys(serial for serial, _ in sessions))
        return Side(self.point, mean, len(sessions), serials)


_Groups = dict[Subject, _Group]


def judge_gate(
    store: ResultsStore,
    reference: str,
    *,
    candidate: str = "",
    runs: Collection[str] = (),
    options: GateOptions = _DEFAULTS,
    alerts: Iterable[Alert] = (),
) -> Gate:
    """Judge results against a baseline.

    Args:
        reference: the baseline: `previous`, a date, a branch, a commit or git's name of one.
        candidate: the judged results, named likewise; by default the newest.
        runs: ids of the runs that are judged, instead of a candidate.
        alerts: of the histories. A metric also regressed where its history has an open loss that
            began between the two sides on their branch.

    Raises:
        NotStoredError: the store has no results of either.
        WrongUseError: a reference is none.
    """
    heads = store.heads(options.plan)
    judged = find_candidate(heads, candidate, runs, store.location)
    points = find_points(heads, reference, judged, store.location)
    new = _read(store, judged, options)
    judged_subjects = {Subject.of(group.runs[-1]).id for group in new.values()}
    unsettled = [
        alert for alert in alerts if alert.state in UNSETTLED and alert.subject in judged_subjects
    ]
    of_series = by_series(unsettled)
    old = [_read(store, point, options) for point in points]
    cells, fresh = list[GateCell](), list[str]()
    for key, group in new.items():
        name = _name(group)
        before = next((found for groups in old if (found := _done(groups, key))), None)
        if before is not None:
            cells += _judge_cell(key, name, before, group, options, of_series)
        elif (why := _why_apart(key, old, new)) and _metrics(group, group, options):
            cells += (
                GateCell(key, name, metric, Verdict.NO_VERDICT, why, None, group.side(metric.key))
                for metric in _metrics(group, group, options)
            )
        elif _metrics(group, group, options):
            fresh.append(name)
    cells += _missing(new, old, options)
    return Gate(
        reference,
        judged.name,
        options.threshold,
        options.perplexity_threshold,
        tuple(sorted(map(_with_facts, _adjusted(cells, options)), key=_worst_first)),
        tuple(dict.fromkeys(fresh)),
        tuple(unsettled),
    )


def _read(store: ResultsStore, point: BaselinePoint, options: GateOptions) -> _Groups:
    by_subject: dict[Subject, list[Run]] = {}
    for run in store.get_runs(point.runs):
        by_subject.setdefault(Subject.of(run).without(options.across), []).append(run)
    return {key: _Group(point.name, tuple(runs)) for key, runs in by_subject.items()}


def _done(groups: _Groups, key: Subject) -> _Group | None:
    group = groups.get(key)
    return group if group and any(run.status == "done" for run in group.runs) else None


def _why_apart(key: Subject, old: Sequence[_Groups], new: _Groups) -> str:
    """Name the differences from the same cell of the baseline, if that is not compared."""
    alike = key.without(ACROSS)
    for groups in old:
        others = [k for k in groups if k.without(ACROSS) == alike and k not in new]
        others = [other for other in others if _done(groups, other)]
        if others:
            nearest = min((key.differences(other) for other in others), key=len)
            differences = [
                with_values(name, f"{theirs or 'none'} before, {mine or 'none'} now")
                for name, (mine, theirs) in nearest.items()
            ]
            return f"not comparable, it differs in {', '.join(differences)}"
    return ""


def _metrics(before: _Group, after: _Group, options: GateOptions) -> list[Metric]:
    """Return the judged metrics that either side has."""
    return [
        find_metric(key) for key in options.metrics if before.sessions(key) or after.sessions(key)
    ]


def _judge_cell(
    key: Subject,
    name: str,
    before: _Group,
    after: _Group,
    options: GateOptions,
    alerts: Mapping[str, Sequence[Alert]],
) -> list[GateCell]:
    wrong = [run for run in after.runs if run.check.outcome == "failed"]
    ids = tuple(run.id for run in after.runs)
    changes = describe_changes(before.runs, after.runs, ignored={"container"})
    cells = []
    for metric in _metrics(before, after, options):
        cell = GateCell(
            key,
            name,
            metric,
            Verdict.NO_VERDICT,
            "",
            before.side(metric.key),
            after.side(metric.key),
            runs=ids,
            changed=changes,
            alerts=tuple(_between(before, after, metric, alerts)),
        )
        if wrong:
            reason = f"the output is wrong: {wrong[-1].check.reason}"
            cells.append(replace(cell, verdict=Verdict.REGRESSED, reason=reason))
        elif cell.candidate is None:
            errors = [run.error or run.status for run in after.runs if run.status != "done"]
            reason = f"no result: {errors[-1]}" if errors else f"{metric.label} was not measured"
            cells.append(replace(cell, reason=reason))
        elif cell.baseline is None:
            cells.append(replace(cell, reason=f"{metric.label} is not in the baseline"))
        elif Use.EXACT in metric.use:
            ratio = cell.candidate.mean / cell.baseline.mean
            limit = options.perplexity_threshold
            verdict, reason = judge(metric, ratio, ratio, ratio, limit, by_chance=False)
            cells.append(replace(cell, verdict=verdict, ratio=ratio, reason=reason))
        else:
            cells.append(_estimate(cell, before.sessions(metric.key), after.sessions(metric.key)))
    return cells


def _estimate(cell: GateCell, before: Sessions, after: Sessions) -> GateCell:
    change = estimate(before, after)
    if change is None:
        return replace(cell, reason="no device has measured both sides")
    reason = ""
    if len(change.by_device) > 1:
        words = (f"{device} {percent(ratio - 1)}" for device, ratio in change.by_device.items())
        reason = f"by device: {', '.join(words)}"
    if change.p_value is None:
        old, new = change.sessions
        reason = (
            f"{pluralize(new, 'session')} against {old}, and a verdict needs "
            f"{MIN_SESSIONS} of each side on the same devices"
        )
    return replace(
        cell, reason=reason, ratio=change.ratio, low=change.low, high=change.high,
        p_value=change.p_value, device=change.device,
    )  # fmt: skip


def _adjusted(cells: Sequence[GateCell], options: GateOptions) -> list[GateCell]:
    """Judge the estimates, all of them together."""
    p_values = [cell.p_value for cell in cells if cell.p_value is not None]
    is_change = iter(find_discoveries(p_values, FALSE_DISCOVERY_RATE))
    return [
        cell if cell.p_value is None else _judge(cell, options.threshold, is_change=next(is_change))
        for cell in cells
    ]


def _judge(cell: GateCell, threshold: float, *, is_change: bool) -> GateCell:
    if cell.ratio is None or cell.low is None or cell.high is None:
        raise AssertionError("an estimate has an interval")
    verdict, reason = judge(
        cell.metric, cell.ratio, cell.low, cell.high, threshold, by_chance=not is_change
    )
    if verdict is Verdict.NO_VERDICT and cell.reason:
        reason = f"{reason}; {cell.reason}"
    if cell.device is not None:
        reason = f"{cell.device} alone, the other devices changed otherwise: {reason}"
    return replace(cell, verdict=verdict, reason=reason)


def _between(
    before: _Group, after: _Group, metric: Metric, alerts: Mapping[str, Sequence[Alert]]
) -> Iterator[Alert]:
    """Yield the losses of a history that began between two sides of one branch."""
    newest = after.runs[-1]
    if before.runs[-1].provenance.git_branch != newest.provenance.git_branch:
        return
    began = max(run.created_at for run in before.runs)
    for alert in alerts.get(f"{Subject.of(newest).id}-{metric.key}", ()):
        if began < alert.began_at <= newest.created_at:
            yield alert


def _with_facts(cell: GateCell) -> GateCell:
    """Complete a verdict by the alerts of the history and the other changes."""
    is_open = any(alert.state == "open" for alert in cell.alerts)
    verdict = cell.verdict
    if is_open and verdict is not Verdict.IMPROVED:
        verdict = Verdict.REGRESSED
    # What was missing for a verdict of its own says nothing beside that of the history.
    reasons = [] if is_open and cell.verdict is Verdict.NO_VERDICT else [cell.reason]
    for alert in cell.alerts:
        scope = f" of {alert.scope}" if alert.scope else ""
        loss = f"{alert.loss}{scope} since {alert.began_at:%Y-%m-%d}"
        reasons.insert(0, f"{alert.state} alert {alert.id}: {loss}")
    if cell.changed:
        reasons.append(f"what else changed: {', '.join(cell.changed)}")
    return replace(cell, verdict=verdict, reason="; ".join(reasons))


def _missing(new: _Groups, old: Sequence[_Groups], options: GateOptions) -> list[GateCell]:
    """Return the cells that the best point of the baseline has, and the new results have not."""
    cells = []
    for key, group in old[0].items():
        if key in new or _why_apart(key, [new], {}):
            continue
        cells += [
            GateCell(
                key,
                _name(group),
                metric,
                Verdict.NO_VERDICT,
                "the baseline has it, the new results have not",
                group.side(metric.key),
            )
            for metric in _metrics(group, group, options)
        ]
    return cells


def _name(group: _Group) -> str:
    newest = group.runs[-1]
    subject = Subject.of(newest)
    own = " ".join(f"{name}={value}" for name, value in subject.labels)
    container = (container_label(newest.label), container_name(newest.container))
    words = (*container, subject.by, own, subject.label)
    place = soc_label(subject.place, emulator=subject.emulator, runtime=subject.runtime)
    return f"{' '.join(filter(None, words))} on {place}"


_ORDER = (Verdict.REGRESSED, Verdict.NO_VERDICT, Verdict.IMPROVED, Verdict.NO_DIFFERENCE)


def _worst_first(cell: GateCell) -> tuple[int, float, str]:
    distance = 0.0 if cell.ratio is None else -abs(cell.ratio - 1)
    return _ORDER.index(cell.verdict), distance, cell.name
