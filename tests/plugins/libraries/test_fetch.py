"""The wheel for Linux boards, fetched whole or not at all."""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import LibrariesFetchError
from plugins.libraries.fetch import fetch_wheel


def make_wheel(folder: Path, *members: str) -> None:
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "onnxruntime_qnn-1.0-py3-none-any.whl", "w") as wheel:
        for member in members:
            wheel.writestr(member, member)


def fake_pip(folder: Path, code: str) -> tuple[str, ...]:
    """A program that is called as pip is; its `$dest` is where the wheel belongs."""
    script = folder / "pip"
    script.write_text(f'while [ "$1" != --dest ]; do shift; done\ndest=$2 wanted=$3\n{code}\n')
    return ("sh", str(script))


@pytest.fixture
def wheel(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "libraries" / "wheel-1.0"
    yield made
    left = [path.name for path in made.parent.iterdir() if path != made]
    assert left == [f".{made.name}.lock"]


def test_libraries_and_licenses_are_kept_under_their_plain_names(
    tmp_path: Path, wheel: Path
) -> None:
    make_wheel(
        tmp_path / "index", "onnxruntime_qnn/libGenie.so", "onnxruntime_qnn/libQnnHtpV79Skel.so",
        "onnxruntime_qnn/LICENSE", "onnxruntime_qnn/libQnnGpu.so", "onnxruntime_qnn/__init__.py",
        "onnxruntime_qnn/deeper/libQnnHtp.so", "../libQnnSystem.so", "/libQnnHtp.so",
    )  # fmt: skip
    pip = fake_pip(tmp_path, f"cp {tmp_path}/index/*.whl $dest; echo $wanted >{tmp_path}/wanted")
    assert fetch_wheel("1.0", wheel, pip=pip)
    assert sorted(path.name for path in wheel.iterdir()) == [
        "LICENSE", "libGenie.so", "libQnnHtpV79Skel.so",
    ]  # fmt: skip
    assert (tmp_path / "wanted").read_text() == "onnxruntime-qnn==1.0\n"
    assert not fetch_wheel("1.0", wheel, pip=("false",))  # it is there


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("echo 'WARNING: slow' >&2; echo 'ERROR: no such version' >&2; exit 1", "no such version"),
        ("exit 1", "pip says nothing"),
        ("exit 0", "pip says nothing"),
        ("echo junk >$dest/a.whl", "not a zip file"),
        ("cp INDEX/*.whl $dest", "holds no libGenie.so"),
        ("", "No such file"),
    ],
)
def test_a_fetch_that_fails_leaves_nothing(
    tmp_path: Path, wheel: Path, code: str, says: str
) -> None:
    make_wheel(tmp_path / "index", "onnxruntime_qnn/LICENSE")
    pip = fake_pip(tmp_path, code.replace("INDEX", str(tmp_path / "index")))
    pip = pip if code else (str(tmp_path / "no-pip"),)
    with pytest.raises(LibrariesFetchError, match=says):
        fetch_wheel("1.0", wheel, pip=pip)
    assert not wheel.exists()


@pytest.mark.variant
def test_an_index_that_cannot_be_reached_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's own last line is "No matching distribution found"."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    nowhere = {"CONFIG_FILE": os.devnull, "INDEX_URL": "http://127.0.0.1:1/simple", "RETRIES": "1"}
    for name, value in nowhere.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(LibrariesFetchError, match=r"could not reach its .* index: .*refused$"):
        fetch_wheel("1.0", tmp_path / "wheel")
