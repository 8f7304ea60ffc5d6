"""`qnnfarm report`."""

import csv
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from harness.errors import ConfigFileError, MissingStoreError, NotStoredError, StoreUnavailableError
from harness.results import alerts, gate_formats
from harness.results.gate import judge_gate
from harness.results.history import read_series
from harness.results.records import Run
from harness.results.store import ResultsStore
from reports.cli import report
from reports.errors import ReportError
from tests.reports.conftest import changed, emulator_runs, mixed_runs
from tests.reports.test_history import nights

MakeStore = Callable[[Sequence[Run]], Path]


class Command:
    """`qnnfarm report` over a database with some runs."""

    def __init__(self, db: Path | str, out: Path) -> None:
        self.db, self.out = db, out
        self._app = typer.Typer()
        self._app.command()(report)

    def result(self, *options: str | Path) -> Result:
        where = ["--db", self.db, "--out", self.out, *options]
        return CliRunner(env={"COLUMNS": "200"}).invoke(self._app, [str(word) for word in where])

    def printed(self, *options: str | Path) -> str:
        result = self.result(*options)
        assert result.exit_code == 0, result.output
        return result.output

    def document(self, *options: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.printed(*options, "--json"))
        return document

    def html(self, *words: str) -> str:
        self.printed(*words)
        return self.out.read_text()


Reporting = Callable[[Sequence[Run]], Command]


@pytest.fixture
def reporting(make_store: MakeStore, tmp_path: Path) -> Reporting:
    return lambda runs: Command(make_store(runs), tmp_path / "r.html")


def test_it_writes_the_file_and_prints_the_summary(reporting: Reporting) -> None:
    command = reporting(mixed_runs())
    output = command.printed()
    for words in (
        "Emulator speed is not hardware speed.", "17.22", "25.565", "+0.33%", "interrupted",
        "! Llama-3.2-1B W8A16, SM8650, pp64+tg16: Decode: the standard deviation",
    ):  # fmt: skip
        assert words in output
    assert output.rstrip().endswith(str(command.out))
    assert command.out.read_text().startswith("<!doctype html>")


def test_json_is_for_programs(reporting: Reporting) -> None:
    command = reporting(mixed_runs())
    document = command.document()
    assert (document["version"], document["report"]) == (1, str(command.out))
    assert document["runs"] == len(mixed_runs())
    found = {(row["target"], row["emulator"]): row for row in document["rows"]}
    decode = found["SM8750:emulator", True]["metrics"]["decode_tokens_per_s"]
    assert (decode["repetitions"], decode["sessions"]) == (3, 1)
    assert found["SM8750", False]["metrics"]["perplexity_float"]["mean"] == 12.91
    assert {gap["status"] for gap in document["gaps"]} == {"failed", "interrupted"}
    assert document["perplexities"][0]["definition"]["positions"] == "first_cl_minus_ar"


def test_a_report_of_some_runs(reporting: Reporting) -> None:
    first, second, third = emulator_runs()[:3]
    command = reporting(
        [first, changed(second, labels={"team": "camera"}), changed(third, plan="nightly")]
    )
    for options, count in (
        ("--since 2026-11-20T10:00", 2),
        ("--label team=camera", 1),
        ("--container 'tiny_llama W8A16' --plan nightly", 1),
        ("--container other", 0),
    ):
        assert command.document(*shlex.split(options))["runs"] == count, options


def test_hostile_names_do_not_speak_to_the_terminal(reporting: Reporting) -> None:
    run = changed(emulator_runs()[0], container__model="\x1b]0;x\x07[bold]m[/nope]")
    output = reporting([run]).printed()
    assert "\x07" not in output
    assert "[bold]m[/nope]" in output


def test_emulator_speeds_are_not_called_unsteady_and_all_else_is_said(reporting: Reporting) -> None:
    run = emulator_runs()[0]
    shaky = [
        m.model_copy(update={"value": m.value * (1 + m.repetition)})
        if m.metric in {"prefill_tokens_per_s", "decode_tokens_per_s", "ttft_s"}
        else m
        for m in run.measurements
    ]
    output = reporting([changed(run, measurements=tuple(shaky), generated_text=None)]).printed()
    assert "standard deviation" not in output
    assert "the output was compared neither" in output


def test_wrong_use_is_refused_before_anything_is_written(
    make_store: MakeStore, tmp_path: Path
) -> None:
    db = make_store(emulator_runs())
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


def test_what_somebody_has_settled_is_no_fresh_regression(reporting: Reporting) -> None:
    command = reporting(nights([1.0] * 12 + [0.8] * 3))
    with ResultsStore.open(command.db) as store:
        found = alerts.review(store, read_series(store))
        alerts.set_state(store, [one.id for one in found], "expected", note="the new <Genie>")
    assert "Besides: 3 expected" in command.printed()
    html = command.out.read_text()
    assert "the new &lt;Genie&gt;" in html
    assert html.count('data-verdict="expected"') == 3
    assert '<b class="verdict" data-verdict="regressed"' not in html


