"""Evaluation of the models of any stage beside the model in float."""

from pathlib import Path

import numpy as np
import pytest

from buildlib.checkpoint.config import load_config
from buildlib.encodings.files import load_encodings
from buildlib.errors import BuildError
from buildlib.numerics.divergence import Logits, measure_divergence
from buildlib.numerics.evaluation import evaluate_model, onnx_perplexity, record_float
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.quantize.qdq import apply_encodings

WINDOWS = [[int(t) for t in np.random.default_rng(n).integers(2, 300, 70 - 9 * n)] for n in (0, 1)]


def test_every_stage_is_evaluated_over_the_positions_of_its_float_model(
    tiny_export: Path, tmp_path: Path
) -> None:
    model, config = tiny_export / "model.onnx", load_config(tiny_export / "config.json")
    encodings = load_encodings(tiny_export / "model.encodings")
    qdq = apply_encodings(model, encodings, tmp_path / "qdq.onnx")
    with record_float(model, config, WINDOWS) as reference:
        with HostLoop({16: [OnnxRunner(model)]}, config) as loop:
            same = evaluate_model(loop, reference)
        with HostLoop({16: [OnnxRunner(qdq)]}, config) as loop:
            found = evaluate_model(loop, reference)
    assert same.kl == pytest.approx(0.0, abs=1e-9)
    assert (same.top1, same.steps) == (1.0, sum(map(len, WINDOWS)))
    chains = {16: [model]}
    assert same.perplexity == pytest.approx(onnx_perplexity(chains, config, WINDOWS), rel=1e-5)
    logits: dict[Path, list[Logits]] = {}
    for path in (model, qdq):
        with HostLoop({16: [OnnxRunner(path)]}, config) as loop:
            logits[path] = []
            for window in WINDOWS:
                loop.reset()
                logits[path].append(loop.feed([*config.begin, *window[:-1]]))
    wanted = measure_divergence(logits[qdq], logits[model], WINDOWS)
    assert found.kl == pytest.approx(wanted.kl, rel=1e-3)
    assert found.top1 == wanted.top1
    assert found.perplexity == pytest.approx(wanted.perplexity, rel=1e-5)
    assert found.perplexity_float == pytest.approx(same.perplexity, rel=1e-5)


@pytest.mark.parametrize("windows", [[], [[]], [[5, 300]]])
def test_what_cannot_be_scored_is_refused(tiny_export: Path, windows: list[list[int]]) -> None:
    config = load_config(tiny_export / "config.json")
    with pytest.raises(BuildError, match=r"no text to evaluate|outside the vocabulary"):
        record_float(tiny_export / "model.onnx", config, windows)
