"""The stages `quantization_opt` and `quantization`: recipes, options and techniques by name."""

from pathlib import Path
from typing import Any

import pytest

from buildlib.encodings.files import load_encodings
from buildlib.errors import InputFileError, InvalidOptionError
from harness.errors import ConfigFileError
from plugins.pipeline.llm import LLMPipeline
from plugins.pipeline.stage import ModelFolder
from suites.models.tiny_llama import lora
from tests.plugins.pipeline.conftest import MakeRecipe


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"recipe_name": "w3a16"}, r"recipe_name: there is no recipe 'w3a16'; there are w8a16, "),
        (
            {"options": {"param_bits": 4}},
            r"quantization: param_bits: unknown key: did you mean param_bit",
        ),
        ({"options": {"act_bitwidth": 12}}, r"act_bitwidth: must be 8 or 16"),
    ],
)
def test_invalid_options_are_refused_by_name(
    make_recipe: MakeRecipe, section: dict[str, Any], told: str
) -> None:
    stages = {"model_loader": {}, "quantization": section}
    with pytest.raises(ConfigFileError, match=told):
        LLMPipeline.from_pretrained(recipe=make_recipe(stages=stages))


@pytest.mark.parametrize("name", ["lpbq_seqmse", "LPBQ_SeqMSE", "w4a16_lpbq", "W4A16-LPBQ"])
def test_a_recipes_name_is_read_as_the_vendors_documents_write_it(
    make_recipe: MakeRecipe, name: str
) -> None:
    stages = {"model_loader": {}, "quantization": {"recipe_name": name}}
    pipe = LLMPipeline.from_pretrained(recipe=make_recipe(stages=stages))
    assert pipe.stages.quantization.quantization().lpbq_block_size == 32


def bits_of(pipe: LLMPipeline) -> dict[str, int]:
    """Bits of the weights of linear layers after `quantization`."""
    model = pipe.manifest.stages[-1].output["model"]
    folder = ModelFolder(Path(model["path"]), model["key"]).path
    encodings = load_encodings(folder / "model.encodings")
    return {one.name: one.bw for one in encodings.param_encodings if "_proj.weight" in one.name}


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_techniques_change_weights_before_and_in_quantization(make_recipe: MakeRecipe) -> None:
    stages = {
        "model_loader": {},
        "quantization_opt": {"techniques": ["spinquant"]},
        "quantization": {
            "recipe_name": "w4a16-rtn",
            "options": {"mixed_precision": ["*.down_proj.weight=8"]},
        },
    }
    pipe = LLMPipeline.from_pretrained(recipe=make_recipe(stages=stages)).construct()
    score = {stage: pipe.evaluate(stage=stage)["PPL_heldout"] for stage in pipe.completed}
    rotated = score["quantization_opt"]
    assert rotated == pytest.approx(score["model_loader"], rel=1e-4)
    assert rotated != score["model_loader"]
    assert score["quantization"] != pytest.approx(rotated, rel=1e-3)
    bits = bits_of(pipe)
    assert {n for n, b in bits.items() if b == 8} == {n for n in bits if "down_proj" in n}
    features = {"lora": {"lora_config_path": str(lora.folder() / "lora_config.yaml")}}
    adapted = make_recipe(stages=stages | {"genai_builder": {}}, features=features)
    with pytest.raises(InvalidOptionError, match="adapters were trained on hidden states"):
        LLMPipeline.from_pretrained(recipe=adapted).construct()


@pytest.mark.needs("libatomic1")
def test_techniques_of_their_own_stage_take_the_bits_of_the_recipe(make_recipe: MakeRecipe) -> None:
    """Of 4 bits, which are not those that a stage has by itself."""
    few = {"gptq": {"num_batches": 1}}
    stages = {
        "model_loader": {},
        "quantization_opt": {"techniques": ["gptq"], "technique_kwargs": few},
        "quantization": {"recipe_name": "w4a16-rtn", "options": {"calibration_tokens": 96}},
    }
    pipe = LLMPipeline.from_pretrained(recipe=make_recipe(stages=stages))
    pipe.construct(until="quantization")
    assert set(bits_of(pipe).values()) == {4}
    stages["quantization_opt"]["options"] = {"param_bitwidth": 8}  # bits have one place
    with pytest.raises(ConfigFileError, match=r"quantization_opt\.options: unknown key"):
        LLMPipeline.from_pretrained(recipe=make_recipe(stages=stages))


def test_techniques_of_their_own_stage_take_the_text_of_the_recipe(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    text = tmp_path / "mine.txt"
    text.write_bytes(b"\xff")
    stages = {
        "model_loader": {},
        "quantization_opt": {"techniques": ["gptq"]},
        "quantization": {"calibration_text": str(text)},
    }
    pipe = LLMPipeline.from_pretrained(recipe=make_recipe(stages=stages))
    with pytest.raises(InputFileError, match=r"mine\.txt"):
        pipe.construct(until="quantization_opt")


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_activations_of_8_and_16_bits_stand_in_one_graph(make_recipe: MakeRecipe) -> None:
    def kl_of(pipe: LLMPipeline) -> dict[str, float]:
        rows = pipe.verify(windows=1).rows
        return {row.side: row.divergence.kl for row in rows if row.divergence is not None}

    def make(patterns: list[str]) -> LLMPipeline:
        recipe = make_recipe()
        options = {"activation_precision": patterns}
        recipe["stages"]["quantization"] = {"recipe_name": "w8a8", "options": options}
        return LLMPipeline.from_pretrained(recipe=recipe)

    narrow = kl_of(make([]).construct(until="quantization"))["quantization"]
    # a residual stream, products, and values that meet the mask, an input, of 8 bits
    pipe = make(["layer_?_output=16", "*_gated=16", "layer_0_*=16", "layer_0_up_proj=8"])
    found = kl_of(pipe.construct())
    folder = pipe.outputs("quantization")["model"]
    assert isinstance(folder, ModelFolder)
    encodings = load_encodings(folder.path / "model.encodings").by_name()
    names = (
        "layer_1_output",
        "layer_1_gated",
        "layer_0_scores",
        "layer_0_up_proj",
        "layer_1_scores",
    )
    assert [encodings[name].bw for name in names] == [16, 16, 16, 8, 8]
    assert found["quantization"] < 0.8 * narrow
    assert found["genai_builder"] == pytest.approx(found["quantization"], rel=0.5)
    with pytest.raises(InvalidOptionError, match="no activation of this model has a name like"):
        make(["nothing=16"]).construct(until="quantization")
    with pytest.raises(InvalidOptionError, match="PATTERN=BITS with 8 or 16 bits"):
        make(["layer_0_*=4"]).construct(until="quantization")
