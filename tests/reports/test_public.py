"""`qnnfarm report --public`: nothing in it names a device, host or path, and it can be imported."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from harness.cli.results_import import import_results
from harness.errors import HostFileError
from harness.importing.importer import read_runs
from harness.results.data_frames import frames
from harness.results.published import publish
from harness.results.records import OutputCheck, Run, WorkloadRecord
from harness.results.store import EVERYTHING, ResultsStore
from reports import document, page, site_folder
from reports.cli import report
from reports.errors import ReportError
from tests.harness.results.places import write_runs
from tests.reports.conftest import START, Sample, changed, speeds

PHONES = [Sample(soc, emulator=False, model=f"m{soc}") for soc in ("SM8750", "SM8650")]
app = typer.Typer()
app.command("report")(report)
app.command("import")(import_results)


def say(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def write(db: Path, runs: Sequence[Run]) -> Path:
    with ResultsStore.open(db) as store:
        write_runs(store, runs)
    return db


def every_text(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        yield path.name
        if path.suffix == ".parquet":
            yield pd.read_parquet(path).to_csv()
        elif path.is_file():
            yield path.read_bytes().decode(errors="replace")


@pytest.mark.parametrize(
    ("serials", "host", "path"),
    [
        (("R5CXZ9K2", "127.0.0.1:40123"), "build-17.lab.example", "/home/zqabc/a-1.gguf"),
        (("pho(n)e*7", "'; DROP"), "ada@zqhost", r"C:\zq\x_2"),
    ],
)
def test_no_serial_host_or_path_is_in_any_byte(
    tmp_path: Path, serials: tuple[str, str], host: str, path: str
) -> None:
    """They stand in every text that a run can have."""
    said = f"of {serials[0]} on {host}, {path}: and {serials[1]}"
    runs = []
    for number, (sample, serial) in enumerate(zip(PHONES, serials, strict=True)):
        run = sample.run(number, "bench", speeds([900.0] * 3, [50.0] * 3, [0.05] * 3, 300))
        loss = run.container.model_copy(update={"quantization_loss": (said,)})
        work: dict[str, object] = {**run.workload.model_dump(), "prompt": said}
        work["sampler"] = {"lora": path, said: host}
        runs.append(
            changed(
                run, device__serial=serial, device__os_build=said, provenance__host=host,
                provenance__git_branch=said, provenance__library_versions={said: path},
                container=loss, workload=WorkloadRecord.model_validate(work), label=said,
                labels={"phone": serial, said: path}, plan=said, generated_text=said,
                conditions=({"name": "throttling", "outcome": "seen", "reason": said},),
                check=OutputCheck(outcome="passed", reason=said),
            )
        )  # fmt: skip
    failed = PHONES[0].run(9, "bench", {}, status="failed", error=said)
    db = write(tmp_path / "zq-results.db", [*runs, failed])
    say("report", "--db", db, "--public", tmp_path / "site")
    texts = list(every_text(tmp_path / "site"))
    assert any("device-2" in text for text in texts)
    for secret in (*serials, host, path, "zq-results", str(tmp_path)):
        assert not [text for text in texts if secret in text], secret


def test_an_import_has_the_same_figures(tmp_path: Path) -> None:
    """Two phones with two sessions each, one of two models that spreadsheets took for formulas."""
    runs = []
    for number in range(8):
        run = PHONES[number % 2].run(
            number,
            "perplexity" if number > 5 else "bench",
            {"perplexity": [17.123456789012345]}
            if number > 5
            else speeds([900.1 + number] * 4, [50 / 3 + number] * 4, [0.05] * 4, 300),
        )
        runs.append(changed(run, container__model="=1+2", labels={"team": "camera"}))
    db, site = write(tmp_path / "ours.db", runs), tmp_path / "acme"
    assert "8 runs" in say("report", "--db", db, "--public", site)
    theirs = tmp_path / "theirs.db"
    assert "8 runs with " in say("import", site, "--db", theirs, "--label", "team=camera")
    assert "imported before" in say("import", site, "--db", theirs)

    def figures(location: Path) -> list[object]:
        made = document.to_document(page.compose(page.load(str(location))), "")
        rows = made["rows"]
        assert isinstance(rows, list)
        kept = ("model", "soc", "workload", "metrics", "sessions", "stability")
        found: list[object] = json.loads(json.dumps([{k: row[k] for k in kept} for row in rows]))
        return found

    assert figures(theirs) == figures(db)
    assert len(figures(db)) == 2
    ours, others = (frames(one).repetitions for one in (db, theirs))
    values = ["run_id", "repetition", "is_warmup", "decode_tokens_per_s", "perplexity"]
    assert ours[values].equals(others[values])
    assert set(others["labels.published"]) == {"acme"}
    assert set(others["device_serial"]) == {"acme device-1", "acme device-2"}
    assert pd.read_parquet(site / "results.parquet")[values].equals(ours[values])


def test_devices_and_what_is_not_chosen_leave_no_page_behind(tmp_path: Path) -> None:
    runs = [
        sample.run(number, "bench", speeds([900.0] * 3, [50.0] * 3, [0.05] * 3, 300))
        for number, sample in enumerate(PHONES)
    ]
    db, site = write(tmp_path / "results.db", runs), tmp_path / "site"
    site_folder.write_public(str(db), EVERYTHING, site, START)
    assert {one.stem for one in (site / "runs").iterdir()} == {run.id for run in runs}
    only = replace(EVERYTHING, container="mSM8650")
    site_folder.write_public(str(db), only, site, START)
    assert [one.stem for one in (site / "runs").iterdir()] == [runs[1].id]
    assert not (site / "history.html").exists()
    with pytest.raises(ReportError, match="nothing to publish"):
        site_folder.write_public(str(db), replace(EVERYTHING, plan="x"), site, START)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b\n1,2\n", "no table"),
        ("run_id,is_warmup,repetition,decode_tokens_per_s\nx,False,0,fast\n", "line 2: .*fast"),
        ("run_id,is_warmup,repetition,decode_tokens_per_s\nx,False,0,1\n", "results.csv"),
        ("\0", "no table"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(HostFileError):
        read_runs(tmp_path)
    (tmp_path / "results.csv").write_text(text)
    with pytest.raises(HostFileError, match=reason) as caught:
        read_runs(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_published_run_is_published_again_as_it_is() -> None:
    runs = [PHONES[0].run(1, "bench", speeds([900.0] * 3, [50.0] * 3, [0.05] * 3, 300))]
    once = publish(runs)
    assert publish(once) == once
    assert once[0].device.serial == "device-1"
