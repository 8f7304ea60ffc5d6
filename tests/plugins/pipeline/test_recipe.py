"""Recipes: what is refused before anything runs, and where the error says it is."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import suites
from buildlib.builder.model_place import find_model
from buildlib.errors import BuildError, ModelFileError
from harness.errors import ConfigFileError, WrongUseError
from plugins.pipeline.defaults import recipe_text
from plugins.pipeline.llm import LLMPipeline
from plugins.pipeline.recipe import LLMPipelineConfig, Recipe
from plugins.pipeline.registry import BUILT_IN, StageRegistry
from plugins.pipeline.settings import PipelineSettings
from plugins.pipeline.stages import ModelLoader
from suites.models import tiny_llama
from tests.command_line import qnnfarm

GOOD = f"""\
model_id_or_path: {tiny_llama.folder()}
soc_details: SM8750:emulator
stages:
  model_loader: {{}}
  quantization:
    recipe_name: w8a16
"""


@pytest.mark.parametrize(
    ("change", "line", "told"),
    [
        (
            ("soc_details:", "soc_detail:"),
            2,
            "soc_detail: unknown key: did you mean soc_d",
        ),
        (("SM8750:emulator", "SM9999"), 2, "soc_details: .*SM9999"),
        (("recipe_name", "recipe_nam"), 6, "stages.quantization.recipe_nam: .*mean recipe_name"),
        (("w8a16", "w8a61"), 6, "recipe_name: there is no recipe 'w8a61'.*w8a16"),
        (("  quantization:", "  quantisation:"), 5, "no such stage: did you mean quantization"),
        (("  model_loader: {}\n", ""), 4, "stages.quantization: it needs model, which no stage"),
        (
            ("{}", "{model_config_overrides: {ar: 1}}"),
            4,
            "model_config_overrides: /ar: unknown key",
        ),
        (("stages:", "checkpoint: builder\nstages:"), 3, "checkpoint: 'builder' is none of its st"),
        (
            ("stages:", "features: {speculative_decoding: {type: eagle}}\nstages:"),
            3,
            "features.speculative_decoding: type: there is no 'eagle'.*eaglet",
        ),
        (
            ("stages:", "features: {speculative_decoding: {type: eaglet}}\nstages:"),
            3,
            "features.speculative_decoding: draft_model_path: it is missing",
        ),
        (
            ("stages:", "features: {lora: {lora_path: a}}\nstages:"),
            3,
            "lora_path: no such option: did you mean lora_config.lora_config_path",
        ),
        (
            ("stages:", "features: {lora: {lora_config_path: a}}\nstages:"),
            3,
            "features: none of its stages builds them in",
        ),
        (
            ("stages:", "stages:\n  dm_model_loader: {}"),
            4,
            "stages.dm_model_loader: .*qnnfarm train",
        ),
        (("stages:", "stages: {}\nstages:"), 4, "stages: the key is given twice"),
        (("stages:", "stages: ["), 5, "not valid YAML"),
    ],
)
def test_an_error_names_file_line_and_key(
    tmp_path: Path, change: tuple[str, str], line: int, told: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD.replace(*change, 1))
    with pytest.raises(ConfigFileError, match=told) as raised:
        LLMPipeline.from_pretrained(recipe=path)
    assert str(raised.value).startswith(f"{path}, line {line}")
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("stages:", "features: {lora: {lora_config_path: nope.yaml}}\nstages:", "nope.yaml"),
        (
            "stages:",
            "features: {speculative_decoding: {type: ssd-q1, ssd_tensor_file: nope.pt}}\nstages:",
            "nope.pt",
        ),
        ("stages:", "toolchain: qairt\nqairt_sdk: sdk\nstages:", "sdk"),
        ("w8a16", "w8a16\n    calibration_text: nope.txt", "nope.txt"),
    ],
)
def test_a_missing_file_ends_a_recipe_before_anything_runs(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD.replace(old, new) + f"  genai_builder: {{}}\ncache_dir: {tmp_path}\n")
    pipe = LLMPipeline.from_pretrained(recipe=path)
    with pytest.raises(BuildError, match=str(tmp_path / told)):
        pipe.construct()
    assert not pipe.completed


def test_a_recipe_in_a_program_is_checked_alike() -> None:
    with pytest.raises(
        ConfigFileError, match=r"recipe, stages.quantization.recipe_nam: .*recipe_n"
    ):
        LLMPipeline.from_pretrained(
            tiny_llama.folder(),
            recipe={"stages": {"model_loader": {}, "quantization": {"recipe_nam": "w8a16"}}},
        )
    with pytest.raises(ConfigFileError, match="model_id_or_path: it is missing"):
        LLMPipeline.from_pretrained()
    with pytest.raises(ConfigFileError, match="cache_dirs: unknown key"):
        LLMPipeline.from_pretrained(tiny_llama.folder(), cache_dirs="x")


def test_a_recipe_comes_back_from_its_file(tmp_path: Path) -> None:
    recipe = Recipe({"backend": "HTP", "stages": {"model_loader": {}}})
    path = recipe.to_yaml(tmp_path / "mine.yml")
    assert Recipe.from_file(path) == recipe
    with pytest.raises(ConfigFileError, match=r"ends in .yaml or .yml"):
        Recipe.from_file(tmp_path / "mine.json")
    with pytest.raises(ConfigFileError, match="cannot be read"):
        Recipe.from_file(tmp_path / "none.yaml")


def test_relative_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "model").symlink_to(tiny_llama.folder())
    (folder / "recipe.yaml").write_text("model_id_or_path: model\ncache_dir: kept\n")
    pipe = LLMPipeline.from_pretrained(recipe=folder / "recipe.yaml")
    assert (pipe.model_dir, pipe.cache_root) == (folder / "model", folder / "kept")
    assert pipe.model_name == "tiny_llama"
    assert tuple(pipe.stages) == ("model_loader", "quantization", "genai_builder")


def test_the_first_recipe_of_a_model_is_a_recipe(tmp_path: Path) -> None:
    def first_settings(model: Path) -> PipelineSettings:
        path = tmp_path / "recipe.yaml"
        path.write_text(recipe_text(str(model), "SM8650"))
        return LLMPipelineConfig.of(Recipe.from_file(path)).settings

    settings = first_settings(tiny_llama.folder())
    sizes = settings.generator_config
    assert (sizes.sequence_length, sizes.context_length) == (128, 512)
    assert settings.evaluator_config is not None
    assert [one.dataset for one in settings.evaluator_config.metrics] == ["text/heldout.txt"]
    assert settings.soc_details == "SM8650"
    for name in ("config.json", "text/calibration.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(tiny_llama.folder() / name, tmp_path / name)
    assert first_settings(tmp_path).evaluator_config is None  # not on the calibration text


def test_the_recipe_of_the_reference_model_is_one() -> None:
    recipe = Recipe.from_file(Path(suites.__file__).with_name("recipes") / "tiny_llama.yaml")
    pipe = LLMPipeline.from_pretrained(recipe=recipe)
    assert pipe.model_dir.resolve() == tiny_llama.folder().resolve()
    assert tuple(pipe.stages) == BUILT_IN
    config = pipe.config.settings.evaluator_config
    assert config is not None
    assert (pipe.model_dir / config.metrics[0].dataset).is_file()


def test_the_command_writes_a_recipe_and_lists_stages(tmp_path: Path) -> None:
    made = qnnfarm("pipeline", "init", tiny_llama.folder(), "--out", "mine.yaml", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "qnnfarm pipeline run mine.yaml" in made.stdout
    again = qnnfarm("pipeline", "init", tiny_llama.folder(), "--out", "mine.yaml", cwd=tmp_path)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    listed = qnnfarm("pipeline", "stages", "--json")
    assert [one["name"] for one in json.loads(listed.stdout)][:4] == list(BUILT_IN)
    text = (tmp_path / "mine.yaml").read_text().replace("w8a16 ", "w8a61 ", 1)
    (tmp_path / "mine.yaml").write_text(text)
    wrong = qnnfarm("pipeline", "run", "mine.yaml", cwd=tmp_path)
    assert wrong.returncode == 2
    assert re.fullmatch(
        r"qnnfarm: .*mine\.yaml, line \d+, stages\.quantization\..*\n", wrong.stderr
    )


def test_a_dataset_and_a_metric_must_be_known(tmp_path: Path) -> None:
    for metric, told in (
        ("{name: perplexity, dataset: wikitext}", r"dataset: there is no text .*nothing is down"),
        ("{name: bleu, dataset: text/heldout.txt}", r"recipe.yaml, line 1, .*must be 'perplexity'"),
    ):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"evaluator_config: {{metrics: [{metric}]}}\ncache_dir: cache\n{GOOD}")
        done = qnnfarm("pipeline", "run", recipe, cwd=tmp_path)
        assert done.returncode == 2
        assert re.search(told, done.stderr)
        assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "model",
    ["models/foo", "none/foo.gguf", "none/foo.onnx", "./none/foo", "../foo", "/none/foo", "foo"],
)
def test_a_mistaken_path_is_a_missing_file(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "models").mkdir(parents=True)
    recipe = tmp_path / "here" / "recipe.yaml"
    recipe.write_text(f"model_id_or_path: {model}\nstages: {{}}\n")
    monkeypatch.chdir(tmp_path / "here")
    for find in (lambda: find_model(model), lambda: LLMPipeline.from_pretrained(recipe=recipe)):
        with pytest.raises(ModelFileError, match="there is no such file or folder") as caught:
            find()
        assert model.lstrip("./") in str(caught.value)


def test_a_revision_says_that_a_model_is_the_hubs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match="; org/name@main would be a model of the Hugging"):
        find_model("org/name")
    with pytest.raises(
        ModelFileError, match=r"hf download org/name --revision main.*qnnfarm\[hub\]"
    ):
        find_model("org/name@main")


def test_names_of_stages_are_checked() -> None:
    stages: tuple[tuple[str, Any, str], ...] = (
        ("My stage", ModelLoader, "lower-case"),
        ("quantization", ModelLoader, "there is one of that name"),
        ("mine", int, "is no class of plugins"),
    )
    for name, stage, told in stages:
        with pytest.raises(WrongUseError, match=told):
            StageRegistry().register(name, stage)
