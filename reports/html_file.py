"""Page as HTML: one self-contained file, or a site with a page for each run.

Nothing is loaded from elsewhere. Everything that is printed is escaped, and made visible before
that. The only scripts are ours and Vega's: a Content Security Policy names them by their hashes, so
that no other script would run if one slipped in.
"""

import base64
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from buildlib.files import atomic_write_bytes
from buildlib.paths import default_cache_root
from harness.console import visible
from harness.results import gate_formats
from harness.results.gate import GateCell
from harness.results.identity import describe_clocks, device_name, place
from harness.results.metrics import METRICS, Metric, summarise
from harness.results.provenance import own_version
from harness.results.records import Run
from harness.words import NO_VALUE, percent, pluralize, stand_in
from reports import figures, text
from reports.changes import SPARK_POINTS
from reports.errors import cannot_write
from reports.figures import Figure, Spec, Value
from reports.history import commit_range
from reports.page import Page, RunPage, brief_results

TEMPLATE = "report.html.j2"
PAGES = {
    "overview": "Overview",
    "history": "History",
    "curves": "Curves",
    "runs": "Runs",
    "compare": "Side by side",
    "devices": "Devices",
}
_GLOBALS = "window.vegaEmbed = vegaEmbed;"
MOST_POINTS, FEWEST_POINTS = 400, 40
"""Nights of a history in a report; of more, the newest are kept whole and the others thinned."""
ALL_POINTS = 11_000
"""Nights of all histories in a report; where there are more, each shows fewer."""
SPARK_WIDTH, SPARK_HEIGHT = 100.0, 24.0


@dataclass(frozen=True, slots=True)
class Assets:
    """Style and scripts of all pages."""

    style: str
    script: str
    vega: str

    def policy(self) -> str:
        """Return the Content Security Policy of a page with these assets inside."""
        scripts = " ".join(f"'sha256-{_digest(one)}'" for one in (self.vega, self.script))
        return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:"


SITE_POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file: 'unsafe-inline'; "
    "img-src data:"
)


@functools.cache
def load_assets() -> Assets:
    """Read style and scripts."""
    return Assets(read_template("style.css"), read_template("report.js"), vega_script())


def read_template(name: str, package: str = "reports") -> str:
    """Read a file of a package's templates as it is: a style or a script."""
    return (importlib.resources.files(package) / "templates" / name).read_text(encoding="utf-8")


