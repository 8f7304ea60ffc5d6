"""Bundles and the files of the user's in them."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.targets import find_soc
from harness.deploy.deployment import DeployFile
from harness.errors import WrongUseError
from harness.runtimes.bundles.bundle import Bundle, pushed_files


def test_files_are_pushed_under_their_names_or_others(tmp_path: Path) -> None:
    for name in ("libX.so", "a:b"):
        (tmp_path / name).write_text(name)
    (tmp_path / "tool").touch(mode=0o755)
    found = pushed_files(["libX.so", "libX.so:libQnnHtp.so", "a:b", "a:b:c/d", "tool"], tmp_path)
    assert {name: file.path.name for name, file in found.items()} == {
        "libX.so": "libX.so", "libQnnHtp.so": "libX.so", "a:b": "a:b", "c/d": "a:b", "tool": "tool",
    }  # fmt: skip
    assert [name for name, file in found.items() if file.executable] == ["tool"]


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["gone"], "there is no file"),
        ([""], "there is no file"),
        (["gone:x"], "there is no file"),
        (["x:../x"], "cannot be a file's name"),
        (["x:/x"], "cannot be a file's name"),
        (["x:.qnnfarm/x"], "cannot be a file's name"),
        (["x", "y:x"], "'x' is given twice"),
    ],
)
def test_what_cannot_be_pushed(tmp_path: Path, texts: list[str], says: str) -> None:
    for name in ("x", "y"):
        (tmp_path / name).touch()
    with pytest.raises(WrongUseError, match=says) as caught:
        pushed_files(texts, tmp_path)
    assert str(caught.value).startswith("--push ")


@given(st.text(max_size=30))
def test_any_text_is_a_file_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "empty"
    folder.mkdir(exist_ok=True)
    with pytest.raises(WrongUseError):
        pushed_files([text], folder)


def test_records_have_digests_and_the_last_of_a_name(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).write_text(name)
    bundle = Bundle("x86_64", find_soc("SM8750"), {"a": DeployFile(tmp_path / "x", origin="SDK")})
    mine = bundle.add({"a": DeployFile(tmp_path / "y", origin="--push")})
    (before,), (after,) = bundle.records(), mine.records()
    assert (before.origin, before.sha256) == ("SDK", hashlib.sha256(b"x").hexdigest())
    assert (after.origin, after.sha256) == ("--push", hashlib.sha256(b"y").hexdigest())
