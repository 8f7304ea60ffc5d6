"""A stage of the cache, replayed alone."""

import json
from pathlib import Path

import pytest

from buildlib.cache.key import StageKey
from buildlib.cache.layout import SIDECAR
from buildlib.cache.store import StageCache
from buildlib.errors import InputFileError, InvalidOptionError, ToolchainMissingError
from buildlib.targets import parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from plugins.pipeline.replay import CompiledModel, StageModel, compile, convert, load  # noqa: A004
from tests.buildlib.toolchains.conftest import write_model

PHONE = parse_target("SM8750")


@pytest.fixture(scope="module")
def dlcs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("replay")
    paths = []
    for ar in (1, 8):
        write_model(folder / f"ar{ar}.onnx", ar)
        paths.append(folder / f"ar{ar}_cl32_1_of_1.dlc")
        OrtQnnToolchain().convert(folder / f"ar{ar}.onnx", paths[-1], PHONE)
    return paths


@pytest.mark.needs("libatomic1")
def test_a_compile_entry_of_the_cache_is_made_again_byte_for_byte(
    dlcs: list[Path], tmp_path: Path
) -> None:
    config = CompileConfig.for_target(PHONE).with_options({"graphs.vtcm_size_in_mb": 4})
    key = StageKey("compile", config.model_dump(mode="json"), ("source",))
    cache = StageCache(tmp_path / "cache", "sample")
    entry = cache.get_or_build(
        key, dlcs[0], lambda folder: OrtQnnToolchain().compile(dlcs, folder / "model.bin", config)
    )
    sidecar = json.loads((entry.folder / SIDECAR).read_text())
    replayed = compile(load(dlcs), CompileConfig.model_validate(sidecar["config"]))
    saved = replayed.save(tmp_path / "again" / "model.bin")
    assert saved.read_bytes() == (entry.folder / "model.bin").read_bytes()
    assert [graph.name for graph in replayed.inspect().graphs] == [dlc.stem for dlc in dlcs]
    assert {graph.vtcm_mb for graph in replayed.inspect().graphs} == {4}


@pytest.mark.needs("libatomic1")
def test_one_dlc_alone_and_its_temporary_folder_goes_with_it(
    dlcs: list[Path], tmp_path: Path
) -> None:
    model = load(str(dlcs[1]))
    assert model == StageModel((dlcs[1],))
    assert model.graph_names == ("ar8_cl32_1_of_1",)
    compiled = compile(model, CompileConfig.for_target(PHONE))
    folder = compiled.path.parent
    assert compiled.save(tmp_path) == tmp_path / "ar8_cl32_1_of_1.bin"
    del compiled
    assert not folder.exists()


def test_what_the_sdk_made_is_replayed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QAIRT_SDK_ROOT", str(tmp_path / "sdk"))
    cache = StageCache(tmp_path / "cache", "sample")
    split = cache.get_or_build(StageKey("transform", {}, ()), tmp_path, lambda _: None)
    key = StageKey("convert", {}, (split.hash, split.hash), {"toolchain": "qairt"})
    cache.get_or_build(key, tmp_path, lambda _: None, subject="ar1_cl32_1_of_1")
    part = StageModel((split.folder / "ar1_cl32_1_of_1.onnx",))
    with pytest.raises(ToolchainMissingError, match=str(tmp_path / "sdk")):
        convert(part, {"target": "SM8750"})


def test_saving_never_overwrites_silently(dlcs: list[Path], tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "model.bin").write_bytes(b"new")
    compiled = CompiledModel(work / "model.bin", CompileConfig.for_target(PHONE), OrtQnnToolchain())
    (tmp_path / "there.bin").write_bytes(b"old")
    with pytest.raises(InputFileError, match="exists already"):
        compiled.save(tmp_path / "there.bin")
    assert (tmp_path / "there.bin").read_bytes() == b"old"
    compiled.save(tmp_path / "there.bin", exist_ok=True)
    assert (tmp_path / "there.bin").read_bytes() == b"new"
    assert {path.name for path in tmp_path.iterdir()} == {"work", "there.bin"}


def test_dlcs_and_options_that_cannot_be_compiled_are_refused_before_any_work(
    dlcs: list[Path], tmp_path: Path
) -> None:
    twin, empty, archive = tmp_path / dlcs[0].name, tmp_path / "empty", tmp_path / "archive"
    twin.write_bytes(dlcs[0].read_bytes())
    empty.touch()
    archive.write_bytes(b"PK\x05\x06" + bytes(18))
    for paths, reason in (
        ([], "no DLC is named"),
        ([dlcs[0], twin], "has its name"),
        ([tmp_path / "none"], "no such file"),
        ([empty], "no DLC"),
        ([archive], "holds no model"),
    ):
        with pytest.raises(InputFileError, match=reason):
            load(paths)
    config = CompileConfig.for_target(PHONE).with_options({"graphs.vtcm_size_in_mb": 64})
    with pytest.raises(InvalidOptionError, match="vtcm_size_in_mb"):
        compile(load(dlcs), config)
