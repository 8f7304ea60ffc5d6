"""`qnnfarm gate`: the verdict is the exit code, and every format tells the same."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from harness.results.store import ResultsStore
from tests.harness.cli.conftest import Run
from tests.harness.results.test_gate import night

DECODE = ("--metric", "decode_tokens_per_s")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Three nights, the last of which is 30 % slower."""
    path = tmp_path / "results.db"
    with ResultsStore.open(path) as store:
        for number, level in enumerate((20.0, 20.1, 14.0)):
            night(store, number, level, branch="main")
    return path


def test_a_regression_in_all_formats(qnnfarm: Run, database: Path, tmp_path: Path) -> None:
    markdown, junit = tmp_path / "gate.md", tmp_path / "gate.xml"
    files = ("--markdown", markdown, "--junit", junit)
    done = qnnfarm("gate", "--baseline", "previous", "--db", database, *DECODE, *files)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] == "verdict: regressed (1 regressed)"
    assert "| **regressed**: " in markdown.read_text()
    assert ET.parse(junit).getroot()[0].get("failures") == "1"  # noqa: S314
    done = qnnfarm("gate", "--baseline", "main", "--db", database, "--json", *DECODE)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["verdict"]) == (1, "regressed")
    assert answer["cells"][0]["ratio"] == pytest.approx(0.7, abs=0.02)


def test_good_news_and_no_news(qnnfarm: Run, database: Path) -> None:
    where = ("--db", database, *DECODE)
    done = qnnfarm("gate", "--baseline", "2026-11-01", "--candidate", "2026-11-02", *where)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no difference seen" in done.stdout
    done = qnnfarm("gate", "--baseline", "nowhere", *where)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no results for 'nowhere': it has the branches main" in done.stderr
    done = qnnfarm("gate", "--baseline", "previous", *where, "--across", "weather")
    assert (done.returncode, "it is one of precision" in done.stderr) == (2, True)
