"""Models that change while they are built, and builds that end while they wait."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from buildlib.builder.runner import StageRecord
from buildlib.builder.scheduler import ScheduledTask, run_bounded
from buildlib.cache.key import StageKey
from buildlib.cache.layout import entry_lock, entry_name
from buildlib.cache.store import StageCache
from buildlib.errors import InputFileError
from buildlib.genai import GenAIBuilderHTP
from tests.builders import builder_for
from tests.system import needs


@pytest.fixture
def model(one_layer_export: Path, tmp_path: Path) -> Path:
    """A copy of the export that shares no file with it."""
    return Path(shutil.copytree(one_layer_export, tmp_path / "model"))


def small_builder(folder: Path, cache: Path) -> GenAIBuilderHTP:
    return builder_for(folder, cache, [1], [96])


def after(operation: str, do: Callable[[], object]) -> Callable[[StageRecord], None]:
    def on_stage(record: StageRecord) -> None:
        if record.operation == operation:
            do()

    return on_stage


@pytest.fixture(scope="module")
def clean(
    one_layer_export: Path, build_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """SHA-256 of the container that nobody disturbs."""
    needs("libatomic1")
    model = Path(shutil.copytree(one_layer_export, tmp_path_factory.mktemp("clean") / "model"))
    return small_builder(model, build_cache).build().metadata.container_sha256


@pytest.mark.parametrize(
    "operation", [pytest.param("import", marks=pytest.mark.variant), "transform"]
)
def test_weights_that_are_written_over_end_the_build_and_spoil_no_entry(
    operation: str, model: Path, clean: str, tmp_path: Path
) -> None:
    """Stages link to the user's files: whoever writes into those writes into the links."""
    (weights,) = model.glob("*.safetensors")
    before = weights.read_bytes()

    def spoil() -> None:
        half = len(before) // 2
        with weights.open("r+b") as file:
            file.seek(half)
            file.write(bytes(byte ^ 0x11 for byte in before[half:]))

    with pytest.raises(InputFileError, match="changed while"):
        small_builder(model, tmp_path / "cache").build(after(operation, spoil))
    with weights.open("r+b") as file:
        file.write(before)
    again = small_builder(model, tmp_path / "cache").build()
    assert again.metadata.container_sha256 == clean


@pytest.mark.variant
def test_a_new_date_is_no_change_and_a_model_that_was_imported_may_go(
    model: Path, clean: str, tmp_path: Path
) -> None:
    (weights,) = model.glob("*.safetensors")
    touch = after("import", weights.touch)
    remove = after("arcl", lambda: shutil.rmtree(model))

    def on_stage(record: StageRecord) -> None:
        touch(record)
        remove(record)

    built = small_builder(model, tmp_path / "cache").build(on_stage)
    assert not model.exists()
    assert built.metadata.container_sha256 == clean


def test_a_build_that_waits_for_another_can_be_ended(tmp_path: Path) -> None:
    key = StageKey("arcl", {}, ())
    other = entry_lock(tmp_path, "tiny", entry_name("arcl", key.digest()))
    cache = StageCache(tmp_path, "tiny")

    def fails() -> None:
        raise OSError("first")

    def waits() -> None:
        cache.get_or_build(key, Path("m"), lambda _: None)

    with other, cache, pytest.raises(OSError, match="first"):
        run_bounded(
            [ScheduledTask("waits", waits), ScheduledTask("fails", fails)],
            max_workers=2,
            memory_bytes=0,
        )
