"""Summary: a row for each container x device x workload, with remarks on its numbers."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Literal, TypeVar

from harness.results.derived import find_bandwidth_share
from harness.results.identity import (
    OF_DEVICE,
    Subject,
    container_name,
    container_shape,
    describe_changes,
)
from harness.results.metrics import (
    LEADING_METRICS,
    METRICS,
    SPEED_METRICS,
    STEP_METRICS,
    TASK_METRICS,
    Direction,
    Metric,
    Stats,
    Use,
    find_metric,
    remark_on,
)
from harness.results.metrics import summarise as summarise_sessions
from harness.results.perplexity import (
    PERPLEXITY,
    PERPLEXITY_ERROR,
    REFERENCES,
    describe_scored,
    deviation,
    find_perplexity_faults,
    matches_references,
)
from harness.results.records import ContainerInfo, Run
from harness.results.stability import Stability, grade_runs
from harness.words import percent, pluralize

_APART = 4.0
"""Standard errors between the fastest and the slowest device from which they differ."""
ACCEPTED = "token_acceptance_rate"
MOST_LABELS = 3
"""Labels of cells that a row shows."""

Output = Literal["checked", "unchecked", "doubtful"]
Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
UNCHECKED = (
    "Unchecked: the output was compared neither with reference tokens nor by a perplexity near its "
    "host reference"
)
UNCOMPARED = "Unchecked: the embeddings were not compared with those of the model in float"


@dataclass(frozen=True, slots=True)
class ShownFigure:
    """One figure of a row, as every format prints it.

    Attributes:
        value: in the metric's unit.
        text: in the unit that people read, without naming it.
        spread: of a speed its standard deviation, of a score its standard error, if known.
        note: the text that a perplexity is over, or how far the device is from a reference.
        n: repetitions.
    """

    value: float
    text: str
    spread: str
    note: str
    n: int

    def __str__(self) -> str:
        return f"{self.text} ± {self.spread}" if self.spread else self.text


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One container on one kind of device, with all that was measured of it.

    Attributes:
        label: the workload, or the task; empty where only perplexity was measured.
        runs: the runs behind the speeds; where there are none, those behind the scores.
        cells: statistics by metric: of speeds, with the perplexity that tells most, or of a task.
        remarks: reasons not to trust the row, in words.
        scored: of the perplexity.
        stability: the grades of speeds.
        output: whether the output was found correct; rows without that are ranked below.
        runtime: of the runs, where rows are of several.
    """

    subject: Subject
    label: str
    runs: tuple[Run, ...]
    cells: Mapping[str, Stats]
    remarks: tuple[str, ...] = ()
    scored: Subject | None = None
    stability: Mapping[str, Stability] = field(default_factory=dict)
    output: Output = "unchecked"
    runtime: str = ""

    @property
    def container(self) -> ContainerInfo:
        """The container that ran."""
        return self.runs[-1].container

    @property
    def name(self) -> str:
        """Model and precision, by which readers know a container."""
        return container_name(self.container)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes that tell the row from others: runtime, labels, sessions that ran at once."""
        result = [by] if (by := self.runtime or self.subject.by) else []
        result += [f"{key}={value}" for key, value in self.runs[0].labels.items()]
        names = dict.fromkeys(run.label.partition("#")[0] for run in self.runs if run.label)
        result += list(names)[:MOST_LABELS]
        if len(names) > MOST_LABELS:
            result.append(f"and {len(names) - MOST_LABELS} more")
        counts = [run.concurrent_sessions or 1 for run in self.runs]
        if max(counts) > 1:
            few = f"{min(counts)} to " if min(counts) < max(counts) else ""
            result.append(f"{few}{max(counts)} sessions at once")
        return tuple(result)

    @property
    def doubt(self) -> str:
        """Warning about its output; empty if it is checked, or another tool's."""
        is_worth_telling = self.n and self.output != "checked" and not self.subject.is_imported
        return f"output {self.output}" if is_worth_telling else ""

    @property
    def bandwidth_share(self) -> float | None:
        """Part of its SoC's memory bandwidth that decoding takes; None of the emulator."""
        decode, accepted = (self.cells.get(key) for key in ("decode_tokens_per_s", ACCEPTED))
        if decode is None or self.subject.emulator:
            return None
        steps = decode.mean / (accepted.mean if accepted else 1.0)
        return find_bandwidth_share(steps, self.container, self.subject.soc)

    @property
    def values(self) -> Mapping[str, float]:
        """The means by metric."""
        return {key: cell.mean for key, cell in self.cells.items()}

    def show(self, key: str) -> ShownFigure | None:
        """Return the figure of a metric as readers get it; None without one."""
        cell = self.cells.get(key)
        if cell is None:
            return None
        metric, error = find_metric(key), self.cells.get(f"{key}_error")
        spread = cell.show_spread(metric) if Use.SPEED in metric.use else ""
        if error is not None:
            spread = metric.format(error.mean, beside=cell.mean)
        away = deviation(self.values, key) if key in REFERENCES else None
        note = "" if away is None else f"device {percent(away)}"
        if key == PERPLEXITY and self.scored and self.scored.scored:
            note = describe_scored(self.scored.scored)
        return ShownFigure(cell.mean, metric.format(cell.mean), spread, note, cell.n)

    @property
    def n(self) -> int:
        """Repetitions behind the speeds."""
        return max((cell.n for cell in self._speeds), default=0)

    @property
    def units(self) -> int:
        """Sessions behind the speeds, or the repetitions of a single one, whose spread is shown."""
        return max((cell.units for cell in self._speeds), default=0)

    @property
    def grade(self) -> str:
        """Stability: the worst grade of its rates, of which an unknown one is the worst.

        It is empty where there is none, and on the emulator, whose speeds mean nothing.
        """
        grades = [one.grade for _, one in self._graded]
        return "?" if "?" in grades else max(grades, default="")

    @property
    def grade_reasons(self) -> tuple[str, ...]:
        """The reasons for the grade, in words."""
        reasons = ((metric, reason) for metric, one in self._graded for reason in one.reasons)
        return tuple(_joined(reasons))

    @property
    def _graded(self) -> list[tuple[Metric, Stability]]:
        keys = () if self.subject.emulator else LEADING_METRICS
        return [(find_metric(key), self.stability[key]) for key in keys if key in self.stability]

    @property
    def _speeds(self) -> list[Stats]:
        return [self.cells[key] for key in SPEED_METRICS if key in self.cells]


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Runs without a result that ended alike: the same container, status and error.

    Attributes:
        runs: oldest first.
    """

    runs: tuple[Run, ...]

    @property
    def newest(self) -> Run:
        """The newest of the runs, which stands for all."""
        return self.runs[-1]

    @property
    def devices(self) -> tuple[str, ...]:
        """The serials of all devices, each once."""
        return tuple(dict.fromkeys(run.device.serial for run in self.runs))


def group_failures(runs: Iterable[Run]) -> tuple[FailureGroup, ...]:
    """Put runs together that failed alike, wherever and whenever; the newest group is last."""
    groups = [FailureGroup(group) for _, group in group_by(runs, _failure)]
    return tuple(sorted(groups, key=lambda group: (group.newest.created_at, group.newest.id)))


def _failure(run: Run) -> tuple[object, ...]:
    """Return the key of equal failures, without the names of device and run."""
    error = (run.error or "").replace(run.device.serial, "")
    same = re.sub(r"[0-9a-f]{32}", "", error)
    return (run.kind, run.status, run.container, run.device.emulator, same)


def perplexities(
    runs: Sequence[Run], told: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> tuple[SummaryRow, ...]:
    """List a row for each subject and text, newest text first within a subject.

    Args:
        told: as for `summarise`; runs with other remarks are rows of their own.
    """
    found = [run for run in runs if any(run.values(key) for key in (PERPLEXITY, *REFERENCES))]
    rows = sorted(_scored_rows(found, told), key=lambda row: row.runs[-1].created_at, reverse=True)
    return tuple(sorted(rows, key=_order))


def task_rows(
    runs: Sequence[Run], told: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> tuple[SummaryRow, ...]:
    """List a row for each subject and task.

    Args:
        told: as for `summarise`.
    """
    rows = _scored_rows([run for run in runs if run.kind == "evaluate"], told)
    return tuple(sorted(rows, key=lambda row: (row.label, *_order(row))))


def _scored_rows(runs: Sequence[Run], told: Mapping[str, tuple[str, ...]]) -> Iterator[SummaryRow]:
    """Yield a row for each container, device and text or task."""
    for ((subject, _), changes), group in group_by(runs, lambda run: _key(run, told)):
        same, left_out = _like_newest(group)
        cells, remarks = {}, [*changes, *left_out]
        for key in _SCORES:
            metric = find_metric(key)
            stats = summarise_sessions([run.values(key) for run in same])
            if stats is None:
                continue
            cells[key] = stats
            if stats.maximum > stats.minimum * 1.001 and metric.direction is not Direction.NEITHER:
                spread = f"{metric.format(stats.minimum)} to {metric.format(stats.maximum)}"
                remarks.append(f"{metric.label}: runs differ, {spread}")
        label = subject.prompt if subject.kind == "evaluate" else ""
        row = SummaryRow(subject, label, same, cells, scored=subject)
        if same[-1].check.outcome != "passed":  # by a bound that the user gave
            remarks += find_perplexity_faults(row.values, row.container.precision)
        yield replace(row, remarks=tuple(remarks))


def summarise(
    runs: Sequence[Run], told: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> tuple[SummaryRow, ...]:
    """Summarise runs that are done, all on hardware or all on the emulator.

    Args:
        told: remarks by the id of a run; those of a row have the same.
    """
    scores = perplexities(runs, told)
    groups = group_by(speed_runs(runs), lambda run: _key(run, told))
    # There may be thousands, so only those of one container and device are compared.
    scored = dict(group_by(scores, lambda row: (row.subject.without_test, row.container.sha256)))
    alike = dict(group_by(groups, lambda group: _display_key(group[0][0])))
    rows, with_speed = [], set[tuple[Subject, str]]()
    for (key, changes), group in groups:
        here = key[0].without_test, key[1]
        beside = [row for row in scored.get(here, ()) if _agree(row.runs[-1], group[-1])]
        with_speed |= {here} if beside else set()
        apart = _apart_remark([subject for ((subject, _), _), _ in alike[_display_key(key)]])
        row = _row(key[0], group, beside)
        remarks = dict.fromkeys(changes + row.remarks + apart)
        rows.append(replace(row, remarks=tuple(remarks)))
    for here, rows_here in scored.items():
        best = _choose_perplexity(rows_here)
        if best is not None and here not in with_speed:
            rows.append(best)
    if len({row.subject.runtime for row in rows}) > 1:  # what is compared stands together
        rows = [replace(row, runtime=row.subject.runtime) for row in rows]
    return tuple(sorted(rows, key=_sort_key))


def _key(
    run: Run, told: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[Subject, str], tuple[str, ...]]:
    """Return the key of a row with the remarks on it."""
    return _built(run), told.get(run.id, ())


def _built(run: Run) -> tuple[Subject, str]:
    """Return the key of a row: a subject, and the container's hash."""
    return Subject.of(run), run.container.sha256


