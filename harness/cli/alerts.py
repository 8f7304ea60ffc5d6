"""`qnnfarm alerts`: losses in histories, and their states."""

from typing import Annotated

import typer

from harness.cli.arguments import Database, Json
from harness.console import answers, print_json, print_rows
from harness.results.alerts import (
    STATES,
    UNSETTLED,
    Alert,
    AlertState,
    list_alerts,
    review_new,
    set_state,
)
from harness.results.store import ResultsStore
from harness.words import pluralize

app = typer.Typer(
    help="List the losses in histories, and settle them. Each is reported once.",
    no_args_is_help=True,
)

Ids = Annotated[list[str], typer.Argument(metavar="ID", help="Ids of alerts, or beginnings.")]
Note = Annotated[str, typer.Option("--note", help="Reason, in a few words.")]
_COMMIT = 10


@app.command("ls")
def ls(
    db: Database = "results.db",
    state: Annotated[AlertState | None, typer.Option(help="Only those in this state.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Fixed and expected ones, too.")] = False,
    json: Json = False,
) -> None:
    """Judge new results in the histories, and list the alerts that are open or acknowledged.

    Example: qnnfarm alerts ls --state open
    """
    with ResultsStore.open_existing(db) as store:
        review_new(store)
        states = tuple(UNSETTLED) if state is None else (state,)
        alerts = list_alerts(store, STATES if show_all and state is None else states)
    _show(alerts, json=json)


@app.command("acknowledge")
def acknowledge(ids: Ids, db: Database = "results.db", note: Note = "", json: Json = False) -> None:
    """Mark alerts as being worked on.

    Example: qnnfarm alerts acknowledge ID --note "bisecting"
    """
    _set(db, ids, "acknowledged", note, json=json)


@app.command("fix")
def fix(ids: Ids, db: Database = "results.db", note: Note = "", json: Json = False) -> None:
    """Mark alerts as fixed; a recovery in the history does so by itself.

    Example: qnnfarm alerts fix ID --note "reverted"
    """
    _set(db, ids, "fixed", note, json=json)


@app.command("expect")
def expect(ids: Ids, db: Database = "results.db", note: Note = "", json: Json = False) -> None:
    """Mark alerts as expected: the new level is the right one.

    Example: qnnfarm alerts expect ID --note "a larger model"
    """
    _set(db, ids, "expected", note, json=json)


@app.command("reopen")
def reopen(ids: Ids, db: Database = "results.db", note: Note = "", json: Json = False) -> None:
    """Open alerts again.

    Example: qnnfarm alerts reopen ID
    """
    _set(db, ids, "open", note, json=json)


def _set(db: str, ids: list[str], state: AlertState, note: str, *, json: bool) -> None:
    with ResultsStore.open_existing(db) as store:
        review_new(store)  # a report names alerts, too
        alerts = set_state(store, ids, state, note=note)
    _show(alerts, json=json)


def _show(alerts: tuple[Alert, ...], *, json: bool) -> None:
    if json:
        print_json([alert.facts for alert in alerts])
        return
    rows = [
        [
            alert.id,
            alert.state,
            f"{alert.began_at:%Y-%m-%d}",
            alert.metric.label,
            alert.loss,
            _commits(alert),
            alert.note,
            alert.name,
        ]
        for alert in alerts
    ]
    headings = ("alert", "state", "since (UTC)", "metric", "change", "commits", "note", "of")
    if rows:
        print_rows(headings, rows, right={"change"})
    answers().print(pluralize(len(rows), "alert"))


def _commits(alert: Alert) -> str:
    commits = [commit[:_COMMIT] for commit in (alert.good_commit, alert.bad_commit) if commit]
    return "..".join(dict.fromkeys(commits))
