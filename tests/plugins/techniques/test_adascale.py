"""AdaScale: its arguments, and what it improves; the core's tests of techniques take it as well."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from buildlib.builder.runner import StageRunner
from buildlib.builder.sources import CheckpointSource
from buildlib.builder.stages.author import AuthorModel
from buildlib.builder.stages.optimize_weights import OptimizeWeights
from buildlib.cache.store import StageCache
from buildlib.graph.shape import GraphShape
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.options import QuantizationOptions
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from plugins.techniques import adascale
from tests.buildlib.quantize.test_techniques import (
    float_model,
    logits,
    nearest_model,
    optimized,
    optimized_weight,
)


def test_its_arguments_reach_it(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    model = float_model(folder, Bitwidths(param_bitwidth=4))
    weights = partial(
        optimized_weight, model, tmp_path, "0.self_attn.v_proj", "adascale", num_iterations=3
    )
    default = weights(learning_rate=0.05)
    for arguments in ({"num_iterations": 4}, {"learning_rate": 0.1}, {"seed": 5}):
        assert np.abs(weights(**{"learning_rate": 0.05, **arguments}) - default).max() > 0


def test_learned_scales_bring_the_logits_near_those_in_float(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = float_model(make_checkpoint(tmp_path / "model"), Bitwidths(param_bitwidth=4))
    found = optimized(model, tmp_path / "learned", "adascale")
    nearest = nearest_model(model, tmp_path / "nearest")
    errors = [np.square(logits(one) - logits(model)).mean() for one in (found, nearest)]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize(("technique", "changes"), [("adascale", True), ("gptq", False)])
def test_its_code_is_part_of_the_keys_of_builds_that_use_it(
    technique: str, *, changes: bool, tiny: Path, tiny_text: str, tmp_path: Path
) -> None:
    source = CheckpointSource(tiny, tiny_text)
    options = QuantizationOptions.model_validate({"techniques": [technique]})
    with StageCache(tmp_path / "cache", "tiny") as cache:
        runner = StageRunner(OrtQnnToolchain(), cache, tmp_path / "cache", None)
        model = runner.entry(AuthorModel(source, {"model": "0"}, GraphShape(16, 96)))
        stage = OptimizeWeights(model, source, options)
    assert (adascale.__name__ in stage.modules) is changes
