"""The summary as tables for a terminal."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.store.metrics import find_metric
from reports.page import Page, Section
from reports.summary import DEVICE, FLOAT, Row
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
    return lines


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
    table.add_column("n", justify="right", no_wrap=True)
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in _cells(row, metrics)))
    return table


def _cells(row: Row, metrics: tuple[str, ...]) -> list[str]:
    workload = f" {_line(row.label)}" if row.label else ""
    return [
        f"{_line(row.subject.model)}\n{_line(row.subject.target)}{workload}",
        *(_speed(row, key) for key in metrics),
        *_perplexity(row),
        str(row.n) if row.n else _NOTHING,
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
