import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.manifest import FORMAT_VERSION
from buildlib.container.writer import ContainerContents, write_container
from buildlib.errors import (
    ContainerError,
    InputFileError,
    InvalidOptionError,
)


def skip_genie(_folder: Path) -> None:
    """Genie's judgement has tests of its own."""


def write(draft: ContainerContents, dest: Path, *, exist_ok: bool = False) -> GenAIContainer:
    return write_container(draft, dest, exist_ok=exist_ok, validate=skip_genie)


@pytest.fixture
def container(draft: ContainerContents, tmp_path: Path) -> GenAIContainer:
    return write(draft, tmp_path / "container")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_container_appears_with_genies_consent_alone(
    draft: ContainerContents, tmp_path: Path
) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "genie_config.json").is_file()
        raise InputFileError("genie_config.json", "no")

    dest = tmp_path / "out" / "container"
    with pytest.raises(InputFileError):
        write_container(draft, dest, validate=refuse)
    assert list(dest.parent.iterdir()) == []
    written = write_container(draft, dest)
    loaded = GenAIContainer.load(dest)
    assert loaded == written
    assert loaded.genie_config == draft.genie_config
    assert loaded.htp_config == draft.htp_config
    assert set(loaded.files) == {*draft.genie_config.referenced_files, "genie_config.json"}
    assert loaded.sizes[0].name == "tiny_part_2_of_2.bin"
    assert loaded.metadata.size_bytes == sum(part.size_bytes for part in loaded.sizes)


def test_equal_builds_are_equal_byte_for_byte(
    make_draft: Callable[[], ContainerContents], tmp_path: Path
) -> None:
    for name in "ab":
        write_container(make_draft(), tmp_path / name, validate=skip_genie)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_save_copies(
    container: GenAIContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "empty").mkdir()
    for dest, place in (("~/copy", tmp_path / "home/copy"), (tmp_path / "empty",) * 2):
        saved = container.save(dest)
        assert saved.path == place
        assert snapshot(place) == snapshot(container.path)
        assert GenAIContainer.load(dest).metadata == container.metadata
    assert container.save(container.path) is container
    assert container.export("~/bundle.zip", format="zip").is_relative_to(tmp_path / "home")