def test_a_report_against_a_baseline_has_the_verdict_of_the_gate(reporting: Reporting) -> None:
    command = reporting(nights([1.0, 1.0, 0.8]))
    document = command.document("--baseline", "previous")
    with ResultsStore.open(command.db) as store:
        gate = judge_gate(store, "previous")
    assert document["gate"] == json.loads(json.dumps(gate_formats.to_document(gate)))
    assert document["headline"]["level"] == "bad"
    assert document["headline"]["words"] == "Against previous: 2 regressed"
    html = command.out.read_text()
    assert "Against previous</h2>" in html
    assert html.count('<b class="verdict" data-verdict="regressed"') == 2
    day = command.printed("--baseline", "2026-11-20")
    assert day.startswith("Against 2026-11-20: 2 regressed\n")
    assert isinstance(command.result("--baseline", "nowhere").exception, NotStoredError)


def test_a_figure_is_printed_as_csv_or_markdown_and_nothing_is_written(
    reporting: Reporting,
) -> None:
    command = reporting(nights([1.0, 0.9]))
    (name,) = re.findall(r'id="(history-\w+)"', command.html())
    command.out.unlink()
    told = command.printed("--figure", name, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(told)))
    assert [round(float(row["decode_tokens_per_s"])) for row in rows] == [50, 45]
    markdown = command.printed("--figure", name)
    assert not command.out.exists()
    with pytest.raises(ReportError, match=f"try {name} or ") as caught:
        report(db=str(command.db), figure=name.replace("is", "si"))
    assert len(str(caught.value)) < 300
    assert caught.value.exit_code == 2
    some = command.html("--since", "2026-11-01", "--container", "Llama-3.2-1B W8A16")
    assert f"--since 2026-11-01 --container &#39;Llama-3.2-1B W8A16&#39; --figure {name} " in some
    assert markdown.startswith("| Began (UTC) | Prefill, tokens/s |")


def test_two_runs_are_printed_beside_each_other(reporting: Reporting) -> None:
    a, *_, b = nights([1.0, 0.9])
    command = reporting([a, b])
    told = command.printed("--beside", a.id, b.id, "--format", "csv")
    rows = {row["what"]: row for row in csv.DictReader(io.StringIO(told))}
    assert float(rows["Decode"]["ratio"]) == pytest.approx(0.9, rel=0.01)
    assert rows["container sha256"]["b"] == b.container.sha256
    assert "device serial" not in rows
    assert not command.out.exists()
    assert isinstance(command.result("--beside", a.id, "f" * 32).exception, NotStoredError)


def test_a_site_has_a_page_for_each_run(reporting: Reporting, tmp_path: Path) -> None:
    runs, site = nights([1.0, 0.9]), tmp_path / "site"
    command = reporting(runs)
    assert command.printed("--site", site).rstrip().endswith(str(site / "index.html"))
    assert {path.stem for path in (site / "runs").iterdir()} == {run.id for run in runs}
    pages = ("index", "history", "curves", "runs", "devices")
    assert {path.stem for path in site.glob("*.html")} == set(pages)
    for page in [*site.glob("*.html"), *site.glob("runs/*.html")]:
        for address in re.findall(r'(?:href|src)="([^"#:]+)["#]', page.read_text()):
            assert (page.parent / address).exists(), (page.name, address)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    assert isinstance(command.result("--site", tmp_path / "other").exception, ReportError)


def test_a_pool_adds_the_health_of_its_devices(
    reporting: Reporting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path / "state"))
    pool, run = tmp_path / "lab.yaml", nights([1.0])[0]
    pool.write_text(
        f"devices: [{{type: android, identifier: {run.device.serial}, name: desk-1}}, "
        "{type: android, identifier: R9, name: desk-2}]\n"
    )
    command = reporting([run])
    command.printed("--pool", pool)
    devices = command.out.read_text().split('id="devices"')[1]
    for words in ("<b>desk-1</b>", f"SM8750 · {run.device.serial}", "<b>desk-2</b>"):
        assert words in devices
    missing = command.result("--pool", tmp_path / "none.yaml")
    assert isinstance(missing.exception, ConfigFileError)


def test_a_run_page_has_all_that_is_known_of_device_and_source(reporting: Reporting) -> None:
    run = changed(
        nights([1.0])[0], device__ram_bytes=12 << 30, device__os_build="AP3A.240905",
        device__build_fingerprint="samsung/x:15/z", plan="nightly",
        provenance__git_branch="topic/x", workload__runner_sha256="7" * 64,
        device__clocks={"cpu_cap_hz:7": 3.53e9, "cpu_max_hz:7": 4.32e9, "cpu_cap_hz:0": 3.53e9},
    )  # fmt: skip
    html = reporting([run]).html().split("Environment and")[1]
    for name, value in {
        "Memory": "12.0 GiB", "Build": "AP3A.240905", "Fingerprint": "samsung/x:15/z",
        "CPU 0": "3.53 GHz", "CPU 7": "3.53 GHz, at most 4.32 GHz", "Plan": "nightly",
        "Branch": "topic/x", "Kind": "Samsung Galaxy S25, Android 15",
    }.items():  # fmt: skip
        assert f"<dt>{name}</dt><dd>{value}</dd>" in html
    assert f'<dt>Program SHA-256</dt><dd class="hash">{"7" * 64}</dd>' in html
    assert str(run.provenance.git_commit) in html


def test_help_needs_no_database_library() -> None:
    code = "import sys, reports.cli; print({'sqlalchemy', 'jinja2', 'pydantic'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    )
    assert result.stdout.strip() == "set()"
