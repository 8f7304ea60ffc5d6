"""Stages and observers of a user's own, as plugins/pipeline/pipeline.md shows them."""

import importlib.metadata
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest

from buildlib import entry_points
from buildlib.errors import BuildError
from harness.errors import ConfigFileError, WrongUseError
from plugins.pipeline.llm import LLMPipeline
from plugins.pipeline.observers import (
    StageEvent,
    StageFailed,
    StageFinished,
    StageObserver,
    StageStarted,
    StageStep,
)
from plugins.pipeline.registry import DOOR, StageRegistry, register_stage
from plugins.pipeline.stage import (
    ModelFolder,
    Stage,
    StageConfig,
    StageContext,
    StageInput,
    StageOutput,
)
from suites.models import tiny_llama

DOCUMENT = (Path(__file__).parents[3] / "plugins/pipeline/pipeline.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class CountInput(StageInput):
    model: ModelFolder


class CountConfig(StageConfig):
    unit: int = 1
    fails: bool = False


@dataclass(frozen=True)
class CountOutput(StageOutput):
    count: ModelFolder
    bytes_counted: int


class Count(Stage[CountInput, CountConfig, CountOutput]):
    """Count the bytes of the graph."""

    Input, Config, Output = CountInput, CountConfig, CountOutput

    def run(self, inputs: CountInput, config: CountConfig, context: StageContext) -> CountOutput:
        def fill(folder: Path) -> None:
            if config.fails:
                raise WrongUseError("it cannot be counted")
            size = (inputs.model.path / "model.onnx").stat().st_size
            (folder / "count.txt").write_text(str(size // config.unit))

        made = context.folder(self, inputs, config, fill)
        return CountOutput(made, int((made.path / "count.txt").read_text()))


@pytest.fixture(autouse=True)
def count_stage() -> Iterator[None]:
    register_stage("count")(Count)
    register_stage("rewrite")(Rewrite)
    yield
    for name in ("count", "rewrite", "stamp"):
        StageRegistry().unregister(name)


@dataclass(frozen=True)
class RewriteOutput(StageOutput):
    model: ModelFolder


class Rewrite(Stage[CountInput, StageConfig, RewriteOutput]):
    """Leave the model in other words than the stages of this project."""

    Input, Output = CountInput, RewriteOutput

    def run(self, inputs: CountInput, config: StageConfig, context: StageContext) -> RewriteOutput:
        def fill(folder: Path) -> None:
            shutil.copytree(inputs.model.path, folder, dirs_exist_ok=True)
            model = onnx.load(folder / "model.onnx", load_external_data=False)
            for node in model.graph.node:
                for names in (node.input, node.output):
                    names[:] = [name.replace("_q_heads", "_queries") for name in names]
            onnx.save(model, folder / "model.onnx")

        return RewriteOutput(context.folder(self, inputs, config, fill))


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, event: StageEvent) -> None:
        match event:
            case StageStarted(stage, number, total):
                self.lines.append(f"start {stage} {number}/{total}")
            case StageStep(stage, record):
                self.lines.append(f"step {stage} {record.operation}")
            case StageFinished(stage):
                self.lines.append(f"end {stage} {event.reused}")
            case StageFailed(stage, error):
                self.lines.append(f"error {stage} {error}")


def make_pipe(cache: Path, **count: object) -> tuple[LLMPipeline, Log]:
    recipe: dict[str, Any] = {
        "cache_dir": str(cache),
        "generator_config": {"sequence_length": 8, "context_length": 48},
        "stages": {"model_loader": {}, "count": count},
    }
    pipe, log = LLMPipeline.from_pretrained(tiny_llama.folder(), recipe=recipe), Log()
    pipe.add_observer(log)
    return pipe, log


@pytest.mark.needs("libatomic1")
def test_a_stage_of_ones_own_is_cached_and_observed(tmp_path: Path) -> None:
    pipe, log = make_pipe(tmp_path)
    pipe.construct()
    with pytest.raises(ValueError, match="added already"):
        pipe.add_observer(log)
    assert log.lines == [
        "start model_loader 1/2", "step model_loader load", "end model_loader False",
        "start count 2/2", "step count count", "end count False",
    ]  # fmt: skip
    again, seen = make_pipe(tmp_path)
    again.construct()
    assert [line for line in seen.lines if line.startswith("end")] == [
        "end model_loader True", "end count True",
    ]  # fmt: skip
    changed, seen = make_pipe(tmp_path, unit=2)
    changed.construct()
    assert seen.lines[-1] == "end count False"
    entry = LLMPipeline.load(tmp_path).manifest.stages[1]
    assert entry.config == {"unit": 2, "fails": False}
    assert entry.output["bytes_counted"] > 1000
    assert changed.export(tmp_path / "out").joinpath("count.txt").read_text().isdigit()


@pytest.mark.needs("libatomic1")
def test_an_observer_has_the_methods_that_it_needs(tmp_path: Path) -> None:
    seen: list[str] = []

    class Ends(StageObserver):
        def on_stage_start(self, event: StageStarted) -> None:
            seen.append(f"start {event.stage}")

        def on_stage_error(self, event: StageFailed) -> None:
            seen.append(f"error {event.stage}")

    pipe, _ = make_pipe(tmp_path, fails=True)
    pipe.add_observer(Ends())
    with pytest.raises(WrongUseError, match="cannot be counted"):
        pipe.construct()
    assert seen == ["start model_loader", "start count", "error count"]
    with pytest.raises(WrongUseError, match=r"on_stage_paused: no event calls it; there are on_st"):
        type("Odd", (StageObserver,), {"on_stage_paused": Ends.on_stage_start})


@pytest.mark.needs("libatomic1")
def test_a_failing_stage_keeps_those_before_it(tmp_path: Path) -> None:
    pipe, log = make_pipe(tmp_path, fails=True)
    with pytest.raises(WrongUseError, match="cannot be counted"):
        pipe.construct()
    assert log.lines[-1] == "error count it cannot be counted"
    assert [*pipe.completed] == [*LLMPipeline.load(tmp_path).completed] == ["model_loader"]
    pipe.stages.count.fails = False
    pipe.construct()
    assert log.lines.count("start model_loader 1/2") == 1
    assert [*pipe.completed] == ["model_loader", "count"]


@pytest.mark.needs("libatomic1")
def test_a_model_that_ones_own_stage_made_is_imported(tmp_path: Path) -> None:
    pipe, log = make_pipe(tmp_path)
    few = {"options": {"calibration_tokens": 96}}
    sections: dict[str, Any] = {"model_loader": {}, "rewrite": {}, "quantization": few}
    recipe = {**pipe.manifest.recipe, "stages": sections}
    changed = LLMPipeline.from_pretrained(tiny_llama.folder(), recipe=recipe)
    changed.add_observer(log)
    changed.construct()
    steps = [line.removeprefix("step ") for line in log.lines if line.startswith("step")]
    assert steps == [
        "model_loader load", "rewrite rewrite", "quantization import", "quantization optimize",
        "quantization quantize",
    ]  # fmt: skip
    assert (changed.export(tmp_path / "out") / "model.encodings").is_file()


def test_a_stages_keys_are_checked_as_all_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"count.units: unknown key: did you mean unit"):
        make_pipe(tmp_path, units=2)


def test_an_installed_packages_stage_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = f"{entry_points.PREFIX}{DOOR}"
    own = importlib.metadata.EntryPoint("tally", f"{__name__}:Tally", group)
    broken = importlib.metadata.EntryPoint("lost", "no.such.module:Stage", group)
    real = importlib.metadata.entry_points(group=group)
    both = importlib.metadata.EntryPoints((*real, own))
    monkeypatch.setattr(entry_points, "installed", lambda _: both)
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(
        Tally=type("Tally", (Count,), {"name": ""})
    ))  # fmt: skip
    names = list(StageRegistry().stages())
    assert names[:4] == ["model_loader", "quantization_opt", "quantization", "genai_builder"]
    assert "tally" in names
    lost = importlib.metadata.EntryPoints((broken,))
    monkeypatch.setattr(entry_points, "installed", lambda _: lost)
    with pytest.raises(BuildError, match=r"lost of qnnfarm.pipeline_stages .*cannot be loaded"):
        StageRegistry().stages()


@pytest.mark.needs("libatomic1")
def test_the_documents_stage_and_observer_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    stamp = next(block for block in blocks if "class Stamp(" in block)
    announcer = next(block for block in blocks if "def announce(" in block)
    file = tmp_path / "my_stages.py"
    file.write_text(stamp)
    scope: dict[str, Any] = {}
    exec(compile(stamp, str(file), "exec"), scope)  # noqa: S102  (what is tested)
    recipe = {
        "cache_dir": str(tmp_path / "cache"),
        "generator_config": {"sequence_length": 8, "context_length": 48},
        "stages": {"model_loader": {}, "stamp": {"text": "ours"}},
    }
    scope["pipe"] = LLMPipeline.from_pretrained(tiny_llama.folder(), recipe=recipe)
    exec(announcer, scope)  # noqa: S102
    scope["pipe"].construct()
    out = scope["pipe"].export(tmp_path / "out")
    assert (out / "stamp.txt").read_text() == "ours"
    assert re.search(r"^stamp: \d+\.\d s$", capsys.readouterr().out, re.MULTILINE)