def test_save_never_overwrites_silently(container: GenAIContainer, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    (tmp_path / "link").symlink_to(mine)
    copy = container.save(tmp_path / "copy").path
    (copy / "notes").mkdir()
    (copy / "notes" / "thesis.txt").write_text("precious")
    for dest, exist_ok, reason in (
        (mine, False, "is there already"),
        (mine, True, "something else"),
        (copy, True, "something else"),
        (tmp_path / "link", True, "is not a folder"),
        (mine / "thesis.txt", True, "is not a folder"),
        (mine / "thesis.txt" / "below", False, "cannot be written"),
        (container.path / "copy", False, "in the container itself"),
    ):
        with pytest.raises(ContainerError, match=reason) as caught:
            container.save(dest, exist_ok=exist_ok)
        assert caught.value.exit_code == 2
    with pytest.raises(ContainerError, match="in the container itself"):
        container.export(container.path / "copy")
    with pytest.raises(InvalidOptionError, match=r"'tar'.*genie_bundle, zip"):
        container.export(tmp_path / "new", format="tar")  # type: ignore[arg-type]
    assert {p.name for p in tmp_path.iterdir()} == {"parts", "container", "mine", "link", "copy"}
    assert not (container.path / "copy").exists()
    assert snapshot(mine) == {"thesis.txt": b"precious"}
    assert (copy / "notes" / "thesis.txt").read_text() == "precious"


def test_save_replaces_another_container_and_leaves_an_equal_one(
    container: GenAIContainer, draft: ContainerContents, tmp_path: Path
) -> None:
    def inodes() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in target.iterdir()}

    target = write(dataclasses.replace(draft, options={}), tmp_path / "other").path
    with pytest.raises(ContainerError, match="is there already"):
        container.save(target)
    container.save(target, exist_ok=True)
    assert snapshot(target) == snapshot(container.path)
    assert {p.name for p in tmp_path.iterdir()} == {"parts", "container", "other"}
    before = inodes()
    container.save(target, exist_ok=True)
    assert inodes() == before  # nothing was copied
    (target / "tiny_part_1_of_2.bin").write_bytes(b"other")
    container.save(target, exist_ok=True)
    assert snapshot(target) == snapshot(container.path)
    (target / "tokenizer.json").unlink()
    (target / "tokenizer.json").symlink_to(container.path / "tokenizer.json")
    container.save(target, exist_ok=True)
    assert not (target / "tokenizer.json").is_symlink()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("tiny_part_1_of_2.bin", flip, "has changed"),
        ("tokenizer.json", flip, "has changed"),
        ("genie_config.json", flip, "(was edited: .* --genie-config|has changed)"),
        (
            "htp_backend_ext_config.json",
            lambda path: os.truncate(path, 3),
            "was edited: -O of the build",
        ),
        ("tiny_part_2_of_2.bin", lambda path: os.truncate(path, 19_999), "has 19999 bytes"),
        ("tokenizer.json", Path.unlink, "is missing"),
    ],
)
def test_a_damaged_file_is_named_and_never_copied(
    container: GenAIContainer,
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], object],
    reason: str,
) -> None:
    damage(container.path / name)
    for use in (
        lambda: GenAIContainer.load(container.path, verify=damage is flip),
        lambda: container.save(tmp_path / "copy"),
        lambda: container.export(tmp_path / "copy.zip", format="zip"),
    ):
        with pytest.raises(ContainerError, match=f"file '{re.escape(name)}' {reason}"):
            use()
    assert {p.name for p in tmp_path.iterdir()} == {"parts", "container"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "not a container"),
        ("", "not JSON"),
        ("[]", "not a container"),
        ("[" * 100_000, "not JSON"),
        ('{"format_version": true}', "not a container"),
        ('{"format_version": 1}', "it is missing"),
        (os.mkfifo, "is not a file"),  # which is not waited for
        (lambda path: path.parent.rmdir(), "there is no such folder"),
    ],
)
def test_what_is_no_manifest_is_refused(text: Any, said: str, tmp_path: Path) -> None:  # noqa: ANN401
    path = tmp_path / "metadata.json"
    if callable(text):
        text(path)
    elif text is not None:
        path.write_text(text)
    with pytest.raises(ContainerError, match=said) as caught:
        GenAIContainer.load(tmp_path)
    assert "\n" not in str(caught.value)


def edit(container: GenAIContainer, change: Callable[[dict[str, Any]], None]) -> None:
    path = container.path / "metadata.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_later_format_is_refused(container: GenAIContainer) -> None:
    edit(container, lambda values: values.update(format_version=FORMAT_VERSION + 1))
    with pytest.raises(ContainerError, match="update qnnfarm"):
        GenAIContainer.load(container.path)


def test_hostile_file_names_are_refused(container: GenAIContainer) -> None:
    def rename(values: dict[str, Any]) -> None:
        values["files"]["../evil"] = values["files"].pop("tokenizer.json")

    edit(container, rename)
    with pytest.raises(ContainerError, match="no name for a file"):
        GenAIContainer.load(container.path)


def test_parts_must_fit_together(
    draft: ContainerContents, genie_config: GenieConfig, tmp_path: Path
) -> None:
    fewer = dict(list(draft.binaries.items())[:1])
    with pytest.raises(ContainerError, match="tiny_part_2_of_2"):
        write(dataclasses.replace(draft, binaries=fewer), tmp_path / "c")
    longer = draft.graphs.model_copy(update={"context_length": 256})
    with pytest.raises(ContainerError, match="context length"):
        write(dataclasses.replace(draft, graphs=longer), tmp_path / "c")
    with pytest.raises(ContainerError, match="cannot be written"):
        write(dataclasses.replace(draft, tokenizer=tmp_path / "absent"), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_killed_save_leaves_no_half_container(
    container: GenAIContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        container.save(tmp_path / "copy")
    assert {p.name for p in tmp_path.iterdir()} == {"parts", "container"}
