"""`qnnfarm compare` on a real container, and what its exit code says."""

import json
from pathlib import Path

import pytest

from harness.exit_codes import GOOD
from tests.harness.cli.conftest import Run


@pytest.mark.variant
def test_the_verdict_is_the_exit_code(qnnfarm: Run, tmp_path: Path, small_bundle: Path) -> None:
    little = ("-p", "8", "-n", "2", "-r", "1", "-w", "0", "--no-gate", "--json")
    speed = ("--metric", "decode_tokens_per_s", "--threshold", "1")
    judged = (*speed, "--sessions", "5")
    where = ("--device", "local", "--db", tmp_path / "r.db")
    kept = ("--trace", tmp_path / "trace.json")
    done = qnnfarm("compare", small_bundle, small_bundle, *where, *judged, *little, *kept)
    answer = json.loads(done.stdout)
    runs = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "load" for event in runs) == 10
    # A loss of everything is allowed, so that no noise makes a regression of it.
    assert (done.returncode, answer["verdict"]) in {
        (GOOD, "no difference seen"),
        (GOOD, "improved"),
    }
    assert [run["label"] for run in answer["sessions"]] == list("ABBAABBAAB")
    assert "pair 1 of 5, A on " in done.stderr
    assert "repetition 1, at most 1: " in done.stderr


def test_a_refused_measurement_leaves_no_database(
    qnnfarm: Run, adb_server: object, small_bundle: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In the beginning. " * 500)
    commands = (["bench"], ["compare", small_bundle], ["perplexity", "--text", text])
    for command, *more in commands:
        db = tmp_path / f"{command}.db"
        done = qnnfarm(
            command, small_bundle, *more, "--db", db, "--device", "nosuch", "--wait", "0"
        )
        assert done.returncode == 2, done.stderr
        assert "'nosuch'" in done.stderr
        assert not db.exists()
    done = qnnfarm("bench", small_bundle, "--db", tmp_path / "no" / "x.db", "--device", "nosuch")
    assert "its folder does not exist" in done.stderr
