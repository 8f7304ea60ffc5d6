"""`qnnfarm perplexity` beside the model that the container was built from."""

import json
import shutil
from pathlib import Path

import pytest

from harness.devices.adb.device import AdbDevice
from harness.exit_codes import BAD, GOOD
from harness.results.store import ResultsStore, RunFilter
from suites.models import tiny_llama
from tests.harness.cli.conftest import Run

pytestmark = pytest.mark.timeout(900)
TEXT = tiny_llama.folder() / "text" / "heldout.txt"


def test_what_the_host_computed_is_what_benchmarks_are_checked_against(
    qnnfarm: Run, virtual_device: AdbDevice, tiny_bundle: Path, tmp_path: Path
) -> None:
    db = tmp_path / "results.db"
    where = (tiny_bundle, "--device", virtual_device.serial, "--db", db)
    scored = ("--text", TEXT, "--windows", "1", "--reference", tiny_llama.folder())
    done = qnnfarm("perplexity", *where, *scored, "--json")
    assert done.returncode == GOOD, done.stderr
    assert "scoring 1 window in float on this host" in done.stderr
    answer = json.loads(done.stdout)
    with ResultsStore.open(db) as store:
        (run,) = store.list_runs(RunFilter(kind="perplexity"))
    assert run.values("perplexity") == (answer["perplexity"],)
    assert run.values("perplexity_float") == (answer["perplexity_float"],)
    assert answer["perplexity_float"] != answer["perplexity"]  # which is quantized
    assert answer["perplexity_float"] == pytest.approx(answer["perplexity"], rel=0.03)
    bench = qnnfarm("bench", *where, "-p", "8", "-n", "2", "-r", "1", "-w", "0", "--no-gate")
    assert bench.returncode == GOOD, bench.stderr
    assert "is near its host reference" in bench.stdout


def test_another_model_is_a_bad_answer(
    qnnfarm: Run, virtual_device: AdbDevice, tiny_bundle: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_llama.folder(), other, ignore=shutil.ignore_patterns("*.py", "text"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 2.0}))
    scored = ("--text", TEXT, "--windows", "1", "--reference", other)
    done = qnnfarm("perplexity", tiny_bundle, "--device", virtual_device.serial, *scored)
    assert done.returncode == BAD, done.stdout + done.stderr
    perplexity, beside = done.stdout.splitlines()
    assert " in 1 window, tiny_llama W8A16" in perplexity
    assert beside.startswith("in float on this host ")
    assert "from the same model in float, more than the 3% of W8A16" in done.stderr
