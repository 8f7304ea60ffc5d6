"""`qnnfarm embed` on a real virtual device."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from harness.devices.device import Device
from harness.errors import BAD, GOOD
from harness.results.store import ResultsStore, RunFilter
from tests.harness.cli.conftest import Run

pytestmark = pytest.mark.timeout(600)
TEXTS = ("In the beginning God created the heaven", "And the evening and the morning")


@pytest.mark.genie_configuration("text-to-embedding QnnHtp", "text-to-embedding per token")
def test_texts_are_embedded_written_and_stored(
    qnnfarm: Run,
    virtual_device: Device,
    encoder_bundle: Path,
    encoder_model: Path,
    tmp_path: Path,
) -> None:
    db, file, out = tmp_path / "results.db", tmp_path / "texts.txt", tmp_path / "vectors.npy"
    file.write_text("\n\n".join(TEXTS) + "\n")
    where = (encoder_bundle, "--device", virtual_device.serial)
    compared = ("--reference", encoder_model, "--min-cosine", "0.98")
    trace = tmp_path / "trace.json"
    kept = ("--db", db, "-o", out, "--trace", trace)
    done = qnnfarm("embed", *where, "--file", file, *compared, *kept, "--json")
    assert done.returncode == GOOD, done.stderr
    events = Counter(event["name"] for event in json.loads(trace.read_text())["traceEvents"])
    assert (events["GenieEmbedding_create"], events["GenieEmbedding_generate"]) == (1, len(TEXTS))
    assert events["push contents"] == 1
    answer = json.loads(done.stdout)["embeddings"]
    assert [each["text"] for each in answer] == list(TEXTS)
    assert all(each["shape"] == [1, 144] for each in answer)
    vectors = np.load(out)
    np.testing.assert_allclose(vectors, [each["embedding"] for each in answer], atol=1e-6)
    assert all(each["cosine_float"] >= 0.98 for each in answer)
    with ResultsStore.open(db) as store:
        (run,) = store.list_runs(RunFilter(kind="embed"))
        assert "trace" in {artifact.kind for artifact in store.artifacts(run.id)}
    assert run.workload.runner == "genie_t2e_run.py"
    assert run.check.outcome == "passed"
    assert run.values("cosine_float") == tuple(each["cosine_float"] for each in answer)
    assert run.values("prompt_tokens") == tuple(float(each["tokens"]) for each in answer)
    raw = tmp_path / "vectors.raw"
    done = qnnfarm("embed", *where, TEXTS[0], "--per-token", "-o", raw)
    assert done.returncode == GOOD, done.stderr
    tokens = np.fromfile(raw, "<f4").reshape(-1, 144)
    assert len(tokens) == answer[0]["tokens"]
    np.testing.assert_allclose(tokens.mean(axis=0), vectors[0], atol=0.02)


def test_a_cosine_below_the_bound_is_a_bad_answer(
    qnnfarm: Run, virtual_device: Device, encoder_bundle: Path, encoder_model: Path
) -> None:
    where = (encoder_bundle, "--device", virtual_device.serial, TEXTS[0])
    done = qnnfarm("embed", *where, "--reference", encoder_model, "--min-cosine", "1")
    assert done.returncode == BAD
    assert f"below 1, of '{TEXTS[0]}'" in done.stderr
