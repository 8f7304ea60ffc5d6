"""Evaluation of the models of any stage beside the model in float."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from buildlib.checkpoint.config import load_config
from buildlib.encodings.files import load_encodings
from buildlib.errors import BuildError
from buildlib.graph.files import link_into
from buildlib.numerics.comparison import SAME_MODEL, SideComparison
from buildlib.numerics.divergence import DivergenceSums, Logits
from buildlib.numerics.evaluation import (
    ModelSide,
    Sample,
    compare_sides,
    evaluate_model,
    onnx_perplexity,
    open_side,
    record_float,
)
from buildlib.numerics.host_loop import HostLoop, open_onnx
from buildlib.numerics.runners import OnnxRunner
from buildlib.quantize.qdq import apply_encodings

SAMPLE = Sample((0,), (), (5, 9, 33, 2, 47, 8, 13, 4, 4, 61, 25, 17))
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
    sums, logits = DivergenceSums(), list[Logits]()
    for window in WINDOWS:
        for path in (qdq, model):
            with HostLoop({16: [OnnxRunner(path)]}, config) as loop:
                logits.append(loop.feed([*config.begin, *window[:-1]]))
        sums.add(logits[-2], logits[-1], window)
    wanted = sums.mean()
    assert found.kl == pytest.approx(wanted.kl, rel=1e-3)
    assert found.top1 == wanted.top1
    assert found.perplexity == pytest.approx(wanted.perplexity, rel=1e-5)
    assert found.perplexity_float == pytest.approx(same.perplexity, rel=1e-5)


@pytest.mark.parametrize("windows", [[], [[]], [[5, 300]]])
def test_what_cannot_be_scored_is_refused(tiny_export: Path, windows: list[list[int]]) -> None:
    config = load_config(tiny_export / "config.json")
    with pytest.raises(BuildError, match=r"no text to evaluate|outside the vocabulary"):
        record_float(tiny_export / "model.onnx", config, windows)


@pytest.fixture
def open_loop(tiny_export: Path) -> Callable[..., HostLoop]:
    """Opens the same ONNX by a configuration with other keys."""
    config = load_config(tiny_export / "config.json")

    def open_with(**changes: object) -> HostLoop:
        return open_onnx(tiny_export / "model.onnx", config.model_copy(update=changes))

    return open_with


def beside(ours: HostLoop, *others: HostLoop) -> list[SideComparison]:
    def side(name: str, model: HostLoop) -> ModelSide:
        opened = partial(open_side, nullcontext(model), "CPU", decodes=True)
        return ModelSide(name, opened, SAME_MODEL, ("prefill", "decode"))

    sides = [side(f"other {number}", model) for number, model in enumerate(others)]
    return list(compare_sides(side("ours", ours), sides, [SAMPLE], 300))


def test_a_model_is_itself_and_another_reading_of_its_configuration_shows(
    open_loop: Callable[..., HostLoop],
) -> None:
    with open_loop() as ours, open_loop() as same, open_loop(rope_theta=1e6) as other:
        own, steps, *rows = beside(ours, same, other)
    assert [(row.side, row.calls) for row in (own, steps)] == [
        ("ours", "prefill"),
        ("ours", "decode"),
    ]
    equal, apart = rows[:2], rows[2:]
    for row, count in zip(equal, (12, 6), strict=True):
        assert row.passed
        assert (one := row.divergence) is not None
        assert (one.steps, one.kl, one.top1, one.relative) == (count, 0, 1, 0)
        assert one.sqnr_db == math.inf
    assert not any(row.passed for row in apart)
    assert all(row.divergence and row.divergence.relative > 1e-3 for row in apart)


def test_models_that_give_no_numbers_are_not_compared(
    open_loop: Callable[..., HostLoop], tiny_export: Path, tmp_path: Path
) -> None:
    model = onnx.load(tiny_export / "model.onnx", load_external_data=False)
    (norm,) = (node for node in model.graph.node if "layer_1_mlp_norm" in node.output)
    (epsilon,) = (one for one in norm.attribute if one.name == "epsilon")
    epsilon.f = math.nan
    onnx.save(model, tmp_path / "model.onnx")
    for weights in tiny_export.glob("*.safetensors"):
        link_into(weights, tmp_path)
    broken = open_onnx(tmp_path / "model.onnx", load_config(tiny_export / "config.json"))
    with broken, open_loop() as fine, pytest.raises(BuildError, match="not finite"):
        beside(broken, fine)
