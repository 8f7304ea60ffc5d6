"""Ranking of what quantization costs in a pipeline, and mixed precision within a bound."""

import json
import os
from pathlib import Path

import pytest

from buildlib.checkpoint.config import load_config
from buildlib.encodings.files import load_encodings
from buildlib.evaluation.proposal import QualityBound
from buildlib.quantize.qdq import apply_encodings
from buildlib.reference.divergence import Divergence
from buildlib.reference.evaluation import evaluate_model, record_float
from buildlib.reference.host_loop import HostLoop
from buildlib.reference.runners import OnnxRunner
from harness.errors import PipelineStateError, WrongUseError
from harness.pipeline.bisect import BisectOptions, bisect_pipeline, recipe_of, write_mixture
from harness.pipeline.comparison import ComparedText
from harness.pipeline.llm import LLMPipeline
from harness.pipeline.stage import ModelFolder
from suites.models import tiny_llama
from tests.command_line import qnnfarm
from tests.harness.pipeline.conftest import MakeRecipe

LAYERS = BisectOptions(granularity="layer", kinds=("weight",))


class StageCacheState:
    """Entries of the float model, which other pipelines remove if a file is too many."""

    def __init__(self, pipe: LLMPipeline) -> None:
        self._folder = folder_of(pipe, "model_loader")
        self._names = sorted(self._folder.iterdir())

    def check(self) -> None:
        assert sorted(self._folder.iterdir()) == self._names


def test_a_proposal_is_built_and_holds_where_it_is_measured_again(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe()
    recipe["stages"]["quantization"] = {"recipe_name": "w4a16-rtn"}
    pipe = LLMPipeline.from_pretrained(recipe=recipe)
    pipe.construct(until="quantization")
    cached = StageCacheState(pipe)
    ranked = bisect_pipeline(pipe, options=LAYERS, progress=lambda *_: cached.check())
    assert ranked.met
    names = [cost.unit.name for cost in ranked.sensitivity.costs]
    assert sorted(names)[:2] == ["head weights", "layer 0 weights"]
    bound = QualityBound("kl", ranked.sensitivity.whole.kl * 0.7)
    out = tmp_path / "mixed"
    wanted = BisectOptions(bound, "layer", ("weight",), out=out)
    found = bisect_pipeline(pipe, options=wanted)
    assert found.proposal is not None
    assert found.proposal.met
    assert 0 < len(found.proposal.raised) < 4
    assert all(text.endswith("proj.weight=8") for text in found.mixed_precision)
    assert found.checked is not None
    assert found.checked.kl == pytest.approx(found.proposal.after.kl, rel=0.1)

    whole, folder = (folder_of(pipe, stage) for stage in ("model_loader", "quantization"))
    mixture = write_mixture(
        whole, folder, found.proposal, found.sensitivity.encodings, tmp_path / "mixture"
    )
    for model in (out, mixture):
        again = quantized(pipe, whole, model, tmp_path)
        assert again.kl <= bound.limit * 1.03
        assert again.kl == pytest.approx(found.proposal.after.kl, rel=0.03)
    assert pipe.manifest_path.read_text().count("mixed_precision") == 0
    encodings = load_encodings(out / "model.encodings").by_name()
    assert {encodings[text.removesuffix("=8")].bw for text in found.mixed_precision} == {8}
    found.print()
    printed = capsys.readouterr().out
    assert "quantization.mixed_precision:" in printed
    assert f"{out}: its model" in printed


def folder_of(pipe: LLMPipeline, stage: str) -> Path:
    model = pipe.outputs(stage)["model"]
    assert isinstance(model, ModelFolder)
    return model.path


def quantized(pipe: LLMPipeline, whole: Path, folder: Path, scratch: Path) -> Divergence:
    """A model folder as QDQ on the CPU, over the windows of the recipe's metric."""
    config, encodings = load_config(whole / "config.json"), folder / "model.encodings"
    path = apply_encodings(
        folder / "model.onnx", load_encodings(encodings), scratch / f"{folder.name}_qdq.onnx"
    )
    text = ComparedText(whole, *pipe.text_to_compare(None, None))
    windows = [window.scored for window in text.windows]
    with (
        record_float(whole / "model.onnx", config, windows) as reference,
        HostLoop({8: [OnnxRunner(path)]}, config) as loop,
    ):
        return evaluate_model(loop, reference)


def test_a_bound_out_of_reach_ends_with_1(build_cache: Path) -> None:
    model = str(tiny_llama.folder())
    command = ["pipeline", "bisect", model, "--ar", "8", "--cl", "48", "--windows", "1", "--json"]
    command += [
        "--quantization",
        "w4a16-rtn",
        "--weights-only",
        "--by",
        "layer",
        "--no-build",
        "--bound",
        "kl=0.0000001",
    ]
    done = qnnfarm(*command, env=os.environ | {"QNNFARM_CACHE_DIR": str(build_cache)})
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["granularity"] == "layer"
    assert document["met"] is False
    assert len(document["proposal"]["mixed_precision"]) == 28
    after, before = (document["proposal"][key]["kl_divergence"] for key in ("after", "before"))
    assert after < before / 10


def test_what_cannot_be_ranked_says_why(make_recipe: MakeRecipe, tiny_bundle: Path) -> None:
    pipe = LLMPipeline.from_pretrained(recipe=make_recipe(stages={"model_loader": {}}))
    with pytest.raises(PipelineStateError, match="no stage that quantizes"):
        bisect_pipeline(pipe)
    with pytest.raises(WrongUseError, match="no weights in float"):
        recipe_of(tiny_bundle, None, "w4a16", (None, None), "SM8750")
    model = str(tiny_llama.folder())
    _, recipe = recipe_of(tiny_bundle, model, "w4a16", (None, None), "SM8750")
    assert recipe["soc_details"] == "SM8750:emulator"
    assert recipe["generator_config"] == {"sequence_length": 32, "context_length": 192}
    assert recipe["stages"]["quantization"] == {"recipe_name": "w8a16"}