_SCORES = (
    PERPLEXITY, PERPLEXITY_ERROR, *REFERENCES, *STEP_METRICS,
    *(key for task in TASK_METRICS for key in (task, f"{task}_error") if key in METRICS),
)  # fmt: skip
_SIDE_BY_SIDE = OF_DEVICE | {"container", "sessions at once", "prompt"}
"""Facts in which the runs of one row may differ."""


def _agree(a: Run, b: Run) -> bool:
    """Return whether two runs are of the same versions, as far as both know them."""
    settings = {"runner", *a.workload.sampler, *b.workload.sampler}
    return not describe_changes([a], [b], ignored=_SIDE_BY_SIDE | settings)


def _like_newest(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[str, ...]]:
    """Return the runs with the versions and settings of the newest, and a remark on the others."""
    apart = {
        run.id: changes
        for run in runs
        if (changes := describe_changes([run], [runs[-1]], ignored=_SIDE_BY_SIDE))
    }
    if not apart:
        return tuple(runs), ()
    *_, newest = apart.values()
    remark = f"The row leaves out {pluralize(len(apart), 'run')} before: {', '.join(newest)}"
    return tuple(run for run in runs if run.id not in apart), (remark,)


def speed_runs(runs: Sequence[Run]) -> list[Run]:
    """Select the runs with speeds: benchmarks, and other runs of containers without one."""
    timed = [run for run in runs if any(_all_values(run, key) for key in SPEED_METRICS)]
    benchmarked = {_place(run) for run in timed if run.kind == "bench"}
    others = (run for run in timed if run.kind in {"generate", "embed"})
    stand_ins = {run.id for run in others if _place(run) not in benchmarked}
    return [run for run in timed if run.kind == "bench" or run.id in stand_ins]


