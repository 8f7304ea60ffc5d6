"""Stages of a pipeline side by side: a damaged one is found by its name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigFileError, PipelineError
from harness.workloads.verify import print_report
from plugins.pipeline.comparison import compare_stages
from plugins.pipeline.llm import LLMPipeline
from plugins.pipeline.stage import ModelFolder
from tests.plugins.pipeline.conftest import MakeRecipe

TEXT = "In the beginning " * 60


@pytest.mark.variant
def test_stages_stand_side_by_side(built: LLMPipeline, capsys: pytest.CaptureFixture[str]) -> None:
    found = built.verify(max_kl=0.01)
    start, quantized, compiled = found.rows
    assert [row.side for row in found.rows] == ["model_loader", "quantization", "genai_builder"]
    assert found.passed
    assert start.divergence is not None
    assert (start.divergence.kl, start.divergence.top1, start.divergence.steps) == (0, 1, 40)
    assert quantized.divergence is not None
    wanted = built.evaluate(stage="quantization")["PPL_heldout"]
    assert quantized.divergence.perplexity == pytest.approx(wanted, rel=1e-4)
    for row in (quantized, compiled):
        assert row.divergence is not None
        assert row.divergence.perplexity == pytest.approx(start.divergence.perplexity, rel=0.02)
        assert 0 < row.divergence.kl < 0.01
        assert row.divergence.top1 >= 0.9
    print_report(found)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:2] == ["side", "runs"]
    assert len(printed) == 4


def test_the_first_damaged_stage_is_named(built: LLMPipeline, tmp_path: Path) -> None:
    outputs = [(name, built.outputs(name)) for name in ("model_loader", "quantization")]
    whole = outputs[1][1]["model"]
    assert isinstance(whole, ModelFolder)
    folder = shutil.copytree(whole.path, tmp_path / "damaged")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 100.0}))
    broken = replace(whole, path=folder)
    stages: list[Any] = [
        *outputs,
        ("damage", {"model": broken}),
        ("after", {"model": replace(broken, key="")}),
    ]
    found = compare_stages(stages, TEXT, 1, tmp_path, max_kl=0.01)
    assert [(row.side, row.passed) for row in found.rows] == [
        ("model_loader", True), ("quantization", True), ("damage", False), ("after", False),
    ]  # fmt: skip
    assert found.as_document()["first_outside"] == "damage"


@pytest.mark.needs("libatomic1")
def test_stages_need_a_text_and_one_that_is_finished(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    pipe = LLMPipeline.from_pretrained(
        recipe=make_recipe(cache_dir=str(tmp_path), evaluator_config=None)
    )
    with pytest.raises(PipelineError, match="needs a finished stage"):
        pipe.verify()
    pipe.construct(until="model_loader")
    with pytest.raises(ConfigFileError, match="evaluator_config"):
        pipe.verify()
    [row] = pipe.verify(text=TEXT, windows=1).rows
    assert row.where == "CPU, float"
