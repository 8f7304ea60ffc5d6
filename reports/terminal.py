"""Summary of a page as tables for a terminal."""

import re
from collections.abc import Container, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from harness.console import NumberColumn, print_numbers, visible
from harness.results.comparison import ComparisonGroup
from harness.results.identity import container_name, container_shape, describe_container
from harness.results.metrics import LEADING_METRICS, SPEED_METRICS, Metric, Use, find_metric
from harness.results.perplexity import PERPLEXITY, PERPLEXITY_FLOAT
from harness.results.records import Comparison
from harness.results.verdicts import Verdict
from harness.words import NO_VALUE, pluralize
from reports.content import Section
from reports.headline import Headline
from reports.page import Page
from reports.summary import MOST_COLUMNS, FailureGroup, ShownFigure, SummaryRow
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
            _print_line(console, Text(_task(task, section.task_columns)))
        for group in section.comparisons:
            for line in _comparison(group):
                _print_line(console, line)
    for failure in page.failures:
        _print_line(console, Text(_single_line(f"x {_failure(failure)}"), "red"))


def _print_rows(section: Section, console: Console) -> None:
    """Print the rows of a section, or their matrices where they are many, with their remarks."""
    folded = section.folded
    if folded:
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
            if not (folded and line.style == "dim"):
                _print_line(console, line)


def _task(row: SummaryRow, metrics: Sequence[Metric]) -> str:
    """Return the scores of a container in a task."""
    scores = ((one, row.show(one.key)) for one in metrics)
    words = (f"{one.label.lower()} {shown} {one.shown_unit}" for one, shown in scores if shown)
    name = f"{row.name} on {row.subject.where}"
    parts = filter(None, (name, row.subject.by, *words))
    return _single_line(f"{row.label}: {', '.join(parts)}")


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
    return (row.name, row.subject.where, row.label, container_shape(row.container))


def _ambiguous(rows: Sequence[SummaryRow]) -> frozenset[tuple[str, ...]]:
    """Return names that several containers share."""
    hashes: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        hashes.setdefault(_display_key(row), set()).add(row.container.sha256)
    return frozenset(name for name, sha256s in hashes.items() if len(sha256s) > 1)


def _remarks(row: SummaryRow, shared: Container[str], *, apart: bool) -> list[Text]:
    parts = [row.name, row.subject.where, row.label, *row.notes]
    if apart:
        parts.append(row.container.sha256[:12])
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
    for key in (*SPEED_METRICS, PERPLEXITY, PERPLEXITY_FLOAT):
        metric, shown = find_metric(key), [row.show(key) for row in rows]
        if any(shown) or Use.SPEED not in metric.use:
            heading = "\n".join(filter(None, (metric.short or metric.label, metric.shown_unit)))
            columns.append(NumberColumn(heading, [_lines(one) for one in shown], metric.rank))
    shares = [row.bandwidth_share for row in rows]
    if any(shares):
        texts = [NO_VALUE if share is None else f"{share:.0%}" for share in shares]
        columns.append(NumberColumn("of memory\nbandwidth", texts, _SHARE_RANK))
    columns.append(NumberColumn("n\ngrade", [_grade(row) for row in rows], _GRADE_RANK))
    empty = {NO_VALUE}
    columns = [replace(one, rank=_EMPTY_RANK) if {*one.cells} == empty else one for one in columns]
    names = [_name(row, apart=_display_key(row) in ambiguous) for row in rows]
    console.print()
    print_numbers("Model\ntarget, workload", names, columns, console=console)
    console.print()


def _print_matrices(section: Section, console: Console) -> None:
    """Print the leading metrics of a section of many rows: models down, devices across."""
    said = section.shared_remarks
    most = (console.width - _NAME_WIDTH) // _CELL_WIDTH if console.is_terminal else MOST_COLUMNS
    for whole in section.matrices:
        for one in whole.blocks(max(most, 1)) if whole.metric.key in _IN_MATRICES else ():
            columns = [
                NumberColumn(
                    _single_line(f"{place} {test}").replace(" ", "\n"),
                    [
                        _lines(cell.shown, section.doubt(cell.row, said)) if cell else ""
                        for _, cells in one.lines
                        for cell in [cells[number]]
                    ],
                    rank=0,
                )
                for number, (place, test) in enumerate(one.columns)
            ]
            names = [_single_line(" ".join(name)) for name, _ in one.lines]
            console.print()
            print_numbers(one.heading, names, columns, console=console)
    console.print()
    words = f"{pluralize(len(section.rows), 'row')} with all metrics: in the report, and by --json"
    _print_line(console, Text(words, "dim"))


def _lines(shown: ShownFigure | None, *more: str) -> str:
    if shown is None:
        return NO_VALUE
    spread = f"± {shown.spread}" if shown.spread else ""
    note = re.split(r", | (?=[-+])", shown.note)
    return "\n".join(filter(None, (shown.text, spread, *note, *more)))


def _name(row: SummaryRow, *, apart: bool) -> str:
    """Return the name of a row, with the container's hash if others share the name."""
    where = f"{row.subject.where} {row.label}"
    shape = container_shape(row.container), row.container.sha256[:12] if apart else ""
    lines = (row.name, where, ", ".join(filter(None, shape)), *row.notes, row.doubt)
    return "\n".join(filter(None, map(_single_line, lines)))


def _grade(row: SummaryRow) -> str:
    return f"{row.units}\n{row.grade}" if row.n else NO_VALUE


def _single_line(value: str) -> str:
    """Return stored text on one line, with control characters made visible."""
    return visible(" ".join(value.split()))