def _place(run: Run) -> tuple[Subject, str]:
    """Return the container and its device, without the test."""
    subject, sha256 = _built(run)
    return subject.without_test, sha256


def _all_values(run: Run, key: str) -> tuple[float, ...]:
    return run.values(key) + run.values(key, warmup=True)


def _row(subject: Subject, group: Sequence[Run], scored: Sequence[SummaryRow]) -> SummaryRow:
    perplexity = _choose_perplexity(scored)
    runs, left_out = _like_newest(group)
    steady, devices = not subject.emulator, [run.device.serial for run in runs]
    cells = dict[str, Stats]()
    stability = dict[str, Stability]()
    by_metric: list[tuple[Metric, str]] = []
    for name in SPEED_METRICS:
        if not any(_all_values(run, name) for run in runs):
            continue
        if name == "prefill_tokens_per_s" and not subject.measures_prompt:
            continue
        metric = find_metric(name)
        sessions = [run.values(name) for run in runs]
        stats = summarise_sessions(sessions, devices)
        if stats is not None:
            cells[name], stability[name] = stats, grade_runs(runs, name)
        if Use.SESSION not in metric.use:
            by_metric += [
                (metric, remark) for remark in remark_on(sessions, devices, on_spread=steady)
            ]
    remarks = [*left_out, *_joined(by_metric), *_workload_remarks(subject, runs)]
    remarks += [words for key in LEADING_METRICS if key in cells for words in _by_device(runs, key)]
    output = _output(runs, perplexity)
    if output == "unchecked" and not subject.is_imported:
        remarks.append(UNCOMPARED if subject.kind == "embed" else UNCHECKED)
    of_text = None
    if perplexity is not None:
        of_text = perplexity.subject
        cells.update(perplexity.cells)
        remarks += perplexity.remarks
    label, words = subject.label, tuple(remarks)
    return SummaryRow(subject, label, runs, cells, words, of_text, stability, output)


