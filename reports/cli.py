"""The command `qnnfarm report`. Heavy imports wait until it runs, so that `--help` stays quick."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from reports.errors import OutputIsDatabaseError


def report(
    db: Annotated[
        str, typer.Option("--db", help="Results database: a file, or an SQLAlchemy URL.")
    ] = "results.db",
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The HTML file to write; its folder must exist."),
    ] = Path("report.html"),
    since: Annotated[
        str | None,
        typer.Option(help="Only runs since then: 7d, 12h, or a date such as 2026-05-31 (UTC)."),
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
    as_json: Annotated[  # noqa: FBT002  typer passes it by name
        bool, typer.Option("--json", help="Print the summary as JSON.")
    ] = False,
) -> None:
    """Write the results as one self-contained HTML file, and print their summary."""
    from harness.console import answers, print_json
    from harness.moments import parse_moment
    from harness.results.store import RunFilter
    from reports import document, html_file, page, terminal

    if _same_file(db, out):
        raise OutputIsDatabaseError(str(out))
    html_file.check_path(out)
    wanted = RunFilter(
        since=None if since is None else parse_moment(since, "--since"),
        plan=plan,
        container=container,
        labels=label or (),
    )
    composed = page.compose(page.load(db, wanted))
    html_file.write(html_file.render(composed, datetime.now(UTC)), out)
    if as_json:
        summary = document.to_document(composed, str(out))
        print_json(summary)
        return
    console = answers()
    terminal.print_page(composed, console)
    console.print(f"Report: {out}")


def _same_file(db: str, out: Path) -> bool:
    path = Path(db.removeprefix("sqlite:///"))
    return out.resolve() == path.resolve()
