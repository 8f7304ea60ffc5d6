"""Summary of a page as tables for a terminal."""

from collections.abc import Container, Sequence

from rich.console import Console
from rich.text import Text

from harness.console import NumberColumn, print_numbers, visible
from harness.results.comparison import Comparison, ComparisonGroup
from harness.results.identity import container_name, container_shape, describe_container
from harness.results.metrics import (
    LEADING_METRICS,
    SPEED_METRICS,
    TASK_METRICS,
    Metric,
    find_metric,
)
from harness.results.perplexity import PERPLEXITY, PERPLEXITY_ERROR, PERPLEXITY_FLOAT
from harness.results.verdicts import Verdict
from harness.words import NO_VALUE, percent, pluralize
from reports.content import Section
from reports.headline import Headline
from reports.page import Page
from reports.summary import MOST_COLUMNS, FailureGroup, Matrix, ScoredRow, SummaryRow
from reports.text import short_time

_GRADE_RANK, _SHARE_RANK, _EMPTY_RANK = 3, 8, 9
"""Ranks, among those of metrics, of the grade, the share of bandwidth, and an empty column."""
_IN_MATRICES = (*LEADING_METRICS, PERPLEXITY)
_NAME_WIDTH, _CELL_WIDTH = 24, 11
"""Room on a terminal for the names and for a cell of a matrix, about."""


def print_page(page: Page, console: Console) -> None:
    """Print the tables with their remarks, and the runs without a result.

    Lines are wrapped on a terminal only.
    """
    for line in _headline(page.headline):
        _print_line(console, line)
    for section in page.sections:
        notice = f". {section.notice}" if section.emulator else ""
        title = f"{section.title[0].upper()}{section.title[1:]}{notice}"
        _print_line(console, Text(title, "bold yellow" if section.emulator else "bold"))
        _print_rows(section, console)
        for task in section.tasks:
            _print_line(console, Text(_task(task)))
        for group in section.comparisons:
            for line in _comparison(group):
                _print_line(console, line)
    for failure in page.failures:
        _print_line(console, Text(_single_line(f"x {_failure(failure)}"), "red"))


def _print_rows(section: Section, console: Console) -> None:
    """Print the rows of a section, or their matrices where they are many, with their remarks."""
    if section.folded:
        _print_matrices(section, console)
    elif section.rows:
        _print_table(section, console)
    ambiguous = _ambiguous(section.rows)
    shared = section.shared_remarks
    for remark, count in shared.items():
        rows = f"{count} of {pluralize(len(section.rows), 'row')}"
        line = Text(f"! {rows}: ", "yellow").append(_single_line(remark), "default")
        _print_line(console, line)
    for row in section.rows:
        for line in _remarks(row, shared, apart=_display_key(row) in ambiguous):
            if not (section.folded and line.style == "dim"):
                _print_line(console, line)


def _task(row: ScoredRow) -> str:
    """Return the scores of a container in a task."""
    keys = (key for key in TASK_METRICS if key in row.values)
    words = ", ".join(f"{find_metric(key).label.lower()} {row.show(key)}" for key in keys)
    name = f"{container_name(row.container)} on {row.subject.where}"
    parts = filter(None, (name, row.subject.by, words))
    return _single_line(f"{row.task}: {', '.join(parts)}")


_STYLES = {"bad": "red", "doubt": "yellow", "good": "green", "none": "default"}


def _headline(headline: Headline) -> list[Text]:
    """Return the verdict over everything, with its reasons."""
    words = Text(_single_line(headline.words), f"bold {_STYLES[headline.level]}")
    return [words, *(Text(f"  {_single_line(line)}") for line in headline.lines)]


def _print_line(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=not console.is_terminal)


def _failure(group: FailureGroup) -> str:
    """Return the runs of a group, and how they ended."""
    newest, count = group.newest, len(group.runs)
    devices = group.devices
    where = devices[0] if len(devices) == 1 else pluralize(len(devices), "device")
    times = ""
    if count > 1:
        first, last = (short_time(run.created_at) for run in (group.runs[0], newest))
        times = f", {count} times from {first} to {last}"
    outcome = f"{newest.status}: {newest.error}" if newest.error else newest.status
    return f"{newest.kind} of {container_name(newest.container)} on {where}{times}: {outcome}"


def _display_key(row: SummaryRow) -> tuple[str, ...]:
    """Return the name of a row; several containers may share it."""
    shape = container_shape(row.container) if row.container else ""
    return (row.name, row.subject.where, row.label, shape)


def _ambiguous(rows: Sequence[SummaryRow]) -> frozenset[tuple[str, ...]]:
    """Return names that several containers share."""
    hashes: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        hashes.setdefault(_display_key(row), set()).add(row.sha256)
    return frozenset(name for name, sha256s in hashes.items() if len(sha256s) > 1)


def _remarks(row: SummaryRow, shared: Container[str], *, apart: bool) -> list[Text]:
    parts = [row.name, row.subject.where, row.label, *row.notes]
    if apart:
        parts.append(row.sha256[:12])
    subject = ", ".join(_single_line(part) for part in parts if part)
    lines = [
        Text(f"! {subject}: ", "yellow").append(_single_line(remark), "default")
        for remark in row.remarks
        if remark not in shared
    ]
    own = [reason for reason in row.grade_reasons if reason not in shared]
    if row.grade and own:
        reasons = _single_line("; ".join(own))
        lines.append(Text(f"· {subject}: stability {row.grade}, {reasons}", "dim"))
    return lines


