"""The command `qnnfarm report`. Heavy imports wait until it runs, so that `--help` stays quick."""

from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buildlib.error_base import nearest_names
from harness.words import pluralize
from reports.errors import ReportError

if TYPE_CHECKING:
    from reports.figures import Figure
    from reports.page import Page


class FigureFormat(StrEnum):
    """Formats of a figure's values."""

    CSV = "csv"
    MARKDOWN = "md"


def report(
    db: Annotated[
        str, typer.Option("--db", help="Results database: a SQLite file, or a database URL.")
    ] = "results.db",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The HTML file to write; its folder must exist.")
    ] = Path("report.html"),
    since: Annotated[
        str | None,
        typer.Option(help="Only runs since then: 7d, 12h, or a date such as 2026-05-31 (UTC)."),
    ] = None,
    night: Annotated[
        str | None,
        typer.Option(
            metavar="DATE",
            help="The report of an earlier morning: only the nights that began on this date (UTC), "
            "with the heat of their devices, judged by what was measured until then.",
        ),
    ] = None,
    plan: Annotated[str | None, typer.Option(help="Only runs of the plan of this name.")] = None,
    container: Annotated[
        str | None,
        typer.Option(
            help="Only a container: a model, with its precision if you like, as in 'my-llama "
            "W4A16', or the start of a hash."
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="Only runs with a label: KEY=VALUE, KEY, or a pattern of a cell's, as in "
            "'tiny/*'; may be repeated."
        ),
    ] = None,
    baseline: Annotated[
        str,
        typer.Option(
            metavar="REF",
            help="Judge the newest results against this, as `qnnfarm gate` does: previous, a date, "
            "a branch, a commit.",
        ),
    ] = "",
    site: Annotated[
        Path | None,
        typer.Option(
            help="Write a site into this folder instead: a page for each run, and shared scripts."
        ),
    ] = None,
    public: Annotated[
        Path | None,
        typer.Option(
            help="Write a site to publish into this folder instead, with every repetition as CSV "
            "and Parquet, without serials, hosts, paths and texts."
        ),
    ] = None,
    pool: Annotated[
        Path | None,
        typer.Option(
            help="Pool whose devices' health is shown; by default ./pool.yaml, if it is there."
        ),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(help="Print the values of one figure of the report, and write nothing."),
    ] = None,
    beside: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="Print what differs between two runs, and write nothing.", metavar="RUN RUN"
        ),
    ] = None,
    format: Annotated[  # noqa: A002  the option's name
        FigureFormat, typer.Option(help="Format of `--figure` and `--beside`.")
    ] = FigureFormat.MARKDOWN,
    as_json: Annotated[  # noqa: FBT002  typer passes it by name
        bool, typer.Option("--json", help="Print the summary as JSON.")
    ] = False,
) -> None:
    """Write the results as one self-contained HTML file, and print their summary.

    Example: qnnfarm report --db results.db --out report.html
    """
    from harness.console import answers, print_json
    from harness.moments import parse_moment
    from harness.results.store import RunFilter
    from reports import devices, document, html_file, page, site_folder, terminal

    if beside is not None:
        _print(page.compare_two(db, *beside), format)
        return
    if figure is None and site is None and public is None:
        if _same_file(db, out):
            raise ReportError(f"{out} is the results database: give --out another name")
        html_file.check_path(out)
    if night is not None and (public is not None or since is not None or baseline):
        raise ReportError("--night goes with neither --since, --baseline nor --public")
    run_filter = RunFilter(
        since=None if since is None else parse_moment(since, "--since"),
        plan=plan,
        container=container,
        labels=label or (),
    )
    if public is not None:
        count = site_folder.write_public(db, run_filter, public, datetime.now(UTC))
        target = public / "index.html"
        if as_json:
            print_json({"report": str(target), "runs": count})
        else:
            answers().print(f"Report of {pluralize(count, 'run')} for everybody: {target}")
        return
    day = None if night is None else parse_moment(night, "--night").astimezone(UTC).date()
    health = devices.read_device_health(pool)
    results = page.load(db, run_filter, health, baseline, day)
    given = [("--since", since), ("--night", night), ("--plan", plan), ("--container", container)]
    given += [("--baseline", baseline), *(("--label", one) for one in label or ())]
    options = tuple(word for name, value in given if value for word in (name, value))
    composed = page.compose(replace(results, options=options))
    if figure is not None:
        _print_figure(composed, figure, format)
        return
    target = out if site is None else site / "index.html"
    if site is None:
        html_file.write(html_file.render(composed, datetime.now(UTC)), out)
    else:
        site_folder.write(composed, db, site, datetime.now(UTC))
    if as_json:
        print_json(document.to_document(composed, str(target)))
        return
    console = answers()
    terminal.print_page(composed, console)
    console.print(f"Report: {target}")


def _print_figure(composed: "Page", name: str, chosen: FigureFormat) -> None:
    figures = {one.id: one for one in composed.figures}
    if name not in figures:
        near = " or ".join(nearest_names(name, figures, 3, least=0)) or "nothing"
        raise ReportError(f"none of the report's {len(figures)} figures is {name!r}: try {near}")
    _print(figures[name], chosen)


def _print(figure: "Figure", chosen: FigureFormat) -> None:
    text = figure.to_csv() if chosen is FigureFormat.CSV else figure.to_markdown()
    typer.echo(text, nl=False)


def _same_file(db: str, out: Path) -> bool:
    path = Path(db.removeprefix("sqlite:///"))
    return out.resolve() == path.resolve()
