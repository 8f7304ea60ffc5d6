"""Ranking of what quantization costs in a pipeline, and mixed precision within a bound."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildlib.checkpoint.config import load_config
from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import container_digest
from buildlib.encodings.files import load_encodings
from buildlib.numerics.divergence import Divergence
from buildlib.numerics.evaluation import evaluate_model, record_float
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.quantize.mixed_precision.proposal import QualityBound
from buildlib.quantize.qdq import apply_encodings
from harness.errors import PipelineError, WrongUseError
from harness.pipeline.bisect import BisectOptions, bisect_pipeline, recipe_of, write_mixture
from harness.pipeline.comparison import ComparedText
from harness.pipeline.llm import LLMPipeline
from harness.pipeline.stage import ModelFolder
from suites.models import tiny_llama
from tests.buildlib.conftest import MakeCheckpoint
from tests.command_line import qnnfarm
from tests.harness.pipeline.conftest import MakeRecipe

pytestmark = pytest.mark.first

EASY_TEXT = "And the LORD spake unto Moses, saying, " * 20
EASY_BOUND = QualityBound("kl", 0.03)
"""Of 4 bits by rounding, met on the easy text and missed on the held-out one."""
LAYERS = BisectOptions(granularity="layer", kinds=("weight",))


@pytest.fixture
def make_pipe(make_recipe: MakeRecipe) -> Callable[..., LLMPipeline]:
    """A pipeline of the short model with weights of 4 bits, by rounding."""

    def make(**changes: object) -> LLMPipeline:
        recipe = make_recipe(**changes)
        recipe["stages"]["quantization"] = {"recipe_name": "w4a16-rtn"}
        return LLMPipeline.from_pretrained(recipe=recipe)

    return make


@pytest.mark.slow
@pytest.mark.needs("libatomic1")
def test_a_proposal_is_built_and_holds_where_it_is_measured_again(
    make_pipe: Callable[..., LLMPipeline], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # other tests write a shared manifest
    pipe = make_pipe(cache_dir=str(tmp_path / "cache")).construct(until="quantization")
    whole, folder = (folder_of(pipe, stage) for stage in ("model_loader", "quantization"))
    before = quantized(pipe, whole, folder, tmp_path)
    bound, out = QualityBound("kl", before.kl * 0.7), tmp_path / "mixed"
    names = sorted(whole.iterdir())

    def check_entry(*_: int) -> None:
        """Other pipelines remove an entry that has a file too many."""
        assert sorted(whole.iterdir()) == names

    wanted = replace(LAYERS, bound=bound, out=out)
    found = bisect_pipeline(pipe, options=wanted, progress=check_entry)
    units = [cost.unit.name for cost in found.sensitivity.costs]
    assert sorted(units)[:2] == ["head weights", "layer 0 weights"]
    assert found.met
    assert found.proposal is not None
    assert 0 < len(found.proposal.raised) < 5
    assert all(text.endswith("proj.weight=8") for text in found.mixed_precision)
    assert found.quantized[1].quality.kl == pytest.approx(before.kl, rel=0.03)
    same_windows = pytest.approx(before.loss_float, rel=1e-3)
    assert found.quantized[1].quality.loss_float == same_windows
    assert found.sensitivity.whole.loss_float != same_windows
    checks = {(check.where, check.windows): check.quality for check in found.tries[-1].checks}
    held_out = checks["CPU", "held out"].kl
    assert held_out <= bound.limit
    assert found.checked is checks["HTP emulator", "held out"]
    assert found.checked.kl == pytest.approx(held_out, rel=0.1)

    mixture = write_mixture(
        whole, folder, found.proposal, found.sensitivity.encodings, tmp_path / "mixture"
    )
    for model in (out, mixture):
        assert quantized(pipe, whole, model, tmp_path).kl == pytest.approx(held_out, rel=0.03)
    assert pipe.manifest_path.read_text().count("mixed_precision") == 0
    encodings = load_encodings(out / "model.encodings").by_name()
    assert {encodings[text.removesuffix("=8")].bw for text in found.mixed_precision} == {8}
    found.print()
    printed = capsys.readouterr().out
    assert "quantization.mixed_precision:" in printed
    assert f"`qnnfarm build {out} --target SM8750:emulator --ar 1,8 --cl 48" in printed


@pytest.mark.needs("libatomic1")
def test_weights_are_raised_until_text_that_did_not_choose_agrees(
    make_pipe: Callable[..., LLMPipeline], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = replace(LAYERS, bound=EASY_BOUND, choose_on=EASY_TEXT, build=False)
    found = bisect_pipeline(make_pipe(), options=wanted)
    assert found.met
    first, *_, last = found.tries
    assert not EASY_BOUND.holds(first.checks[-1].quality)
    assert EASY_BOUND.holds(last.checks[-1].quality)
    n_raised = [len(one.proposal.raised) for one in found.tries]
    assert n_raised == sorted(set(n_raised))
    assert n_raised[-1] < 3
    replace(found, tries=(first,)).print()
    assert "over held-out text after 1 proposal" in capsys.readouterr().out


@pytest.mark.needs("libatomic1")
def test_a_bound_that_held_out_text_misses_ends_with_1(
    short_model: Path, build_cache: Path, tmp_path: Path
) -> None:
    easy = tmp_path / "easy.txt"
    easy.write_text(EASY_TEXT)
    command = f"pipeline bisect {short_model} --ar 8 --cl 48 --windows 1 --json --no-build"
    command += " --quantization w4a16-rtn --weights-only --by layer --bound kl=0.03 --tries 1"
    arguments = [*command.split(), "--choose-on", str(easy)]
    done = qnnfarm(*arguments, env=os.environ | {"QNNFARM_CACHE_DIR": str(build_cache)})
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["granularity"] == "layer"
    assert document["met"] is False
    assert document["proposal"]["met"] is True
    [one] = document["tries"]
    assert [check["windows"] for check in one["checks"]] == ["choosing", "held out"]
    chosen, held_out = (check["kl_divergence"] for check in one["checks"])
    assert chosen < EASY_BOUND.limit < held_out


@pytest.mark.slow
@pytest.mark.needs("libatomic1")
def test_weights_are_raised_until_the_emulator_agrees_with_the_cpu(
    make_checkpoint: MakeCheckpoint,
    make_pipe: Callable[..., LLMPipeline],
    tiny_text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, cache = make_checkpoint(tmp_path / "random"), str(tmp_path / "cache")
    (model / "text").mkdir()
    (model / "text/calibration.txt").write_text(tiny_text)
    pipe = make_pipe(model_id_or_path=str(model), cache_dir=cache, evaluator_config=None)
    loose = replace(LAYERS, bound=QualityBound("kl", 9.0))
    [as_it_is] = bisect_pipeline(pipe, tiny_text, 1, loose).tries
    _, cpu, emulator = (check.quality.kl for check in as_it_is.checks)
    assert cpu < emulator  # which rounds what the CPU computes in float32
    bound = QualityBound("kl", (cpu + emulator) / 2)
    found = bisect_pipeline(pipe, tiny_text, 1, replace(LAYERS, bound=bound, tries=2))
    assert found.met
    held_out = [[bound.holds(check.quality) for check in one.checks[1:]] for one in found.tries]
    assert held_out == [[True, False], [True, True]]
    assert found.checked is found.tries[1].checks[-1].quality
    assert [bool(one.proposal.raised) for one in found.tries] == [False, True]

    failed = replace(found, tries=found.tries[:1])
    assert not failed.met
    failed.print()
    printed = capsys.readouterr().out
    assert f"not met: KL divergence {emulator:.4g} on the HTP emulator, though" in printed
    assert f"KL divergence {cpu:.4g} on the CPU, over held-out text after 1 proposal" in printed
    assert "allow more --tries, or give a looser --bound" in printed


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


def test_models_that_cannot_be_ranked_say_why(make_recipe: MakeRecipe, small_bundle: Path) -> None:
    pipe = LLMPipeline.from_pretrained(recipe=make_recipe(stages={"model_loader": {}}))
    with pytest.raises(PipelineError, match="no stage that quantizes"):
        bisect_pipeline(pipe)
    with pytest.raises(WrongUseError, match="no weights in float"):
        recipe_of(small_bundle, None, "w4a16", (None, None), "SM8750")


def container_like(
    bundle: Path,
    folder: Path,
    options: Mapping[str, Any],
    encodings: Mapping[str, str] | None = None,
    precision: str = "W8A16",
) -> Path:
    """Write a copy of a container with other options of quantization, or built from encodings."""
    shutil.copytree(bundle, folder, copy_function=os.link)
    metadata = GenAIContainer.load(bundle).metadata
    model = metadata.model.model_copy(
        update={
            "inputs": {**metadata.model.inputs, **(encodings or {})},
            "quantization": {**metadata.model.quantization, "precision": precision},
        }
    )
    kept = {k: v for k, v in metadata.options.items() if not k.startswith("quantization.")}
    update = {
        "model": model,
        "options": kept | {f"quantization.{k}": v for k, v in options.items()},
        "container_sha256": container_digest(
            model, metadata.graphs, metadata.target, metadata.files
        ),
    }
    (folder / "metadata.json").unlink()
    (folder / "metadata.json").write_text(metadata.model_copy(update=update).to_json())
    return folder


def test_a_container_is_quantized_as_it_was_built(
    small_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_llama.folder())

    def section(folder: Path) -> dict[str, Any]:
        named, recipe = recipe_of(folder, model, "ignored", (None, None), "SM8850")
        assert named == model
        assert recipe["soc_details"] == "SM8750:emulator"
        assert recipe["generator_config"] == {"sequence_length": 32, "context_length": 192}
        LLMPipeline.from_pretrained(named, recipe=recipe)  # refuses keys that there are not
        found: dict[str, Any] = recipe["stages"]["quantization"]
        return found

    plain = container_like(small_bundle, tmp_path / "plain", {})
    assert section(plain)["recipe_name"] == "w8a16"
    options = {
        "recipe": "w4a16",
        "param_bitwidth": 4,
        "techniques": ("gptaq",),
        "act_bitwidth": 8,
        "mixed_precision": ("*.down_proj.weight=8",),
        "technique_kwargs.gptaq.damping": 0.02,
    }
    found = section(container_like(small_bundle, tmp_path / "mixed", options))
    assert found["recipe_name"] == "w4a16"
    assert found["options"] == {"act_bitwidth": 8, "mixed_precision": ("*.down_proj.weight=8",)}
    assert found["technique_kwargs"] == {"gptaq": {"damping": 0.02}}

    of_encodings = {"model.encodings": "0" * 64}
    known = container_like(small_bundle, tmp_path / "known", {}, of_encodings, "W4A16")
    assert section(known) == {"recipe_name": "w4a16"}
    assert "encodings that tiny_llama has not: taking w4a16" in capsys.readouterr().err
    unknown = container_like(small_bundle, tmp_path / "unknown", {}, of_encodings, "W4/8A16")
    with pytest.raises(WrongUseError, match="W4/8A16 by encodings"):
        section(unknown)


def test_a_container_is_measured_beside_its_quantization(
    built: LLMPipeline, short_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    container = built.outputs()["container"]
    assert isinstance(container, Path)
    named, recipe = recipe_of(container, str(short_model), "w8a16", (None, None), "SM8750")
    pipe = LLMPipeline.from_pretrained(named, recipe=recipe | {"cache_dir": str(built.cache_root)})
    found = bisect_pipeline(pipe, windows=1, options=replace(LAYERS, container=container))
    assert found.met
    assert found.container is not None
    assert found.container.where == "HTP emulator"
    assert found.container.quality.kl == pytest.approx(found.sensitivity.whole.kl, rel=0.5)
    found.print()
    assert "container  HTP emulator" in capsys.readouterr().out
