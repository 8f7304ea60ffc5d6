"""The builder on the reference model, with the real compiler."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from buildlib.builder import scheduler, stage_graph
from buildlib.builder.build import BuildOutputs
from buildlib.builder.scheduler import ScheduledTask, run_bounded
from buildlib.container.container import GenAIContainer
from buildlib.errors import (
    CacheError,
    ContainerError,
    ModelFileError,
)
from buildlib.genai import GenAIBuilderHTP
from buildlib.replay import emulator_twin
from suites.models import tiny_llama
from tests.builders import builder_for
from tests.buildlib.conftest import MakeCheckpoint

two_parts = partial(builder_for, splits=2)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the reference model that a test may spoil."""
    folder = tmp_path / "model"
    shutil.copytree(
        tiny_llama.folder(),
        folder,
        ignore=shutil.ignore_patterns("*.py", "train.txt", "__pycache__"),
    )
    return folder


def test_the_second_build_runs_no_stage(build_cache: Path, reference_outputs: BuildOutputs) -> None:
    build = two_parts(tiny_llama.folder(), build_cache).plan()
    container = build.run()
    assert {record.operation: record.reused for record in build.records} == dict.fromkeys(
        ["load", "optimize", "arcl", "transform", "quantize", "convert", "compile", "package"], True
    )
    assert container.path == reference_outputs.container
    assert build.records[-1].number == build.records[-1].total == len(build.records)


def test_parts_share_two_thirds_of_the_memory_that_is_there(
    build_cache: Path, reference_outputs: BuildOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = []

    def record(
        tasks: list[ScheduledTask[Any]], *, max_workers: int, memory_bytes: int
    ) -> list[Any]:
        bounds.append(memory_bytes)
        return run_bounded(tasks, max_workers=max_workers, memory_bytes=memory_bytes)

    monkeypatch.setattr(scheduler, "available_memory", lambda *_: 9 << 30)
    monkeypatch.setattr(stage_graph, "run_bounded", record)
    two_parts(tiny_llama.folder(), build_cache).plan().run()
    assert bounds == [6 << 30]


@pytest.fixture
def phone_builder(small_model: Path, build_cache: Path) -> GenAIBuilderHTP:
    """Builds for a phone what `small_bundle` is for the emulator."""
    return builder_for(small_model, build_cache, target="chipset:SM8750")


def test_a_phone_target_shares_weights_and_most_stages(
    phone_builder: GenAIBuilderHTP, small_bundle: Path
) -> None:
    build = phone_builder.plan()
    container = build.run()
    emulator = GenAIContainer.load(small_bundle)
    assert container.metadata.target.weight_sharing
    assert not emulator.metadata.target.weight_sharing
    assert container.metadata.size_bytes < emulator.metadata.size_bytes
    upstream = [
        record for record in build.records if record.operation in {"load", "optimize", "arcl"}
    ]
    assert all(record.reused for record in upstream)


def test_the_twin_of_a_phones_container_is_the_container_for_the_emulator(
    phone_builder: GenAIBuilderHTP, small_bundle: Path, build_cache: Path, tmp_path: Path
) -> None:
    phone = phone_builder.build()
    twin = emulator_twin(phone, tmp_path / "twin", cache_root=build_cache)
    emulator = GenAIContainer.load(small_bundle)
    assert twin.metadata.container_sha256 == emulator.metadata.container_sha256
    with pytest.raises(ContainerError, match="for the emulator already"):
        emulator_twin(emulator, tmp_path / "none")
    with pytest.raises(CacheError, match="build the container again"):
        emulator_twin(phone, tmp_path / "none", cache_root=tmp_path / "empty")
    assert not (tmp_path / "none").exists()


def test_a_phones_binaries_without_shared_weights_are_those_of_the_emulator(
    phone_builder: GenAIBuilderHTP, small_bundle: Path
) -> None:
    phone_builder.set_compilation_options({"context.weight_sharing_enabled": False})
    phone = phone_builder.build()
    emulator = GenAIContainer.load(small_bundle)
    assert phone.metadata.target.name == "SM8750"
    assert not phone.metadata.target.weight_sharing
    for name in phone.genie_config.ctx_bins:
        assert phone.metadata.files[name] == emulator.metadata.files[name]


@pytest.mark.variant
def test_an_export_is_a_model_folder_itself(
    one_layer: Path, tiny_text: str, build_cache: Path, tmp_path: Path
) -> None:
    built = builder_for(one_layer, build_cache, [1], [96], text=tiny_text).plan().outputs()
    onnx = tmp_path / one_layer.name
    shutil.copytree(built.export, onnx, ignore=shutil.ignore_patterns("*.json", ".*"))
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(built.export / name, onnx)
    container = builder_for(onnx, tmp_path / "cache", [1], [96]).build()
    from_checkpoint = GenAIContainer.load(built.container)
    for name in container.genie_config.ctx_bins:
        assert container.metadata.files[name] == from_checkpoint.metadata.files[name]


@pytest.mark.parametrize("name", [".", "config.json", "tokenizer.json"])
def test_a_missing_file_is_named(checkpoint: Path, tmp_path: Path, name: str) -> None:
    if name == ".":
        shutil.rmtree(checkpoint)
    else:
        (checkpoint / name).unlink()
    reason = "no such file or folder" if name == "." else name
    with pytest.raises(ModelFileError, match=reason) as caught:
        builder_for(checkpoint, tmp_path / "cache")
    assert "\n" not in str(caught.value)


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize("size", [7, 100_000])
def test_truncated_weights_are_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, size: int
) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ModelFileError, match=r"model\.safetensors") as caught:
        builder_for(checkpoint, tmp_path / "cache").build()
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.onnx"))


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_build_takes_is_estimated_before_it_runs(
    make_checkpoint: MakeCheckpoint, tiny_text: str, tmp_path: Path, *, tied: bool
) -> None:
    model = make_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    plans = [
        builder_for(model, tmp_path, (1, 16), (96,), splits, text=tiny_text, target=target).plan()
        for splits, target in ((1, "SM8750"), (1, "SM8750:emulator"), (2, "SM8750:emulator"))
    ]
    source = plans[0].sources.main
    table = 300 * 40
    assert source.quantized_bytes() == source.weights() + (2 if tied else 1) * table
    shared, whole, parts = (plan.memory_bytes for plan in plans)
    assert whole > parts > 400 << 20
    assert whole > shared
    assert plans[0].seconds < plans[1].seconds < 9
