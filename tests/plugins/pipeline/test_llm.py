"""`LLMPipeline` from a checkpoint to text, with the real compiler and Genie."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from buildlib.container.container import GenAIContainer
from harness.devices.device import Device
from harness.devices.spec import DeviceSpec
from harness.errors import ConfigFileError, PipelineError, WrongUseError
from plugins.pipeline.llm import LLMPipeline
from plugins.pipeline.observers import StageEvent, StageFinished
from plugins.pipeline.qairt_modules import qairt_modules
from plugins.pipeline.recipe import Recipe
from tests.command_line import qnnfarm
from tests.plugins.pipeline.conftest import MakeRecipe


def run_again(pipe: LLMPipeline, until: str | None = None) -> dict[str, bool]:
    events: list[StageEvent] = []
    pipe.add_observer(events.append)
    pipe.construct(until=until)
    return {event.stage: event.reused for event in events if isinstance(event, StageFinished)}


@pytest.mark.variant
def test_perplexity_stays_from_float_to_the_emulator_and_the_device(
    built: LLMPipeline, virtual_device: Device
) -> None:
    device = DeviceSpec("android", virtual_device.serial)
    scores = {stage: built.evaluate(stage=stage)["PPL_heldout"] for stage in built.completed}
    scores["device"] = built.evaluate(device=device)["PPL_heldout"]
    assert scores["device"] == pytest.approx(scores["genai_builder"], rel=5e-3)
    assert all(v == pytest.approx(scores["model_loader"], rel=0.02) for v in scores.values())
    assert len(set(scores.values())) == 4  # each is a run of its own
    with pytest.raises(PipelineError, match="genai_builder first"):
        built.evaluate(device=device, stage="quantization")


def test_generate_gives_one_text_on_the_host_and_on_the_device(
    built: LLMPipeline, virtual_device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, device = "And the LORD", DeviceSpec("android", virtual_device.serial)
    on_host, on_device = (built.generate(prompt, where, max_tokens=4) for where in (None, device))
    assert on_device.text == on_host.text != ""
    assert on_device.emulator
    assert on_device.metrics["generated_tokens"] == 4
    chats = [
        built.generate(prompt, where, max_tokens=4, chat=True, system="Be brief.").text
        for where in (None, device)
    ]
    assert chats[0] == chats[1] != on_host.text
    on_device.print()
    printed = capsys.readouterr()
    assert printed.out == on_device.text + "\n"
    assert virtual_device.serial in printed.err
    assert "its speed says nothing" in printed.err


def test_a_changed_stage_runs_with_all_that_follow(built: LLMPipeline) -> None:
    cache = built.config.settings.cache_dir
    assert cache is not None
    pipe = LLMPipeline.load(cache)
    assert run_again(pipe) == {"model_loader": True, "quantization": True, "genai_builder": True}
    pipe.stages.quantization.recipe_name = "w4a16-rtn"
    pipe.stages.quantization.options["calibration_tokens"] = 96
    pipe.stages.genai_builder.transformation_options["split_model.num_splits"] = 2
    assert run_again(pipe, until="quantization")["quantization"] is False
    assert pipe.completed == ("model_loader", "quantization")


def test_a_build_keeps_nothing_twice_and_imports_nothing(
    built: LLMPipeline, short_model: Path, tmp_path: Path
) -> None:
    saved = GenAIContainer.load(built.export(tmp_path / "container"))
    assert (saved.metadata.model.name, saved.precision) == ("tiny_llama", "W8A16")
    assert saved.metadata.graphs.auto_regression_numbers == (1, 8)
    assert built.profiler is not None
    sizes = {one.stage: one.output_bytes for one in built.profiler.profiles}
    weights = (short_model / "model.safetensors").stat().st_size
    assert sizes["quantization"] < weights / 2  # of which attention is rescaled
    assert all(one.peak_memory_bytes > 1 << 20 for one in built.profiler.profiles)
    entries = {entry.name.partition("_")[0] for entry in built.manifest_path.parent.iterdir()}
    assert {"load", "quantize", "arcl", "package"} <= entries
    assert "import" not in entries
    assert saved.metadata.files["embedding_weights.raw"].kind == "embedding"


def test_load_needs_a_manifest_with_outputs(tmp_path: Path, built: LLMPipeline) -> None:
    with pytest.raises(PipelineError, match="no pipeline has run with this cache_dir"):
        LLMPipeline.load(tmp_path)
    for name in ("one", "two"):
        built.manifest.save(tmp_path / name / "pipeline_manifest.json")
    with pytest.raises(PipelineError, match="pipelines of one, two; name one"):
        LLMPipeline.load(tmp_path)
    assert LLMPipeline.load(tmp_path, model="two").completed[-1] == "genai_builder"
    (tmp_path / "two/pipeline_manifest.json").write_text("{}")
    with pytest.raises(PipelineError, match="no manifest of a pipeline"):
        LLMPipeline.load(tmp_path, model="two")
    text = built.manifest.model_dump_json().replace("quantize_", "gone_")
    (tmp_path / "two/pipeline_manifest.json").write_text(text)
    assert LLMPipeline.load(tmp_path, model="two").completed == ("model_loader",)


@pytest.mark.needs("libatomic1")
def test_windows_may_be_shorter_than_the_context(make_recipe: MakeRecipe) -> None:
    scores = {}
    for length in (48, 24, 8):
        recipe = make_recipe()
        recipe["evaluator_config"]["context_length"] = length
        recipe["evaluator_config"]["metrics"][0]["windows"] = 2
        pipe = LLMPipeline.from_pretrained(recipe=recipe).construct(until="model_loader")
        if length == 8:
            with pytest.raises(ConfigFileError, match="8 is not between 9 and 48"):
                pipe.evaluate()
        else:
            scores[length] = pipe.evaluate()["PPL_heldout"]
    assert scores[24] > scores[48]  # with less to go by


@pytest.mark.needs("libatomic1")
def test_a_score_over_several_windows_has_its_standard_error(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe, file = make_recipe(), tmp_path / "recipe.yaml"
    recipe["evaluator_config"]["metrics"][0]["windows"] = 2
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    done = qnnfarm("pipeline", "run", file, "--until", "model_loader")
    line = re.compile(r"^PPL_heldout ([0-9.]+) ± ([0-9.]+) after model_loader$", re.MULTILINE)
    found = line.search(done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert 0 < float(found[2]) < float(found[1])


@pytest.mark.needs("libatomic1")
def test_each_method_says_which_stage_it_needs(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    pipe = LLMPipeline.from_pretrained(recipe=make_recipe())
    assert issubclass(PipelineError, RuntimeError)
    asks: tuple[Any, ...] = (
        pipe.evaluate, lambda: pipe.export(tmp_path), lambda: pipe.generate("Hello"),
    )  # fmt: skip
    for ask in asks:
        with pytest.raises(PipelineError, match=r"call construct\(\) first"):
            ask()
    pipe.construct(until="model_loader")
    with pytest.raises(PipelineError, match="up to the genai_builder first"):
        pipe.generate("Hello", device="virtual:none")
    folder = pipe.export(tmp_path / "float")
    assert {"model.onnx", "config.json", "tokenizer.json"} <= {p.name for p in folder.iterdir()}
    with pytest.raises(WrongUseError, match="name a new folder"):
        pipe.export(folder)


@pytest.mark.needs("libatomic1")
def test_without_a_cache_nothing_stays(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(enable_cache=False, cache_dir=str(tmp_path / "work"))
    pipe = LLMPipeline.from_pretrained(recipe=recipe).construct(until="model_loader")
    assert list((tmp_path / "work").iterdir())
    del pipe
    assert not list((tmp_path / "work").iterdir())


def test_a_changed_value_is_checked_before_anything_runs(make_recipe: MakeRecipe) -> None:
    pipe = LLMPipeline.from_pretrained(recipe=make_recipe())
    for recipe, stage, section, key, value, told in (
        ("w8a16", "model_loader", "model_config_overrides", "input_tokens_per_inference", 0,
         "input_tokens_per_inference"),
        ("w8a16", "quantization", "technique_kwargs", "seqmse", {"num_batches": 30},
         "technique_kwargs.seqmse: seqmse is not applied"),
        ("LPBQ_SeqMSE", "quantization", "technique_kwargs", "seqmse", {"num_batchs": 30},
         "seqmse.num_batchs: unknown key: did you mean num_batches"),
        ("w8a16", "genai_builder", "transformation_options", "split_model.num_split", 2,
         r"transformation_options: .*split_model.num_splits"),
    ):  # fmt: skip
        pipe.stages.quantization.recipe_name = recipe
        values = getattr(pipe.stages[stage], section)
        values[key] = value
        with pytest.raises(ConfigFileError, match=told):
            pipe.construct()
        del values[key]
    assert pipe.completed == ()
    with pytest.raises(AttributeError, match="did you mean quantization"):
        _ = pipe.stages.quantisation


VENDOR = """\
from qairt.api.configs.device import Device
from qairt.experimental.pipeline.torch.llm.pipeline import LLMPipeline

