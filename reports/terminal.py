"""The summary as tables for a terminal."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.measure.comparison import Verdict
from harness.measure.quality import DEVICE, FLOAT
from harness.store.metrics import find_metric
from reports.groups import Duel
from reports.page import Page, Section
from reports.summary import Row
from reports.text import percent, visible

_NOTHING = "\N{EN DASH}"
EMULATOR_NOTICE = "Emulator speed is not hardware speed."
WIDE = 100
"""Terminals with fewer columns get the first metrics only."""
SHORT_LABELS = {"ttft_s": "TTFT", "peak_rss_bytes": "Memory"}
METRICS = ("prefill_tokens_per_s", "decode_tokens_per_s", "ttft_s")
MORE_METRICS = ("init_s", "peak_rss_bytes")


def show(page: Page, console: Console) -> None:
    """Print the tables, what is to be said against them, and the runs without a result."""
    for section in page.sections:
        console.print(_table(section, wide=console.width >= WIDE))
        for row in section.rows:
            for line in _remarks(row, brief=section.emulator):
                console.print(line, soft_wrap=True)
        for duel in section.duels:
            for line in _duel(duel):
                console.print(line, soft_wrap=True)
    for run in page.results.gaps:
        what = f"{run.kind} of {run.container.model} on {run.device.serial}"
        error = f": {run.error}" if run.error else ""
        console.print(Text(_line(f"x {what}: {run.status}{error}"), "red"), soft_wrap=True)


def _remarks(row: Row, *, brief: bool) -> list[Text]:
    """What is to be said against a row; in brief, that its speeds vary is said once."""
    left_out = row.unsteady[1:] if brief else ()
    subject = f"{_line(row.subject.model)}, {_line(row.subject.target)}"
    lines = []
    for remark in row.remarks:
        if remark in left_out:
            continue
        line = Text(f"! {subject}: ", "yellow").append(_line(remark), "default")
        if left_out and remark == row.unsteady[0]:
            line.append(f" (and {len(left_out)} more like it in the report)", "dim")
        lines.append(line)
    if row.grade and not brief:
        reasons = _line("; ".join(row.grade_reasons))
        lines.append(Text(f"· {subject}: stability {row.grade}, {reasons}", "dim"))
    return lines


def _duel(duel: Duel) -> list[Text]:
    """One line for each metric of a comparison."""
    what = f"{duel.a.container.sha256[:12]} and {duel.b.container.sha256[:12]}"
    style = "red" if duel.verdict is Verdict.REGRESSED else "default"
    return [
        Text(f"A/B {what}: {metric.label}: {found.verdict.value}, {_line(found.reason)}", style)
        for metric, found in duel.metrics
    ]


def _table(section: Section, *, wide: bool) -> Table:
    metrics = METRICS + MORE_METRICS if wide else METRICS
    title = f"HTP emulator. {EMULATOR_NOTICE}" if section.emulator else "Hardware"
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold yellow" if section.emulator else "bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("Model\ntarget, workload", overflow="fold")
    for key in metrics:
        metric = find_metric(key)
        heading = f"{SHORT_LABELS.get(key, metric.label)}\n{metric.shown_unit}"
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("Perplexity\non device", justify="right", no_wrap=True)
    table.add_column("in float\non host", justify="right", no_wrap=True)
    table.add_column("n\ngrade", justify="right", no_wrap=True)
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in _cells(row, metrics)))
    return table


def _cells(row: Row, metrics: tuple[str, ...]) -> list[str]:
    workload = f" {_line(row.label)}" if row.label else ""
    unchecked = f"\noutput {row.output}" if row.cells and row.output != "checked" else ""
    return [
        f"{_line(row.subject.model)}\n{_line(row.subject.target)}{workload}{unchecked}",
        *(_speed(row, key) for key in metrics),
        *_perplexity(row),
        f"{row.n}\n{row.grade}" if row.n else _NOTHING,
    ]


def _speed(row: Row, key: str) -> str:
    cell = row.cells.get(key)
    return _NOTHING if cell is None else cell.text.replace(" ± ", "\n± ")


def _perplexity(row: Row) -> tuple[str, str]:
    found = row.perplexity
    if found is None:
        return _NOTHING, _NOTHING
    device, reference = (
        find_metric(key).format(found.values[key]) if key in found.values else _NOTHING
        for key in (DEVICE, FLOAT)
    )
    difference = found.difference(FLOAT)
    return device if difference is None else f"{device}\n{percent(difference)}", reference


def _line(value: str) -> str:
    """Text from a store on one line, unable to speak to the terminal."""
    return str(visible(" ".join(value.split())))