def _comparison(group: ComparisonGroup) -> list[Text]:
    """Return the two sides, and a line for each metric."""
    a, b = (
        f"{_single_line(describe_container(run.container))} ({run.container.sha256[:12]})"
        for run in (group.a, group.b)
    )
    workload = f", {_single_line(group.workload)}" if group.workload else ""
    style = "red" if group.verdict is Verdict.REGRESSED else "default"
    return [
        Text(
            f"A is {a}, B is {b}{workload}: {group.verdict.value}, losses up to "
            f"{group.threshold:.1%} allowed"
        ),
        *(
            Text(
                f"  {_change(metric, one)}: {one.verdict.value}, {_single_line(one.reason)}", style
            )
            for metric, one in group.metrics
        ),
    ]


def _change(metric: Metric, found: Comparison) -> str:
    if found.ratio is None:
        return metric.label
    change, interval = found.cells
    interval_in_words = "" if found.low is None else f" ({interval} at {found.confidence:.0%})"
    return f"{metric.label} {change}{interval_in_words}"


def _print_table(section: Section, console: Console) -> None:
    rows = section.rows
    ambiguous = _ambiguous(rows)
    columns = []
    for key in SPEED_METRICS:
        metric = find_metric(key)
        if any(key in row.cells for row in rows):
            heading = f"{metric.short or metric.label}\n{metric.shown_unit}"
            columns.append(_column(heading, [_speed(row, key) for row in rows], metric.rank))
    shares = [row.bandwidth_share for row in rows]
    if any(shares):
        texts = [NO_VALUE if share is None else f"{share:.0%}" for share in shares]
        columns.append(_column("of memory\nbandwidth", texts, _SHARE_RANK))
    scores = [_perplexity(row) for row in rows]
    for key, cells in zip((PERPLEXITY, PERPLEXITY_FLOAT), zip(*scores, strict=True), strict=True):
        columns.append(_column(find_metric(key).short, list(cells), find_metric(key).rank))
    columns.append(_column("n\ngrade", [_grade(row) for row in rows], _GRADE_RANK))
    names = [_name(row, apart=_display_key(row) in ambiguous) for row in rows]
    console.print()
    print_numbers("Model\ntarget, workload", names, columns, console=console)
    console.print()


def _print_matrices(section: Section, console: Console) -> None:
    """Print the leading metrics of a section of many rows: models down, devices across."""
    said = section.shared_remarks
    most = (console.width - _NAME_WIDTH) // _CELL_WIDTH if console.is_terminal else MOST_COLUMNS
    for one in section.matrices:
        if one.metric.key not in _IN_MATRICES:
            continue
        parts = filter(None, (one.metric.label, one.metric.shown_unit, one.test))
        for block in one.blocks(max(most, 1)):
            rows = [(name, shown) for name, cells in one.rows if any(shown := cells[block])]
            columns = [
                NumberColumn(
                    _single_line(f"{place} {test}").replace(" ", "\n"),
                    [_matrix_cell(section, one, cells[number], said) for _, cells in rows],
                    rank=0,
                )
                for number, (place, test) in enumerate(one.columns[block])
            ]
            names = [_single_line(" ".join(name)) for name, _ in rows]
            console.print()
            print_numbers(", ".join(parts), names, columns, console=console)
    console.print()
    words = f"{pluralize(len(section.rows), 'row')} with all metrics: in the report, and by --json"
    _print_line(console, Text(words, "dim"))


def _matrix_cell(
    section: Section, matrix: Matrix, row: SummaryRow | None, said: Container[str]
) -> str:
    if row is None:
        return ""
    cell = row.cells.get(matrix.metric.key)
    spread = cell.show_spread(matrix.metric) if cell else ""
    lines = (
        matrix.metric.format(matrix.value(row)),
        spread and f"± {spread}",
        section.doubt(row, said),
    )
    return "\n".join(filter(None, lines))


def _column(heading: str, cells: list[str], rank: int) -> NumberColumn:
    return NumberColumn(heading, cells, _EMPTY_RANK if rank and set(cells) == {NO_VALUE} else rank)


def _name(row: SummaryRow, *, apart: bool) -> str:
    """Return the name of a row, with the container's hash if others share the name."""
    where = " ".join(filter(None, (row.subject.where, row.label)))
    shape = container_shape(row.container) if row.container else ""
    sha256 = row.container.sha256[:12] if row.container and apart else ""
    parts = (_single_line(row.name), _single_line(where), ", ".join(filter(None, (shape, sha256))))
    lines = [line for line in parts if line]
    lines += map(_single_line, row.notes)
    lines += filter(None, [row.doubt])
    return "\n".join(lines)


def _grade(row: SummaryRow) -> str:
    return f"{row.units}\n{row.grade}" if row.n else NO_VALUE


def _speed(row: SummaryRow, key: str) -> str:
    cell = row.cells.get(key)
    return NO_VALUE if cell is None else cell.show(find_metric(key)).replace(" ± ", "\n± ")


def _perplexity(row: SummaryRow) -> tuple[str, str]:
    scores = row.perplexity
    if scores is None:
        return NO_VALUE, NO_VALUE
    device, reference = (
        find_metric(key).format(scores.values[key]) if key in scores.values else NO_VALUE
        for key in (PERPLEXITY, PERPLEXITY_FLOAT)
    )
    difference = scores.difference(PERPLEXITY_FLOAT)
    error = scores.values.get(PERPLEXITY_ERROR)
    lines = [device, "" if error is None else f"± {find_metric(PERPLEXITY_ERROR).format(error)}"]
    lines.append("" if difference is None else percent(difference))
    lines += scores.scored.split(", ") if scores.subject.scored else []
    return "\n".join(line for line in lines if line), reference


def _single_line(value: str) -> str:
    """Return stored text on one line, with control characters made visible."""
    return visible(" ".join(value.split()))