pipe = LLMPipeline.from_pretrained(
    "meta-llama/Llama-3.2-3B-Instruct",
    recipe="llama32_recipe.yaml"
)
pipe.construct()

device = Device(type="android", identifier="<serial>@<hostname>")
result = pipe.generate("Hello, how are you?", device=device)
result.print()
"""
"""The snippet of "Pipeline Overview", docs.qualcomm.com 80-87189-2."""


@pytest.fixture
def working_folder(
    built: LLMPipeline, short_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with the model that the vendor names, and the recipes that documents name."""
    model = tmp_path / "meta-llama" / "Llama-3.2-3B-Instruct"
    model.parent.mkdir()
    model.symlink_to(short_model)
    for name in ("llama32_recipe.yaml", "recipe.yaml"):
        Recipe(built.manifest.recipe).to_yaml(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("working_folder")
def test_the_vendors_snippet_runs_as_it_stands(
    virtual_device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    snippet = VENDOR.replace("<serial>@<hostname>", virtual_device.serial)
    with qairt_modules():
        exec(snippet, {})  # noqa: S102  (what is tested)
    assert capsys.readouterr().out.strip()


@pytest.mark.variant
@pytest.mark.usefixtures("working_folder")
def test_the_documents_snippets_run_as_they_stand(
    virtual_device: Device, short_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[3] / "plugins/pipeline/pipeline.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    scope: dict[str, Any] = {}
    first = first.replace("<serial>@<host>", virtual_device.serial)
    exec(first.replace("path/to/model", str(short_model)), scope)  # noqa: S102
    assert capsys.readouterr().out.strip()
    exec(second, scope)  # noqa: S102
    manifest = scope["pipe"].construct(until="model_loader").manifest
    assert manifest.recipe["stages"]["quantization"] == {"recipe_name": "w4a16"}
    changed = manifest.stages[0].config["model_config_overrides"]
    assert changed == {"input_tokens_per_inference": 16}