def _by_device(runs: Sequence[Run], key: str) -> Iterator[str]:
    """Yield the figures of each device, where these differ by more than their sessions do."""
    metric, devices = find_metric(key), group_by(runs, lambda run: run.device.serial)
    of_device = {
        serial: stats
        for serial, some in devices
        if (stats := summarise_sessions([run.values(key) for run in some])) is not None
    }
    several = [one for one in of_device.values() if one.sessions > 1 and one.sd is not None]
    if len(several) < 2:
        return
    freedom = sum(one.sessions - 1 for one in several)
    noise = sum((one.sessions - 1) * (one.sd or 0) ** 2 for one in several) / freedom
    low, *_, high = sorted(several, key=lambda one: one.mean)
    apart = _APART * math.sqrt(noise * (1 / low.sessions + 1 / high.sessions))
    if high.mean - low.mean > max(apart, 0.001 * high.mean):
        words = (
            f"{serial} {one.show(metric)} ({pluralize(one.sessions, 'session')})"
            for serial, one in of_device.items()
        )
        yield f"{metric.label} by device: {', '.join(words)} {metric.shown_unit}"


def _choose_perplexity(scored: Sequence[SummaryRow]) -> SummaryRow | None:
    """Choose the perplexity that tells most, with a remark on each that was measured after it.

    One with a reference tells more than others, then one over more tokens, then a later one: a
    quick one over a few windows does not replace it. That of a draft model says nothing of the
    answers.
    """
    scored = [row for row in scored if row.subject.of_answers]
    if not scored:
        return None
    best = max(scored, key=_weight)
    since = best.runs[-1].created_at
    remarks = (
        f"Perplexity is that over {describe_scored(best.subject.scored)}; a later one over "
        f"{describe_scored(row.subject.scored)}"
        f"{'' if row.subject.text == best.subject.text else ' of another text'} is {shown.text}"
        for row in scored
        if row.runs[-1].created_at > since and (shown := row.show(PERPLEXITY))
    )
    return replace(best, remarks=(*best.remarks, *remarks))


