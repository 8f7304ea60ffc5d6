"""One figure and one word: random databases, in everything that prints a verdict."""

import json
import re
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import typer
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from harness.cli.alerts import ls
from harness.cli.gate import gate
from harness.cli.history import history
from harness.plans.plan_file import Plan
from harness.results import alerts
from harness.results.records import new_run_id
from harness.results.store import ResultsStore
from harness.words import percent
from plugins.nightly.steps import PlanSteps
from reports.cli import report
from tests.harness.results.places import write_runs
from tests.reports.conftest import START, Sample
from tests.reports.test_history import night

SAMPLES = (
    Sample("SM8750", emulator=False, model="Llama-3.2-1B"),
    Sample("SM8650", emulator=True, model="Qwen3-0.6B"),
)
NIGHTS = 22
MINUS = "\N{MINUS SIGN}"
app = typer.Typer()
for command in (ls, gate, history, report):
    app.command(command.__name__)(command)

factors = st.sampled_from([1.0, 0.96, 0.93, 0.9, 0.8, 0.6, 1.15])
steps = st.lists(st.tuples(st.integers(10, NIGHTS - 1), factors), max_size=3)
databases = st.lists(steps, min_size=1, max_size=2)
states = st.lists(st.sampled_from(alerts.STATES), min_size=1, max_size=4)


def say(*words: str | Path, code: int | None = 0) -> str:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, [str(word) for word in words])
    assert code is None or done.exit_code == code, done.output
    return done.stdout


def fill(db: Path, series: list[list[tuple[int, float]]]) -> None:
    runs = []
    for seed, (sample, changes) in enumerate(zip(SAMPLES, series, strict=False)):
        for number in range(NIGHTS):
            factor = 1.0
            for began, change in changes:
                factor *= change if number >= began else 1.0
            made = night(number, factor, sample=sample, seed=seed, sessions=1)
            runs += [run.model_copy(update={"id": new_run_id()}) for run in made]
    with ResultsStore.open(db) as store:
        write_runs(store, sorted(runs, key=lambda run: run.created_at))


SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])


@settings(SETTINGS, phases=[Phase.explicit])
@given(databases, states, st.booleans())
@example(series=[[(15, 0.6), (18, 0.93)]], settled=["acknowledged", "open"], window=True)
def test_a_loss_is_the_same_everywhere(
    series: list[list[tuple[int, float]]], settled: list[alerts.AlertState], window: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder) / "results.db", series, settled, window=window)


@pytest.mark.slow
@settings(SETTINGS, max_examples=60)
@given(databases, states, st.booleans())
def test_a_loss_is_the_same_in_many_databases(
    series: list[list[tuple[int, float]]], settled: list[alerts.AlertState], window: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder) / "results.db", series, settled, window=window)


def check(
    db: Path,
    series: list[list[tuple[int, float]]],
    settled: list[alerts.AlertState],
    *,
    window: bool,
) -> None:
    fill(db, series)
    with ResultsStore.open(db) as store:
        for number, alert in enumerate(alerts.review_new(store)):
            if alert.state == "open":
                alerts.set_state(store, [alert.id], settled[number % len(settled)])
    listed = json.loads(say("ls", "--all", "--db", db, "--json"))
    table = say("ls", "--all", "--db", db)
    shown = ("--since", f"{START + timedelta(days=NIGHTS - 3):%Y-%m-%d}") if window else ()
    page = db.with_suffix(".html")
    document = json.loads(say("report", "--db", db, "-o", page, *shown, "--json"))
    printed = say("report", "--db", db, "-o", page, *shown)
    html = page.read_text()
    with ResultsStore.open(db) as store:
        stored = alerts.list_alerts(store)
    causes = {
        state: len(alerts.group_alerts(one for one in stored if one.state == state))
        for state in alerts.STATES
    }
    check_headline(document, printed, html, listed, causes)

    changes = {change["alert"]: change for change in document["changes"] if change["alert"]}
    told = json.loads(say("history", "decode", "--db", db, "--json"))
    words = say("history", "decode", "--db", db, "--nights", str(NIGHTS))
    for alert in listed:
        figure, day = percent(alert["ratio"] - 1), alert["began_at"][:10]
        (line,) = [line for line in table.splitlines() if line.startswith(alert["id"])]
        assert figure in line
        assert day in line
        (same,) = [one for one in document["alerts"] if one["id"] == alert["id"]]
        facts = ("ratio", "began_at", "state", "name", "bad_commit")
        assert [same[key] for key in facts] == [alert[key] for key in facts]
        if alert["state"] in {"open", "acknowledged"}:
            change = changes[alert["id"]]
            assert (change["ratio"], change["since"]) == (alert["ratio"], alert["began_at"])
            assert change["status"] == {"open": "regressed"}.get(alert["state"], alert["state"])
            assert change["now"] / change["before"] == pytest.approx(alert["ratio"])
            row = html[html.index(f"alert {alert['id']}", html.index("data-change")) - 3000 :]
            assert figure in row.replace(MINUS, "-")
        if alert["metric"] == "decode_tokens_per_s":
            (own,) = [one for one in told if one["series"] == alert["series"]]
            (found,) = [one for one in own["changes"] if one["began"] == alert["began_at"]]
            assert found["ratio"] == alert["ratio"]
            assert own["name"] == alert["name"]
            assert f"▲ loss: {figure} from here on" in words
    check_night(db, listed)
    check_gate(db, listed)