def vega_script() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, from vl-convert.

    Bundling them takes vl-convert some seconds, so the bundle is kept in the cache.
    """
    version = importlib.metadata.version("vl-convert-python")
    path = default_cache_root() / "charts" / f"vega-{version}.js"
    try:
        bundle = path.read_text(encoding="utf-8")
    except OSError:
        import vl_convert

        bundle = vl_convert.javascript_bundle(_GLOBALS)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(path, bundle.encode())
        except OSError:
            pass  # a cache that cannot be written only costs time
    escaped = bundle.replace("</script", "<\\/script")
    return f"(()=>{{{escaped}\n}})();"


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@dataclass(frozen=True, slots=True)
class Addresses:
    """Targets of links: to an anchor of one file, or to another file of a site.

    Attributes:
        runs: the runs that have a page, or a line in a list of one file.
        depth: folders between a page of a site and its root.
    """

    runs: frozenset[str]
    site: bool = False
    depth: int = 0

    def page(self, key: str, anchor: str = "") -> str:
        """Return the address of a page, or of an anchor on it."""
        if not self.site:
            return f"#{anchor or key}"
        name = "index" if key == "overview" else key
        return f"{'../' * self.depth}{name}.html{f'#{anchor}' if anchor else ''}"

    def run(self, run_id: str) -> str | None:
        """Return the address of a run; None if it has none."""
        if run_id not in self.runs:
            return None
        return f"{'../' * self.depth}runs/{run_id}.html" if self.site else f"#run-{run_id}"

    def asset(self, name: str) -> str:
        """Return the address of a shared file of a site."""
        return f"{'../' * self.depth}assets/{name}"


def render(page: Page, generated_at: datetime) -> str:
    """Render one self-contained file; only `generated_at` varies for the same page."""
    runs = (*page.results.listing.full, *page.results.listing.brief)
    return _render(
        page,
        generated_at,
        Addresses(frozenset(run.id for run in runs)),
        run_pages=page.run_pages,
        current="overview",
        policy=load_assets().policy(),
    )


def render_site(page: Page, generated_at: datetime) -> Iterator[tuple[str, str]]:
    """Render the pages of a site but those of its runs, as pairs of a name and its content."""
    assets = load_assets()
    yield "assets/style.css", assets.style
    yield "assets/report.js", assets.script
    yield "assets/vega.js", assets.vega
    at = Addresses(frozenset(one.run.id for one in page.results.measured), site=True)
    for key, _ in _pages(page, at):
        html = _render(page, generated_at, at, run_pages=(), current=key, policy=SITE_POLICY)
        yield at.page(key), html


def render_site_run(page: Page, one: RunPage, generated_at: datetime) -> tuple[str, str]:
    """Render the page of one run of a site."""
    ids = frozenset(one_run.run.id for one_run in page.results.measured)
    at = Addresses(ids, site=True, depth=1)
    html = _render(page, generated_at, at, run_pages=(one,), current="run", policy=SITE_POLICY)
    return f"runs/{one.run.id}.html", html


def _render(
    page: Page,
    generated_at: datetime,
    at: Addresses,
    *,
    run_pages: Sequence[RunPage],
    current: str,
    policy: str,
) -> str:
    means = {one.run.id: one for one in page.results.measured}
    pages = _pages(page, at)
    template = _environment().get_template(TEMPLATE)
    return template.render(
        page=page,
        at=at,
        assets=load_assets(),
        pages=pages if page.results.measured else pages[:1],
        current=current,
        run_pages=run_pages,
        policy=policy,
        title=page.title if current == "overview" else PAGES.get(current, "Run"),
        has_charts=bool(page.results.measured),
        command=lambda figure: reproduce(figure, page),
        specs=Specs(),
        means=lambda run_id: brief_results(means[run_id]),
        trend=_Trends(page),
        generated_at=generated_at,
        version=own_version(),
    )


def _pages(page: Page, at: Addresses) -> list[tuple[str, str]]:
    """Return the pages of a report, and the words for them."""
    left_out = {"compare"} if at.site else set()
    if page.results.is_public:  # nobody else acts on its losses and devices
        left_out |= {"history", "devices"}
    return [(key, words) for key, words in PAGES.items() if key not in left_out]


class _Trends:
    """The newest values of the series that a run belongs to, for the sparkline of a gate's cell."""

    def __init__(self, page: Page) -> None:
        self._found = {
            (session.head.id, series.metric.key): series
            for series in page.results.series
            for night in series.nights[-1:]
            for session in night.sessions
        }

    def __call__(self, cell: GateCell) -> Sequence[float]:
        """Return the values, oldest first; none if the runs have no history."""
        keys = ((run_id, cell.metric.key) for run_id in cell.runs)
        series = next((self._found[key] for key in keys if key in self._found), None)
        return [night.mean for night in series.nights[-SPARK_POINTS:]] if series else []


class Specs:
    """Charts of one HTML file: many figures share one specification."""

    def __init__(self) -> None:
        self.found: dict[str, Spec] = {}
        self._keys: dict[str, str] = {}

    def __call__(self, figure: Figure) -> str:
        """Return the id of the specification of a figure."""
        content = json.dumps(figure.spec)
        key = self._keys.setdefault(content, f"spec-{len(self._keys)}")
        self.found[key] = figure.spec
        return key