def _weight(row: SummaryRow) -> tuple[bool, int, datetime]:
    definition, values = row.subject.scored, row.values
    has_reference = any(deviation(values, reference) is not None for reference in REFERENCES)
    return has_reference, definition.tokens if definition else 0, row.runs[-1].created_at


def _output(runs: Sequence[Run], perplexity: SummaryRow | None) -> Output:
    """Judge the output as its runs were judged; else by a perplexity beside its references."""
    if all(run.check.outcome == "passed" for run in runs):
        return "checked"
    if perplexity is None:
        return "unchecked"
    precision = perplexity.container.precision
    if find_perplexity_faults(perplexity.values, precision):
        return "doubtful"
    return "checked" if matches_references(perplexity.values, precision) else "unchecked"


def _display_key(built: tuple[Subject, str]) -> tuple[object, ...]:
    """Return what distinguishes rows for the reader."""
    subject, sha256 = built
    own = (subject.label, subject.by, subject.labels)
    return (*own, subject.model, subject.place, subject.target, sha256)


def _apart_remark(alike: Sequence[Subject]) -> tuple[str, ...]:
    """Return a remark on why rows that look the same are separate."""
    if len(set(alike)) < 2:
        return ()
    names = dict.fromkeys(name for one in alike for name in one.differences(alike[0]))
    return (f"Separate from a similar row because of: {', '.join(names)}",)


def _joined(remarks: Iterable[tuple[Metric, str]]) -> list[str]:
    """Put each remark in words once, after the names of all metrics that it is about."""
    metrics: dict[str, list[str]] = {}
    for metric, remark in remarks:
        metrics.setdefault(remark, []).append(metric.label)
    return [f"{', '.join(labels)}: {remark}" for remark, labels in metrics.items()]


_WARMS_UP = frozenset({"llama-bench", "geniex-bench"})
"""Runners that warm up before what they report."""


def _workload_remarks(subject: Subject, runs: Sequence[Run]) -> list[str]:
    remarks = []
    unwarmed = any(
        run.workload.warmup == 0
        and run.warmup_detected is None
        and run.workload.runner not in _WARMS_UP
        for run in runs
    )
    if unwarmed and subject.kind != "embed" and not subject.is_imported:  # each text is another
        remarks.append("No warm-up")
    unsteady = sum(run.warmup_detected is False for run in runs)
    if unsteady:
        remarks.append(f"{unsteady} of {len(runs)} runs were not steady after their warm-ups")
    most = [max(len(run.values(name)) for name in SPEED_METRICS) for run in runs]
    short = [run for run, n in zip(runs, most, strict=True) if n < run.workload.repetitions]
    if short:
        remarks.append(f"{len(short)} of {len(runs)} runs gave fewer repetitions than requested")
    prompts = {value for run in runs for value in run.values("prompt_tokens")}
    # Genie begins every dialog with the bos token, which what was asked for may not count.
    request = subject.prompt_tokens
    if request is not None and prompts - {request, request + 1}:
        real = ", ".join(f"{value:.0f}" for value in sorted(prompts))
        remarks.append(f"The prompt had {real} tokens, but {request} were requested")
    return remarks


MATRIX_METRICS = (
    *reversed(LEADING_METRICS), "ttft_s", PERPLEXITY, "prefill_energy_j_per_token",
    "decode_energy_j_per_token", "peak_rss_bytes",
)  # fmt: skip
MOST_COLUMNS = 10
"""Columns side by side; where devices times tests are more, tests are rows of a matrix."""


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """A row of the summary as a cell of a matrix.

    Attributes:
        part: how near it is to the best of its line: 1 for that, less for others.
    """

    row: SummaryRow
    shown: ShownFigure
    part: float


