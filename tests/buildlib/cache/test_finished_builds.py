"""A finished build is told again while all that it read and made is as it was."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from buildlib.cache.finished_builds import FinishedBuild, find_finished, remember_finished
from buildlib.cache.layout import FINISHED, LAST_USED, model_folders

REQUEST = {"model": "m", "targets": ["SM8750"]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache root; model and container lie beside it, the build is remembered in it."""
    for folder in ("model", "container/sub", "cache/m/package_0"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "container" / "a.bin").write_bytes(b"a" * 5000)
    (tmp_path / "container" / "sub" / "b.bin").write_bytes(b"b")
    entry = tmp_path / "cache" / "m" / "package_0"
    (entry / LAST_USED).touch()
    finished = FinishedBuild.of(
        tmp_path / "cache",
        read=[tmp_path / "model" / "config.json"],
        listed=[tmp_path / "model", tmp_path / "model" / "text"],
        containers=[tmp_path / "container"],
        entries=[entry],
        answer=[{"target": "SM8750"}],
    )
    remember_finished(tmp_path / "cache", REQUEST, finished)
    return tmp_path / "cache"


def test_it_is_found_and_its_entries_count_as_used(root: Path) -> None:
    mark = root / "m" / "package_0" / LAST_USED
    os.utime(mark, (1, 1))
    found = find_finished(root, REQUEST)
    assert found is not None
    assert found.answer == [{"target": "SM8750"}]
    assert mark.stat().st_mtime > 1
    assert find_finished(root, REQUEST | {"targets": ["SM8650"]}) is None
    assert find_finished(root / "other", REQUEST) is None
    assert [path.name for path in model_folders(root)] == ["m"]


@pytest.mark.parametrize(
    "change",
    [
        lambda top: (top / "model" / "config.json").write_text("[]"),
        lambda top: (top / "model" / "config.json").unlink(),
        lambda top: (top / "model" / "model.encodings").touch(),
        lambda top: (top / "model" / "text").mkdir() or (top / "model" / "text" / "c").touch(),
        lambda top: (top / "container" / "a.bin").write_bytes(b"a" * 4999 + b"b"),
        lambda top: (top / "container" / "sub" / "b.bin").unlink(),
        lambda top: (top / "cache" / "m" / "package_0" / LAST_USED).unlink(),
        lambda top: [p.write_text("{") for p in (top / "cache" / FINISHED).iterdir()],
        lambda top: [p.write_text("[1]") for p in (top / "cache" / FINISHED).iterdir()],
        lambda top: [p.write_text('{"a": 1}') for p in (top / "cache" / FINISHED).iterdir()],
    ],
    ids=[
        "read", "gone", "new", "new folder", "made", "lost", "entry", "torn", "list", "alien",
    ],
)  # fmt: skip
def test_any_change_ends_it(root: Path, change: Callable[[Path], object]) -> None:
    change(root.parent)
    assert find_finished(root, REQUEST) is None


def test_other_code_or_versions_end_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("QNN_SDK_ROOT", "/elsewhere")
        assert find_finished(root, REQUEST) is None
    with monkeypatch.context() as patch:
        patch.setattr("buildlib.cache.finished_builds._version", lambda name: f"{name} 99")
        assert find_finished(root, REQUEST) is None
    with monkeypatch.context() as patch:
        patch.setattr("buildlib.cache.finished_builds.code_state", lambda _: [("a.py", 1, 2)])
        assert find_finished(root, REQUEST) is None
    assert find_finished(root, REQUEST) is not None
