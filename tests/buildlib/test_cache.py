import json
import threading
from pathlib import Path

import pytest

from buildlib.cache import SIDECAR, StageCache, StageKey


def key(**config: object) -> StageKey:
    return StageKey("convert", config, ("a" * 64,))


def fill(folder: Path) -> None:
    (folder / "part.dlc").write_bytes(b"dlc")


def test_an_entry_has_the_documented_place_and_sidecar(tmp_path: Path) -> None:
    entry = StageCache(tmp_path, "tiny").get_or_build(key(act=16), Path("model.onnx"), fill)
    assert entry.folder == tmp_path / "tiny" / f"convert_{entry.hash[:32]}"
    info = json.loads((entry.folder / SIDECAR).read_text())
    assert set(info) == {"operation", "source", "config", "hash", "created_at"}
    assert info["hash"] == entry.hash
    assert info["config"] == {"act": "16"}


def test_the_second_time_nothing_is_built(tmp_path: Path) -> None:
    cache = StageCache(tmp_path, "tiny")
    first = cache.get_or_build(key(act=16), Path("m"), fill)
    second = cache.get_or_build(key(act=16), Path("m"), lambda _: pytest.fail("built again"))
    assert (first.reused, second.reused) == (False, True)
    assert first.folder == second.folder


def test_options_and_sources_change_the_hash_and_their_order_of_writing_does_not() -> None:
    assert key(a=1, b=2).digest() == key(b=2, a=1).digest()
    assert key(a=1).digest() != key(a=2).digest()
    assert key(a=1).digest() != StageKey("convert", {"a": 1}, ("b" * 64,)).digest()
    assert key(a=1).digest() != StageKey("compile", {"a": 1}, ("a" * 64,)).digest()


def test_a_failed_stage_leaves_no_entry_and_no_scratch(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise RuntimeError("compiler died")

    cache = StageCache(tmp_path, "tiny")
    with pytest.raises(RuntimeError, match="compiler died"):
        cache.get_or_build(key(), Path("m"), fail)
    assert [path for path in (tmp_path / "tiny").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("damage", ["trim", "remove", "sidecar"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    cache = StageCache(tmp_path, "tiny")
    folder = cache.get_or_build(key(), Path("m"), fill).folder
    match damage:
        case "trim":
            (folder / "part.dlc").write_bytes(b"d")
        case "remove":
            (folder / "part.dlc").unlink()
        case _:
            (folder / SIDECAR).write_text("{")
    again = cache.get_or_build(key(), Path("m"), fill)
    assert not again.reused
    assert (folder / "part.dlc").read_bytes() == b"dlc"


def test_two_builds_at_once_make_an_entry_once(tmp_path: Path) -> None:
    built: list[int] = []
    both_here = threading.Barrier(2)

    def slow_fill(folder: Path) -> None:
        built.append(1)
        fill(folder)

    def work() -> None:
        both_here.wait()
        StageCache(tmp_path, "tiny").get_or_build(key(), Path("m"), slow_fill)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]