def check_headline(
    document: dict[str, Any],
    printed: str,
    html: str,
    listed: list[dict[str, Any]],
    causes: dict[alerts.AlertState, int],
) -> None:
    """The open losses of one cause are one regression; green is only what is well."""
    words, level = document["headline"]["words"], document["headline"]["level"]
    assert words in printed
    assert words in html
    found = re.search(r"(?<!suspected )(?<!acknowledged )\b(\d+) regression", words)
    assert (int(found[1]) if found else 0) == causes["open"]
    known = re.search(r"(\d+) acknowledged", words)
    assert (int(known[1]) if known else 0) == causes["acknowledged"]
    assert (level == "bad") == bool(causes["open"])
    if causes["acknowledged"] or "suspected" in words:
        assert level in {"bad", "doubt"}
    for line in document["headline"]["lines"]:
        for number, name in re.findall(r"([-+][\d.]+%) \(alert (\w+)\)", line):
            (alert,) = [one for one in listed if one["id"] == name]
            assert number == percent(alert["ratio"] - 1)
            assert f"since {alert['began_at'][:10]}" in line


def check_night(db: Path, listed: list[dict[str, Any]]) -> None:
    """Nightly tells of the open ones."""
    regressions = PlanSteps(Plan.model_construct(), db, str(db)).judge()
    assert {one.id for one in regressions} == {x["id"] for x in listed if x["state"] == "open"}
    for one in regressions:
        (alert,) = [each for each in listed if each["id"] == one.id]
        figure = percent(alert["ratio"] - 1)
        assert str(one).startswith(
            f"{alert['metric']} of {alert['name']} {figure} since {alert['began_at'][:10]}"
        )


def check_gate(db: Path, listed: list[dict[str, Any]]) -> None:
    """A gate has one word and figure for each cell, and a loss that began since is one."""
    junit, markdown = db.with_suffix(".xml"), db.with_suffix(".md")
    baseline = ("gate", "--baseline", f"{START + timedelta(days=12):%Y-%m-%d}", "--db", db)
    files = ("--junit", junit, "--markdown", markdown)
    judged = json.loads(say(*baseline, *files, "--json", code=None))
    table, comment = say(*baseline, code=None), markdown.read_text()
    page = db.with_suffix(".html")
    reported = json.loads(
        say("report", "--db", db, "-o", page, "--baseline", baseline[2], "--json")
    )
    assert reported["gate"] == judged
    html = page.read_text()
    cases = list(ET.fromstring(junit.read_text()).iter("testcase"))  # noqa: S314
    for cell, case in zip(judged["cells"], cases, strict=True):
        verdict, reason = cell["verdict"], cell["reason"]
        assert f"{cell['cell']}, " in table or verdict == "no difference seen"
        figure = percent(cell["ratio"] - 1)
        assert [figure in text for text in (table, comment)] == [True, True]
        assert figure in html.replace(MINUS, "-")
        assert f"**{verdict}**: " in comment
        (said, *_) = [*case.iter("failure"), *case.iter("error"), *case.iter("system-out")]
        assert {"failure": "regressed", "error": "no verdict"}.get(said.tag, verdict) == verdict
        assert reason in (said.text or "")
        for one in listed:
            if one["id"] in cell["alerts"]:
                assert f"alert {one['id']}: {percent(one['ratio'] - 1)} since" in reason
                assert one["state"] != "open" or verdict in {"regressed", "improved"}
