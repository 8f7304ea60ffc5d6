"""An unchanged run is answered by its record; whatever could change its answer ends that."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from harness.pipeline.finished_run import RecordedRun
from harness.pipeline.llm import LLMPipeline
from suites.models import tiny_llama
from tests.harness.pipeline.conftest import MakeRecipe

if TYPE_CHECKING:
    from harness.pipeline.observers import StageEvent

pytestmark = pytest.mark.needs("libatomic1")

ARGUMENTS = {"until": "model_loader", "prompt": None}

CHANGES: dict[str, Callable[[Path], object]] = {
    "recipe.yaml": lambda file: file.write_text(file.read_text() + "log_level: debug\n"),
    "model/text/heldout.txt": lambda file: file.write_text("Other words"),
    "model/text/calibration.txt": lambda file: file.write_text("Other words"),
    "model/config.json": lambda file: file.unlink(),
    "model/model.encodings": lambda file: file.touch(),
    "text/heldout.txt": lambda file: file.touch(),  # comes first
    "cache/model/pipeline_manifest.json": lambda file: file.write_text("{}"),
}


def dump(recipe: dict[str, Any]) -> str:
    return yaml.safe_dump(recipe, sort_keys=False)


def run_once(recipe: Path) -> LLMPipeline:
    """Run the first stage of a recipe, and keep the answer."""
    run = RecordedRun.of(recipe, None, **ARGUMENTS)
    assert run is not None
    pipe = LLMPipeline.from_pretrained(recipe=recipe)
    events: list[StageEvent] = []
    pipe.add_observer(events.append)
    pipe.construct(until="model_loader")
    answer = {"manifest": str(pipe.manifest_path), "metrics": {"PPL": 17.0}}
    run.remember(pipe, events, answer, None)
    return pipe


def find(recipe: Path, **changes: object) -> object:
    run = RecordedRun.of(recipe, None, **ARGUMENTS | changes)
    answer = None if run is None else run.answer()
    return None if answer is None else answer["metrics"]


@pytest.fixture
def recipe(make_recipe: MakeRecipe, tmp_path: Path) -> Path:
    """A recipe that has run; beside it the model and the cache."""
    model = tmp_path / "model"
    (model / "text").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).symlink_to(tiny_llama.folder() / name)
    for name in ("calibration.txt", "heldout.txt"):
        (model / "text" / name).write_text("And the LORD said unto Moses, " * 20)
    path = tmp_path / "recipe.yaml"
    path.write_text(dump(make_recipe(model_id_or_path="model", cache_dir="cache")))
    run_once(path)
    return path


def test_the_record_is_found_until_something_of_the_run_changes(recipe: Path) -> None:
    answer = {"PPL": 17.0}
    assert find(recipe) == answer
    assert find(recipe, prompt="In the beginning") is None
    assert find(recipe, until=None) is None
    folder = recipe.parent
    (folder / "text").mkdir()
    for name, change in CHANGES.items():
        file = folder / name
        before = file.read_bytes() if file.exists() else None
        change(file)
        assert find(recipe) is None, name
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)
        assert find(recipe) == answer, name


def test_another_recipes_run_of_the_model_ends_it(recipe: Path) -> None:
    other = recipe.with_name("other.yaml")
    content = yaml.safe_load(recipe.read_text())
    sizes = {"sequence_length": 4, "context_length": 48}
    other.write_text(dump(content | {"generator_config": sizes}))
    run_once(other)
    assert find(other) is not None
    assert find(recipe) is None  # the manifest is the other's
    run_once(recipe)
    assert find(recipe) is not None


def test_runs_that_files_alone_do_not_decide_have_no_record(
    recipe: Path, make_recipe: MakeRecipe
) -> None:
    content = yaml.safe_load(recipe.read_text())
    for change in ({"enable_cache": False}, {"model_id_or_path": "org/name"}, {"cache_dirs": "c"}):
        recipe.write_text(dump(content | change))
        assert RecordedRun.of(recipe, None) is None
    assert RecordedRun.of(recipe.with_name("none.yaml"), None) is None
    recipe.write_text("[" * 5000)  # which the run refuses
    assert RecordedRun.of(recipe, None) is None
