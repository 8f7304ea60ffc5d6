import json
import os
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from buildlib.cache import store
from buildlib.cache.key import StageKey
from buildlib.cache.layout import FILES, LAST_USED, SIDECAR
from buildlib.cache.store import StageCache
from buildlib.errors import BuildError, CacheError, InputFileError, ToolchainError


def key(**config: object) -> StageKey:
    return StageKey("convert", config, ("a" * 64,), {"qnn": "2.51"}, "c" * 64)


def fill(folder: Path) -> None:
    (folder / "part.dlc").write_bytes(b"dlc")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[StageCache]:
    with StageCache(tmp_path / "root", "tiny") as cache:
        yield cache


def test_an_entry_is_made_once_with_the_documented_place_and_sidecar(
    cache: StageCache, tmp_path: Path
) -> None:
    config = {"act": 16, "graphs": {"vtcm_size_in_mb": 8, "O": None}, "ars": (1, 128)}
    entry = cache.get_or_build(key(**config), Path("model.onnx"), fill)
    assert entry.folder == tmp_path / "root" / "tiny" / f"convert_{entry.hash[:32]}"
    info = json.loads((entry.folder / SIDECAR).read_text())
    assert list(info) == ["operation", "source", "config", "hash", "created_at"]
    assert info["hash"] == entry.hash
    assert info["config"] == json.loads(json.dumps(config))
    os.utime(entry.folder / LAST_USED, (0, 0))
    again = cache.get_or_build(key(**config), Path("m"), lambda _: pytest.fail("built again"))
    assert (entry.reused, again.reused) == (False, True)
    assert entry.folder == again.folder
    assert (entry.folder / LAST_USED).stat().st_mtime > time.time() - 60


def test_values_become_json_or_are_refused(tmp_path: Path) -> None:
    class Options(BaseModel):
        level: int = 3

    assert key(o=Options(), p=Path("x")).digest() == key(p="x", o={"level": 3}).digest()
    with pytest.raises(TypeError, match="object"):
        key(bad=object()).digest()
    with pytest.raises(ValueError, match="JSON"):
        key(bad=float("nan")).digest()


def test_all_that_the_output_depends_on_changes_the_hash() -> None:
    fields: dict[str, Any] = {
        "operation": "convert",
        "config": {"a": 1, "b": 2},
        "source_hashes": ("a" * 64, "b" * 64),
        "versions": {"qnn": "2.51"},
        "code_sha256": "c" * 64,
    }
    others: list[dict[str, Any]] = [
        {},
        {"operation": "compile"},
        {"config": {"a": 2, "b": 2}},
        {"source_hashes": ("b" * 64, "a" * 64)},  # their order counts
        {"versions": {"qnn": "2.52"}},
        {"code_sha256": "d" * 64},
    ]
    assert len({StageKey(**fields | other).digest() for other in others}) == len(others)
    turned = StageKey(**fields | {"config": {"b": 2, "a": 1}})
    assert turned.digest() == StageKey(**fields).digest()


