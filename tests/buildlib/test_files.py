"""Files and folders that appear whole or not at all."""

import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from buildlib.files import atomic_folder, atomic_path, atomic_write


def test_a_file_appears_at_the_end_with_the_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "new" / ("n" * 255)
    before = os.umask(0o027)
    try:
        with atomic_write(path) as file:
            file.write(b"whole")
            assert not path.exists()
    finally:
        os.umask(before)
    assert path.read_bytes() == b"whole"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"old")
    with suppress(KeyboardInterrupt), atomic_write(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("links", [True, False], ids=["hard-links", "none"])
def test_a_file_that_may_not_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    path = tmp_path / "kept"
    with atomic_write(path, replace=False) as file:
        file.write(b"first")
    assert path.read_bytes() == b"first"
    if links:
        with pytest.raises(FileExistsError), atomic_write(path, replace=False) as file:
            file.write(b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_was_never_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "missing"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    before = os.umask(0o027)
    try:
        for text in ("first", "second"):
            with atomic_folder(path) as scratch:
                (scratch / "below").mkdir()
                (scratch / "below" / text).write_text(text)
    finally:
        os.umask(before)
    assert [p.name for p in path.rglob("*") if p.is_file()] == ["second"]
    with pytest.raises(ZeroDivisionError), atomic_folder(path) as scratch:
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
