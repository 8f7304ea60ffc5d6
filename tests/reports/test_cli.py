"""`qnnfarm report`."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from harness.errors import (
    ConfigFileError,
    MissingStoreError,
    NotStoredError,
    StoreUnavailableError,
)
from harness.results import alerts, gate_formats
from harness.results.gate import judge_gate
from harness.results.history import read_series
from harness.results.records import Run
from harness.results.store import ResultsStore
from reports.cli import report
from reports.errors import ReportError
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
    with pytest.raises(ReportError) as caught:
        report(db=str(db), out=tmp_path / "." / db.name)
    assert caught.value.exit_code == 2
    assert db.read_bytes() == before
    with pytest.raises(MissingStoreError):
        report(db=str(tmp_path / "none.db"), out=tmp_path / "report.html")
    with pytest.raises(ReportError):
        report(db=str(db), out=tmp_path / "nope" / "report.html")
    assert not (tmp_path / "nope").exists()
    (tmp_path / "text.db").write_text("no database, but long enough to look like one")
    with pytest.raises(StoreUnavailableError):
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
    assert isinstance(missing.exception, NotStoredError)


def test_a_figure_is_printed_as_csv_or_markdown_and_nothing_is_written(
    app: typer.Typer, make_store: MakeStore, tmp_path: Path
) -> None:
    db, out = make_store(nights([1.0, 0.9])), tmp_path / "r.html"
    (name,) = re.findall(r'id="(history-\w+)"', html_of(app, db, out))
    out.unlink()
    where = ["--db", str(db), "--out", str(out), "--figure", name]
    told = CliRunner().invoke(app, [*where, "--format", "csv"]).output
    rows = list(csv.DictReader(io.StringIO(told)))
    assert [round(float(row["decode_tokens_per_s"])) for row in rows] == [50, 45]
    assert CliRunner().invoke(app, where).output.startswith("| Began (UTC) | Prefill, tokens/s |")
    assert not out.exists()
    with pytest.raises(ReportError, match=name) as caught:
        report(db=str(db), figure="nothing")
    assert caught.value.exit_code == 2


def test_two_runs_are_printed_beside_each_other(
    app: typer.Typer, make_store: MakeStore, tmp_path: Path
) -> None:
    a, *_, b = nights([1.0, 0.9])
    out = tmp_path / "r.html"
    where = ["--db", str(make_store([a, b])), "--out", str(out), "--beside"]
    told = CliRunner().invoke(app, [*where, a.id, b.id, "--format", "csv"]).output
    rows = {row["what"]: row for row in csv.DictReader(io.StringIO(told))}
    assert float(rows["Decode"]["ratio"]) == pytest.approx(0.9, rel=0.01)
    assert rows["container sha256"]["b"] == b.container.sha256
    assert not out.exists()
    unknown = CliRunner().invoke(app, [*where, a.id, "f" * 32])
    assert isinstance(unknown.exception, NotStoredError)


def test_a_site_has_a_page_for_each_run(
    app: typer.Typer, make_store: MakeStore, tmp_path: Path
) -> None:
    runs = nights([1.0, 0.9])
    site = tmp_path / "site"
    arguments = ["--db", str(make_store(runs)), "--site", str(site)]
    done = CliRunner().invoke(app, arguments)
    assert done.output.rstrip().endswith(str(site / "index.html"))
    pages = {path.stem for path in (site / "runs").iterdir()}
    assert pages == {run.id for run in runs}
    assert {path.name for path in site.glob("*.html")} == {
        f"{name}.html" for name in ("index", "history", "curves", "runs", "devices")
    }
    for page in [*site.glob("*.html"), *site.glob("runs/*.html")]:
        for address in re.findall(r'(?:href|src)="([^"#:]+)["#]', page.read_text()):
            assert (page.parent / address).exists(), (page.name, address)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    other = CliRunner().invoke(app, [*arguments[:3], str(tmp_path / "other")])
    assert isinstance(other.exception, ReportError)


def test_a_pool_adds_the_health_of_its_devices(
    app: typer.Typer,
    make_store: MakeStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path / "state"))
    pool, out = tmp_path / "lab.yaml", tmp_path / "r.html"
    run = nights([1.0])[0]
    pool.write_text(
        f"devices: [{{type: android, identifier: {run.device.serial}, name: desk-1}}, "
        "{type: android, identifier: R9, name: desk-2}]\n"
    )
    arguments = ["--db", str(make_store([run])), "--out", str(out), "--pool", str(pool)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    devices = out.read_text().split('id="devices"')[1]
    assert "<b>desk-1</b>" in devices
    assert f"SM8750 · {run.device.serial}" in devices
    assert "<b>desk-2</b>" in devices
    missing = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "none.yaml")])
    assert isinstance(missing.exception, ConfigFileError)


def test_a_run_page_has_all_that_is_known_of_device_and_source(
    app: typer.Typer, make_store: MakeStore, tmp_path: Path
) -> None:
    run = nights([1.0])[0]
    device = run.device.model_copy(
        update={
            "ram_bytes": 12 << 30, "os_build": "AP3A.240905", "build_fingerprint": "samsung/x:15/z",
            "clocks": {"cpu_cap_hz:7": 3.53e9, "cpu_max_hz:7": 4.32e9, "cpu_cap_hz:0": 3.53e9},
        }
    )  # fmt: skip
    changed = run.model_copy(
        update={
            "device": device,
            "plan": "nightly",
            "provenance": run.provenance.model_copy(update={"git_branch": "topic/x"}),
            "workload": run.workload.model_copy(update={"runner_sha256": "7" * 64}),
        }
    )
    html = html_of(app, make_store([changed]), tmp_path / "r.html").split("Environment and")[1]
    for name, value in {
        "Memory": "12.0 GiB", "Build": "AP3A.240905", "Fingerprint": "samsung/x:15/z",
        "CPU 0": "3.53 GHz", "CPU 7": "3.53 GHz, at most 4.32 GHz", "Plan": "nightly",
        "Branch": "topic/x", "Kind": "Samsung Galaxy S25, Android 15",
    }.items():  # fmt: skip
        assert f"<dt>{name}</dt><dd>{value}</dd>" in html
    assert f'<dt>Program SHA-256</dt><dd class="hash">{"7" * 64}</dd>' in html
    assert str(run.provenance.git_commit) in html


def html_of(app: typer.Typer, db: Path, out: Path) -> str:
    done = CliRunner().invoke(app, ["--db", str(db), "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out.read_text()


def test_help_needs_no_database_library() -> None:
    code = "import sys, reports.cli; print({'sqlalchemy', 'jinja2', 'pydantic'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    )
    assert result.stdout.strip() == "set()"