def test_a_failed_stage_leaves_no_entry_and_no_scratch(cache: StageCache, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise RuntimeError("compiler died")

    with pytest.raises(RuntimeError, match="compiler died"):
        cache.get_or_build(key(), Path("m"), fail)
    assert list((tmp_path / "root" / "tiny").iterdir()) == []


@pytest.mark.parametrize(
    "damage", ["trim", "flip", "remove", "add", "sidecar", "config", "files", "link"]
)
def test_a_damaged_entry_is_built_again(cache: StageCache, damage: str) -> None:
    folder = cache.get_or_build(key(), Path("m"), fill).folder
    match damage:
        case "trim":
            (folder / "part.dlc").write_bytes(b"d")
        case "flip":
            (folder / "part.dlc").write_bytes(b"dlb")
        case "remove":
            (folder / "part.dlc").unlink()
        case "add":
            (folder / "other").touch()
        case "sidecar":
            (folder / SIDECAR).write_text("{")
        case "config":
            text = (folder / SIDECAR).read_text()
            (folder / SIDECAR).write_text(text.replace('"config": {}', '"config": {"a": 1}'))
        case "files":
            (folder / FILES).unlink()
        case _:
            (folder / "part.dlc").rename(folder.parent / "elsewhere")
            (folder / "part.dlc").symlink_to(folder.parent / "elsewhere")
    again = cache.get_or_build(key(), Path("m"), fill)
    assert not again.reused
    assert again.problem
    assert (folder / "part.dlc").read_bytes() == b"dlc"
    assert cache.get_or_build(key(), Path("m"), fill).reused


def test_a_source_changed_through_its_link_is_seen(cache: StageCache, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"w" * 2_000_000)

    def link(folder: Path) -> None:
        (folder / "weights").hardlink_to(weights)

    folder = cache.get_or_build(key(), Path("m"), link).folder
    assert cache.get_or_build(key(), Path("m"), link).reused
    with weights.open("r+b") as file:
        file.seek(1_000_001)  # between the blocks of a probe
        file.write(b"x")
    weights.rename(tmp_path / "changed")
    weights.write_bytes(b"w" * 2_000_000)
    again = cache.get_or_build(key(), Path("m"), link)
    assert again.problem == "weights has changed since it was written"
    assert (folder / "weights").samefile(weights)


def test_two_builds_at_once_make_an_entry_once(tmp_path: Path) -> None:
    built: list[int] = []
    both_here = threading.Barrier(2)

    def slow_fill(folder: Path) -> None:
        built.append(1)
        fill(folder)

    def work(_: int) -> None:
        both_here.wait()
        with StageCache(tmp_path, "tiny") as cache:
            cache.get_or_build(key(), Path("m"), slow_fill)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert built == [1]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", ".builds", ".locks"])
def test_a_model_without_a_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CacheError, match="name"):
        StageCache(tmp_path, name)


@pytest.mark.parametrize("kind", ["pipe", "link", "name"])
def test_invalid_files_of_an_entry_are_refused(
    cache: StageCache, tmp_path: Path, kind: str
) -> None:
    def odd(folder: Path) -> None:
        match kind:
            case "pipe":
                os.mkfifo(folder / "pipe")
            case "link":
                (folder / "link").symlink_to(tmp_path)
            case _:
                (folder / "a\nb").touch()

    with pytest.raises(InputFileError):
        cache.get_or_build(key(), Path("m"), odd)
    assert list((tmp_path / "root" / "tiny").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_line_and_leaves_nothing(
    cache: StageCache, tmp_path: Path
) -> None:
    def too_large(folder: Path) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            (folder / "part.dlc").write_bytes(bytes(20_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    (tmp_path / "file").touch()
    no_folder = StageCache(tmp_path / "file", "tiny")
    for place, make, reason in (
        (cache, too_large, "does not fit on the disk"),
        (no_folder, fill, "cannot be used"),
    ):
        with pytest.raises(CacheError, match=reason) as caught:
            place.get_or_build(key(), Path("m"), make)
        assert "\n" not in str(caught.value)
    assert list((tmp_path / "root" / "tiny").iterdir()) == []


def test_an_error_of_the_system_names_stage_and_path(cache: StageCache, tmp_path: Path) -> None:
    def seek(folder: Path) -> None:
        with (folder / "part.dlc").open("wb") as file:
            os.lseek(file.fileno(), -1, os.SEEK_SET)

    with pytest.raises(BuildError, match=rf"stage convert ar1: {tmp_path}.*: Invalid argument$"):
        cache.get_or_build(key(), Path("m"), seek, subject="ar1")
    with pytest.raises(BuildError, match=r"/none/part\.dlc: No such file or directory$"):
        cache.get_or_build(key(), Path("m"), lambda at: fill(at / "none"))


def test_a_compiler_that_fails_on_a_full_disk_is_told_as_that(
    cache: StageCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_folder: Path) -> None:
        raise ToolchainError("compile", "part.bin", "error 6022", 1, (), "")

    with pytest.raises(ToolchainError):
        cache.get_or_build(key(), Path("m"), fail)
    monkeypatch.setattr(store, "_FULL_BYTES", 1 << 62)  # less than that is free anywhere
    with pytest.raises(CacheError, match="does not fit on the disk, which is full"):
        cache.get_or_build(key(), Path("m"), fail)
    assert list((tmp_path / "root" / "tiny").iterdir()) == []
