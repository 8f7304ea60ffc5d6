"""`qnnfarm results export` writes tables that other tools read."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.results import app
from harness.errors import WrongUseError
from harness.results.store import ResultsStore
from tests.harness.results.places import make_run
from tests.harness.results.test_data_frames import measured


@pytest.fixture
def db(tmp_path: Path) -> str:
    location = str(tmp_path / "results.db")
    with ResultsStore.open(location) as store:
        run = make_run(status="done", measurements=measured(16.0, 17.5), labels={"a": "1"})
        store.write_run(run)
    return location


def export(*arguments: str) -> bytes:
    result = CliRunner().invoke(app, ["export", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout_bytes


def test_other_tools_read_it(db: str, tmp_path: Path) -> None:
    import pandas as pd

    files = {suffix: tmp_path / f"out.{suffix}" for suffix in ("parquet", "csv", "jsonl")}
    for path in files.values():
        export(str(path), "--db", db)
    for rows in (
        pd.read_parquet(files["parquet"]),
        pd.read_csv(files["csv"]),
        pd.read_json(files["jsonl"], lines=True),
    ):
        assert rows["decode_tokens_per_s"].tolist() == [16.0, 17.5]
        assert pd.to_datetime(rows["created_at"]).dt.tz is not None
        assert rows["emulator"].tolist() == [True, True]


def test_spreadsheets_take_no_text_for_a_formula(tmp_path: Path) -> None:
    db, labels = str(tmp_path / "results.db"), {"=1+1": "=cmd|'/c calc'!A1", "b": "-5", "c": "-x"}
    with ResultsStore.open(db) as store:
        store.write_run(make_run(status="done", measurements=measured(16.0), labels=labels))
    (row,) = csv.DictReader(export("-", "--format", "csv", "--db", db).decode().splitlines())
    assert row["labels.=1+1"] == "'=cmd|'/c calc'!A1"
    assert (row["labels.b"], row["labels.c"]) == ("-5", "'-x")
    assert json.loads(export("-", "--format", "jsonl", "--db", db))["labels.c"] == "-x"


def test_stdout_and_filters(db: str) -> None:
    import pandas as pd

    shown = export("-", "--format", "jsonl", "--rows", "runs", "--since", "1d", "--db", db)
    (line,) = shown.splitlines()
    assert json.loads(line)["labels.a"] == "1"
    assert export("-", "--format", "jsonl", "--model", "no such", "--db", db) == b""
    header = export("-", "--format", "csv", "--kind", "perplexity", "--db", db)
    assert len(pd.read_csv(io.BytesIO(header))) == 0


@pytest.mark.parametrize(("package", "extra"), [("pyarrow", "parquet"), ("pandas", "pandas")])
def test_without_an_extra_it_says_what_to_install(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "harness.results.data_frames", raising=False)
    with pytest.raises(WrongUseError, match=rf"pip install 'qnnfarm\[{extra}\]'"):
        export(str(tmp_path / "out.parquet"), "--db", db)


def test_kept_files_are_written_where_the_user_says(tmp_path: Path) -> None:
    db = str(tmp_path / "results.db")
    run = make_run()
    with ResultsStore.open(db) as store, store.recording(run) as recorder:
        recorder.add_artifact("run.log", b"what it said", "log")
        recorder.add_artifact("../../escape", b"stays inside", "other")
    folder = tmp_path / "out"
    arguments = ["show", run.id, "--db", db, "--save", str(folder)]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert (folder / run.id / "run.log").read_bytes() == b"what it said"
    assert len(list((folder / run.id).iterdir())) == 2
    assert not (tmp_path / "escape").exists()