Line = tuple[MatrixCell | None, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One metric of all rows of a summary: models down, devices and tests across.

    Attributes:
        test: the one of all its cells, or what their tests have in common but for the depth; empty
            where they are of several.
        columns: devices, and the test or depth of each, empty where all have the same.
        lines: names, and below each column its cell.
    """

    metric: Metric
    test: str
    columns: tuple[tuple[str, str], ...]
    lines: tuple[tuple[tuple[str, str], Line], ...]

    @property
    def heading(self) -> str:
        """The metric, its unit and the test."""
        return ", ".join(filter(None, (self.metric.label, self.metric.shown_unit, self.test)))

    def blocks(self, most: int = MOST_COLUMNS) -> "Iterator[Matrix]":
        """Yield parts of about one size that there is room for."""
        count = len(self.columns)
        step = math.ceil(count / math.ceil(count / most))
        for first in range(0, count, step):
            part = slice(first, first + step)
            lines = tuple((name, cells[part]) for name, cells in self.lines if any(cells[part]))
            yield replace(self, columns=self.columns[part], lines=lines)


def find_matrices(rows: Sequence[SummaryRow]) -> tuple[Matrix, ...]:
    """Put the rows of a summary into a matrix of each metric, two by two at least."""
    found = (_matrix(find_metric(key), rows) for key in MATRIX_METRICS)
    return tuple(one for one in found if len(one.columns) > 1 and len(one.lines) > 1)


def _matrix(metric: Metric, rows: Sequence[SummaryRow]) -> Matrix:
    rows = [row for row in rows if metric.key in row.cells]
    by_test = metric.key != PERPLEXITY
    places = {(row.subject.place, _test(row) if by_test else ((), "")) for row in rows}
    tests = {words for _, (_, words) in places}
    common = {words.partition(" @ ")[0] for words in tests}
    across = len(tests) > 1 and len(places) <= MOST_COLUMNS
    columns = sorted({(place, test if across else ((), "")) for place, test in places})
    cells: dict[tuple[str, str], dict[object, SummaryRow]] = {}
    order: dict[tuple[str, str], tuple[object, ...]] = {}
    for row in rows:
        test = _test(row) if by_test else ((), "")
        column = (row.subject.place, test if across else ((), ""))
        notes = [*row.notes, "" if across or len(tests) == 1 else test[1]]
        for more in ("", container_shape(row.container), row.container.sha256[:12]):
            notes += [more]
            name = row.name, ", ".join(filter(None, notes))
            if column not in cells.get(name, {}) or not by_test:
                break
        cells.setdefault(name, {}).setdefault(column, row)
        order.setdefault(name, (row.name, row.notes, test[0]))
    return Matrix(
        metric,
        "".join(tests if len(tests) == 1 else common if across and len(common) == 1 else ()),
        tuple(
            (place, (test.partition(" @ ")[2] or "d0") if test and len(common) == 1 else test)
            for place, (_, test) in columns
        ),
        tuple(
            (name, _line(metric, [cells[name].get(one) for one in columns]))
            for name in sorted(cells, key=order.__getitem__)
        ),
    )


def _line(metric: Metric, rows: Sequence[SummaryRow | None]) -> Line:
    figures = [row.show(metric.key) if row else None for row in rows]
    values = [one.value for one in figures if one]
    best = max(values) if metric.direction is Direction.HIGHER else min(values)
    return tuple(
        MatrixCell(row, one, min(one.value, best) / max(one.value, best)) if row and one else None
        for row, one in zip(rows, figures, strict=True)
    )


def _test(row: SummaryRow) -> tuple[tuple[int, ...], str]:
    """Return a test by its lengths, in whose order they stand, and in words."""
    subject = row.subject
    lengths = (subject.prompt_tokens, subject.max_new_tokens, subject.depth_tokens)
    return tuple(length or 0 for length in lengths), row.label


def group_by(
    items: Iterable[Item], key: Callable[[Item], Key]
) -> list[tuple[Key, tuple[Item, ...]]]:
    """Group items by a key, each group and its items in the order in which they come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [(value, tuple(group)) for value, group in groups.items()]


def _sort_key(row: SummaryRow) -> tuple[object, ...]:
    """Sort by model and SoC; unchecked outputs come after checked ones."""
    model, soc, *rest = _order(row)
    first = (row.label,) if row.runtime else ()
    return (model, soc, row.output != "checked", *first, *rest, row.label, row.notes)


def _order(row: SummaryRow) -> tuple[str, str, str, str]:
    subject = row.subject
    return (subject.model, subject.soc, subject.target, row.container.sha256)
