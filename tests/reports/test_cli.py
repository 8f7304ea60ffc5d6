"""`qnnfarm report`."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from harness.errors import MissingStoreError, NoBaselineError, NotAStoreError
from harness.results import alerts, gate_formats
from harness.results.gate import judge_gate
from harness.results.history import read_series
from harness.results.records import Run
from harness.results.store import ResultsStore
from reports.cli import report
from reports.errors import OutputIsDatabaseError, OutputPathError
from tests.reports.test_history import nights

MakeStore = Callable[[Sequence[Run]], Path]
Samples = Mapping[str, list[Run]]


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(report)
    return made


def test_it_writes_the_file_and_prints_the_summary(
    app: typer.Typer, make_store: MakeStore, samples: Samples, tmp_path: Path
) -> None:
    db, out = make_store(samples["mixed"]), tmp_path / "report.html"
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--db", str(db), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "Emulator speed is not hardware speed." in result.output
    assert "17.22" in result.output
    assert "25.565" in result.output
    assert "+0.33%" in result.output
    assert "interrupted" in result.output
    assert (
        "! Llama-3.2-1B W8A16, SM8650, pp64+tg16: Decode: the standard deviation" in result.output
    )
    assert result.output.rstrip().endswith(str(out))
    assert out.read_text().startswith("<!doctype html>")


def test_json_is_for_programs(
    app: typer.Typer, make_store: MakeStore, samples: Samples, tmp_path: Path
) -> None:
    db, out = make_store(samples["mixed"]), tmp_path / "report.html"
    result = CliRunner().invoke(app, ["--db", str(db), "--out", str(out), "--json"])
    document = json.loads(result.output)
    assert document["version"] == 1
    assert document["report"] == str(out)
    assert document["runs"] == len(samples["mixed"])
    found = {(row["target"], row["emulator"]): row for row in document["rows"]}
    decode = found["SM8750:emulator", True]["metrics"]["decode_tokens_per_s"]
    assert (decode["repetitions"], decode["sessions"]) == (3, 1)
    assert found["SM8750", False]["perplexity"]["perplexity_float"] == 12.91
    assert {gap["status"] for gap in document["gaps"]} == {"failed", "interrupted"}
    assert document["perplexities"][0]["definition"]["positions"] == "first_cl_minus_ar"


def test_an_empty_store_is_no_error(
    app: typer.Typer, make_store: MakeStore, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["--db", str(make_store([])), "--out", str(out)])
    assert result.exit_code == 0
    assert out.exists()


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ((), 3),
        (("--since", "2026-11-20T10:00"), 2),
        (("--since", "36500d"), 3),
        (("--label", "team=camera"), 1),
        (("--plan", "nightly"), 1),
        (("--container", "tiny_llama W8A16"), 3),
        (("--container", "tiny_llama W8A16", "--plan", "nightly"), 1),
        (("--container", "other"), 0),
    ],
)
def test_a_report_of_some_runs(
    app: typer.Typer,
    make_store: MakeStore,
    samples: Samples,
    tmp_path: Path,
    options: tuple[str, ...],
    count: int,
) -> None:
    first, second, third = samples["emulator"][:3]
    second = second.model_copy(update={"labels": {"team": "camera"}})
    db = make_store([first, second, third.model_copy(update={"plan": "nightly"})])
    arguments = ["--db", str(db), "--out", str(tmp_path / "r.html"), "--json", *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["runs"] == count


def test_hostile_names_do_not_speak_to_the_terminal(
    app: typer.Typer, make_store: MakeStore, samples: Samples, tmp_path: Path
) -> None:
    run = samples["emulator"][0]
    evil = run.container.model_copy(update={"model": "\x1b]0;x\x07[bold]m[/nope]"})
    db = make_store([run.model_copy(update={"container": evil})])
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["--db", str(db), "--out", str(tmp_path / "r.html")]
    )
    assert result.exit_code == 0, result.output
    assert "\x07" not in result.output
    assert "[bold]m[/nope]" in result.output


def test_emulator_speeds_are_not_called_unsteady_and_all_else_is_said(
    app: typer.Typer, make_store: MakeStore, samples: Samples, tmp_path: Path
) -> None:
    run = samples["emulator"][0]
    shaky = [
        m.model_copy(update={"value": m.value * (1 + m.repetition)})
        if m.metric in {"prefill_tokens_per_s", "decode_tokens_per_s", "ttft_s"}
        else m
        for m in run.measurements
    ]
    unchecked = run.model_copy(update={"measurements": tuple(shaky), "generated_text": None})
    arguments = ["--db", str(make_store([unchecked])), "--out", str(tmp_path / "r.html")]
    output = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments).output
    assert "standard deviation" not in output
    assert "the output was compared neither" in output


def test_wrong_use_is_refused_before_anything_is_written(
    make_store: MakeStore, samples: Samples, tmp_path: Path
) -> None:
    db = make_store(samples["emulator"])
    before = db.read_bytes()
    with pytest.raises(OutputIsDatabaseError) as caught:
        report(db=str(db), out=tmp_path / "." / db.name)
    assert caught.value.exit_code == 2
    assert db.read_bytes() == before
    with pytest.raises(MissingStoreError):
        report(db=str(tmp_path / "none.db"), out=tmp_path / "report.html")
    with pytest.raises(OutputPathError):
        report(db=str(db), out=tmp_path / "nope" / "report.html")
    assert not (tmp_path / "nope").exists()
    (tmp_path / "text.db").write_text("no database, but long enough to look like one")
    with pytest.raises(NotAStoreError):
        report(db=str(tmp_path / "text.db"), out=tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "none.db").exists()


def test_the_page_the_terminal_and_json_have_one_verdict(
    app: typer.Typer, make_store: MakeStore, tmp_path: Path
) -> None:
    """That of `qnnfarm alerts`, and what somebody settled there is no fresh regression."""
    db, out = make_store(nights([1.0] * 20 + [0.8] * 3)), tmp_path / "r.html"
    arguments = ["--db", str(db), "--out", str(out)]

    def told() -> tuple[str, str, dict[str, Any]]:
        said = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments).output
        document = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
        return said, out.read_text(), document

    said, html, document = told()
    assert document["headline"]["words"] == "3 regressions"
    assert said.startswith("3 regressions\n")
    assert '<p class="verdict-words">3 regressions</p>' in html
    assert {one["status"] for one in document["changes"]} == {"regressed", "no difference seen"}
    with ResultsStore.open(db) as store:
        found = alerts.review(store, read_series(store))
        assert {one.id for one in found} == {one["id"] for one in document["alerts"]}
        alerts.set_state(store, [one.id for one in found], "expected", note="the new <Genie>")
    said, html, document = told()
    assert document["headline"]["level"] == "good"
    assert "Besides: 3 expected" in said
    assert "the new &lt;Genie&gt;" in html
    assert html.count('data-verdict="expected"') == 3
    assert '<b class="verdict" data-verdict="regressed"' not in html


def test_a_report_against_a_baseline_has_the_verdict_of_the_gate(
    app: typer.Typer, make_store: MakeStore, tmp_path: Path
) -> None:
    db, out = make_store(nights([1.0, 1.0, 0.8])), tmp_path / "r.html"
    arguments = ["--db", str(db), "--out", str(out), "--baseline", "previous", "--json"]
    document = json.loads(CliRunner().invoke(app, arguments).output)
    with ResultsStore.open(db) as store:
        gate = judge_gate(store, "previous")
    assert document["gate"] == json.loads(json.dumps(gate_formats.to_document(gate)))
    assert document["headline"]["level"] == "bad"
    assert document["headline"]["words"] == "Against previous: 2 regressed"
    html = out.read_text()
    assert "Against previous</h2>" in html
    assert html.count('<b class="verdict" data-verdict="regressed"') == 2
    good = CliRunner().invoke(app, [*arguments[:4], "--baseline", "2026-11-20"])
    assert good.output.startswith("Against 2026-11-20: 2 regressed\n")
    missing = CliRunner().invoke(app, [*arguments[:4], "--baseline", "nowhere"])
    assert isinstance(missing.exception, NoBaselineError)


def test_help_needs_no_database_library() -> None:
    code = "import sys, reports.cli; print({'sqlalchemy', 'jinja2', 'pydantic'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    )
    assert result.stdout.strip() == "set()"