def thin(figures: Sequence[Figure]) -> tuple[Figure, ...]:
    """Keep so many nights of each history that a report stays small.

    The newest half of them is kept whole, and of the others every n-th and those with a change.
    """
    most = max(min(MOST_POINTS, ALL_POINTS // max(len(figures), 1)), FEWEST_POINTS)
    return tuple(replace(one, rows=_thin(one, most)) for one in figures)


def _thin(figure: Figure, most: int) -> tuple[tuple[Value, ...], ...]:
    rows = figure.rows
    if len(rows) <= most:
        return rows
    older, newest = rows[: -(most // 2)], rows[-(most // 2) :]
    step = -(-len(older) // (most // 2))
    change = next(n for n, column in enumerate(figure.columns) if column.key == "change")
    thinned = (row for n, row in enumerate(older) if n % step == 0 or row[change] is not None)
    return (*thinned, *newest)


def reproduce(figure: Figure, page: Page) -> str:
    """Return the command that prints the values of a figure."""
    words = ("--db", page.results.location, *page.results.options, "--figure", figure.id)
    return shlex.join(("qnnfarm", "report", *words, "--format", "csv"))


def make_environment(package: str) -> jinja2.Environment:
    """Return a package's templates, which escape all that they print, made visible before that."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,  # else it is markup
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"moment": text.moment, "pluralize": pluralize, "prose": _prose}
    return environment


def _prose(words: str) -> Markup:
    """Escape text, and mark up our commands that stand in it between backticks; names may, too."""
    return Markup(re.sub("`(qnnfarm [^`]+)`", r"<code>\1</code>", str(escape(visible(words)))))  # noqa: S704


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the templates of a report."""
    environment = make_environment("reports")
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
    environment.globals["NO_VALUE"] = NO_VALUE
    environment.filters |= {
        "short_time": text.short_time,
        "commits": commit_range,
        "percent": percent,
        "stand_in": stand_in,
        "shorten": text.shorten,
        "positions": text.POSITIONS.__getitem__,
        "graphs": text.graphs,
        "device_name": device_name,
        "clocks": describe_clocks,
        "place": place,
        "measured": _measured,
        "mean": _mean,
        "raw": figures.raw,
        "spark_points": spark_points,
        "thin": thin,
        "condition": text.condition,
        "checked": _checked,
        "cells": gate_formats.cells_of,
        "sides": gate_formats.sides,
    }
    return environment


def spark_points(values: Sequence[float]) -> str:
    """Place values on a sparkline as an SVG polyline takes them."""
    low, high = min(values), max(values)
    height, step = high - low or 1.0, SPARK_WIDTH / (len(values) - 1)
    return " ".join(
        f"{index * step:.1f},{SPARK_HEIGHT - 2 - (SPARK_HEIGHT - 4) * (value - low) / height:.1f}"
        for index, value in enumerate(values)
    )


def _measured(run: Run) -> tuple[Metric, ...]:
    """Return the metrics of a run, in the order of the registry."""
    keys = {measurement.metric for measurement in run.measurements}
    return tuple(metric for key, metric in METRICS.items() if key in keys)


def _mean(run: Run, key: str) -> float | None:
    stats = summarise([run.values(key)])
    return None if stats is None else stats.mean


def _checked(run: Run) -> str | None:
    """Describe the output check; None for runs without generated output."""
    if run.kind == "perplexity" or (run.kind == "evaluate" and run.check.outcome == "none"):
        return None
    words = {"none": "unchecked", "passed": "checked", "failed": "wrong"}[run.check.outcome]
    return f"{words}: {run.check.reason}" if run.check.reason else words


def check_path(path: Path) -> None:
    """Refuse a path that cannot become a file; folders are not created."""
    try:
        if path.is_dir():
            raise cannot_write(path, "it is a folder")
        if not path.absolute().parent.is_dir():
            raise cannot_write(path, "its folder does not exist")
    except OSError as error:
        raise cannot_write(path, error) from error


def write(html: str, path: Path) -> None:
    """Replace the file atomically."""
    check_path(path)
    try:
        atomic_write_bytes(path, html.encode())
    except OSError as error:
        raise cannot_write(path, error) from error
