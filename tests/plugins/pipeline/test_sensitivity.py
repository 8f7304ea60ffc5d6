"""Ranking of what quantization costs in a pipeline."""

import json

import pytest

from harness.errors import PipelineError
from plugins.pipeline.llm import LLMPipeline
from plugins.pipeline.sensitivity import rank_pipeline
from tests.plugins.pipeline.conftest import MakeRecipe


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_layers_are_ranked_by_their_cost(
    make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe()
    recipe["stages"]["quantization"] = {"recipe_name": "w4a16-rtn"}
    pipe = LLMPipeline.from_pretrained(recipe=recipe)
    found = rank_pipeline(pipe, windows=1, granularity="layer", kinds=("weight",), both_ways=True)
    costs = found.sensitivity.costs
    assert sorted(cost.unit.name for cost in costs)[:2] == ["head weights", "layer 0 weights"]
    assert [cost.alone.kl for cost in costs] == sorted((c.alone.kl for c in costs), reverse=True)
    assert all(cost.rest is not None for cost in costs)
    document = json.loads(json.dumps(found.as_document()))
    assert [cost["kind"] for cost in document["costs"]] == ["weight"] * len(costs)
    found.print(top=1)
    assert "mixed_precision=8" in capsys.readouterr().out


def test_a_recipe_that_quantizes_nothing_cannot_be_ranked(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    recipe["stages"] = {"model_loader": {}}
    with pytest.raises(PipelineError, match="no stage that quantizes"):
        rank_pipeline(LLMPipeline.from_pretrained(recipe=recipe))
