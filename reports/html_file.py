"""Page as one self-contained HTML file, without scripts or network access."""

import functools
import importlib.metadata
from datetime import datetime
from pathlib import Path

import jinja2

from buildlib.files import atomic_write_bytes
from harness.console import visible
from harness.results.identity import device_name, place
from harness.results.metrics import METRICS, Metric
from harness.results.records import Run
from harness.words import pluralize
from reports import page, text
from reports.errors import OutputPathError, ReportWriteError
from reports.page import Page

TEMPLATE = "report.html.j2"


def render(page: Page, generated_at: datetime) -> str:
    """Render the HTML; only `generated_at` varies for the same page."""
    return _template().render(
        page=page,
        generated_at=generated_at,
        version=importlib.metadata.version("qnnfarm"),
    )


@functools.cache
def _template() -> jinja2.Template:
    """The compiled template: everything that it prints is escaped, and made visible before that."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,  # else it is markup
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "moment": text.moment,
        "short_time": text.short_time,
        "percent": text.percent,
        "shorten": text.shorten,
        "pluralize": pluralize,
        "positions": text.positions,
        "graphs": text.graphs,
        "device_name": device_name,
        "place": place,
        "measured": _measured,
        "figures": page.brief_speeds,
        "condition": text.condition,
        "checked": _checked,
    }
    return environment.get_template(TEMPLATE)


def _measured(run: Run) -> tuple[Metric, ...]:
    """The metrics of a run, in the order of the registry."""
    keys = {measurement.metric for measurement in run.measurements}
    return tuple(metric for key, metric in METRICS.items() if key in keys)


def _checked(run: Run) -> str | None:
    """Describe the output check; None for runs without generated output."""
    if run.kind == "perplexity":
        return None
    words = {"none": "unchecked", "passed": "checked", "failed": "wrong"}[run.check.outcome]
    return f"{words}: {run.check.reason}" if run.check.reason else words


def check_path(path: Path) -> None:
    """Refuse a path that cannot become a file; folders are not created.

    Raises:
        OutputPathError: says why.
    """
    try:
        if path.is_dir():
            raise OutputPathError(str(path), "it is a folder")
        if not path.absolute().parent.is_dir():
            raise OutputPathError(str(path), "its folder does not exist")
    except OSError as error:
        raise OutputPathError(str(path), error.strerror or str(error)) from error


def write(html: str, path: Path) -> None:
    """Replace the file atomically.

    Raises:
        OutputPathError: see `check_path`.
        ReportWriteError: it cannot be written, as on a full disk.
    """
    check_path(path)
    try:
        atomic_write_bytes(path, html.encode())
    except OSError as error:
        raise ReportWriteError(str(path), error.strerror or str(error)) from error
