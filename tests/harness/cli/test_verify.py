"""`qnnfarm verify` of a checkpoint, of a container on a device, and of the stages of a recipe."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_decoding import Lade
from harness.devices.device import Device
from harness.errors import BAD, GOOD
from harness.results.store import ResultsStore, RunFilter
from suites.models import tiny_llama
from tests.buildlib.model_folders import copy_of_export
from tests.harness.cli.conftest import Run
from tests.optional import needs_no_transformers, needs_transformers
from tests.repackaged import repackage

pytestmark = pytest.mark.timeout(900)
MODEL = tiny_llama.folder()
HELD_OUT = MODEL / "text" / "heldout.txt"


@needs_no_transformers
@pytest.mark.parametrize(
    "command",
    [
        ("verify", MODEL),
        ("build", MODEL, "--target", "SM8750", "--verify", "--reference-with", "transformers"),
    ],
)
def test_the_extra_is_named_before_any_work(
    qnnfarm: Run, command: tuple[object, ...], tmp_path: Path
) -> None:
    out = ("--out", tmp_path / "out") if command[0] == "build" else ()
    done = qnnfarm(*command, *out)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'qnnfarm[reference]'" in done.stderr
    assert not (tmp_path / "out").exists()


@needs_transformers
def test_the_exit_code_says_whether_it_is_the_same_model(qnnfarm: Run, tmp_path: Path) -> None:
    few = ("--text", HELD_OUT, "--length", "40", "--windows", "1")
    same = qnnfarm("verify", MODEL, *few, "--json")
    assert same.returncode == 0, same.stderr
    *_, prefill, decode = json.loads(same.stdout)["sides"]
    assert (prefill["tokens"], decode["tokens"]) == (39, 20)
    assert prefill["perplexity"] == pytest.approx(prefill["perplexity_float"])
    export = copy_of_export("torchscript-qwen2", tmp_path / "model")
    weights = bytearray((export / "model.safetensors").read_bytes())
    weights[-4:] = b"\x00\x00\x80\x3f"  # another last weight, which is 1
    (export / "model.safetensors").write_bytes(weights)
    other = qnnfarm("verify", export)
    assert other.returncode == 1, other.stderr
    assert "NOT the same model" in other.stdout


def test_decode_steps_are_held_against_float(
    qnnfarm: Run,
    virtual_device: Device,
    small_bundle: Path,
    small_model: Path,
    tmp_path: Path,
) -> None:
    """A dialog that looks ahead is decoded as its target, by the graph of one token a call."""
    plain = GenAIContainer.load(small_bundle)
    lade = Lade(window=4, ngram=3, gcap=4)
    ahead = repackage(
        plain, plain.genie_config.with_type("lade", lade=lade), tmp_path / "lade"
    ).path
    db, letters = tmp_path / "results.db", small_model / "text" / "calibration.txt"
    where = ("--device", virtual_device.serial, "--db", db, "--text", letters, "--windows", "1")
    trace = tmp_path / "trace.json"
    compared = ("--reference", small_model, "--trace", trace, "--json")
    done = qnnfarm("verify", ahead, *where, *compared)
    assert done.returncode == GOOD, done.stderr
    events = Counter(event["name"] for event in json.loads(trace.read_text())["traceEvents"])
    assert events["QnnApi::graphExecute"] >= 80
    assert {"load", "prefill", "decode", "token 80"} <= events.keys()
    reference, answer = json.loads(done.stdout)["sides"]
    assert (reference["side"], answer["side"]) == ("float", "genie")
    assert (answer["tokens"], answer["calls"]) == (80, "decode")
    assert 0 < answer["kl_divergence"] < 0.01
    assert answer["top1_agreement"] >= 0.9  # of random weights
    assert answer["perplexity"] == pytest.approx(answer["perplexity_float"], rel=0.03)
    with ResultsStore.open(db) as store:
        (run,) = store.list_runs(RunFilter(kind="perplexity"))
    assert run.workload.runner == "genie_logits.py"
    assert run.values("kl_divergence") == (answer["kl_divergence"],)
    assert run.values("top1_agreement") == (answer["top1_agreement"],)
    report = qnnfarm("report", "--db", db, "--out", tmp_path / "report.html")
    assert report.returncode == GOOD, report.stderr
    html = (tmp_path / "report.html").read_text()
    assert f"{answer['kl_divergence']:.5f} nats" in html
    assert "decode steps in the second half of each window" in html
    assert "Download the trace" in html


@pytest.mark.variant
@pytest.mark.needs("plugins.diagnosis")
def test_two_runtimes_give_the_logits_of_the_emulator(
    qnnfarm: Run, virtual_device: Device, small_bundle: Path
) -> None:
    where = ("--device", virtual_device.serial, "-r", "genie", "-r", "graph", "--windows", "1")
    done = qnnfarm("verify", small_bundle, "--reference", small_bundle, *where, "--json")
    assert done.returncode == GOOD, done.stderr
    _, *rows = json.loads(done.stdout)["sides"]
    assert [row["side"] for row in rows] == ["genie", "graph"]
    assert all(row["relative"] == row["kl_divergence"] == 0 for row in rows)


def test_another_model_is_outside_of_its_bound(
    qnnfarm: Run,
    virtual_device: Device,
    small_bundle: Path,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    other = make_checkpoint(tmp_path / "other", hidden_size=48)
    where = ("--device", virtual_device.serial, "--windows", "1", "--max-kl", "0.01")
    done = qnnfarm("verify", small_bundle, "--reference", other, *where)
    assert done.returncode == BAD, done.stderr
    assert "NOT the same model: genie (decode) is the first" in done.stdout
