"""Files of cells in a folder that all hosts see: used only with the content that was submitted."""

from pathlib import Path

import pytest

from harness.errors import HostFileError
from harness.plans.cell_runner import ModelCache
from harness.plans.cells import Cell, make_cell
from harness.pool.requirement import Requirement
from harness.workloads.generate import Generate
from harness.workloads.perplexity import Perplexity
from plugins.lab.content import CellFiles, check_cell, find_files


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("In the beginning")
    (tmp_path / "extra.bin").write_bytes(bytes(1000))
    return tmp_path


def cell_in(folder: Path, text: str = "text.txt") -> Cell:
    return make_cell("a/b/c", Perplexity(text=text), Requirement(), folder=folder)


def files_of(cell: Cell, *push: str) -> CellFiles:
    (files,) = find_files([cell], push, ModelCache())
    return files


def test_files_with_their_content_are_used(shared: Path) -> None:
    cell = cell_in(shared, "../" + shared.name + "/text.txt")
    pushes = check_cell(cell, files_of(cell, "extra.bin:more"), ModelCache())
    assert {name: file.path for name, file in pushes.items()} == {"more": shared / "extra.bin"}


@pytest.mark.parametrize("name", ["text.txt", "extra.bin"])
def test_file_that_changed_or_is_away_is_refused(shared: Path, name: str) -> None:
    cell = cell_in(shared)
    files = files_of(cell, "extra.bin")
    (shared / name).write_text("In the end")
    with pytest.raises(HostFileError, match=name):
        check_cell(cell, files, ModelCache())
    (shared / name).unlink()
    with pytest.raises(Exception, match=name):
        check_cell(cell, files, ModelCache())


def test_file_without_a_hash_is_refused(shared: Path) -> None:
    """Whoever names one without its content would be told the content."""
    other = make_cell("a/b/c", Generate(prompt_file="secret"), Requirement(), folder=shared)
    (shared / "secret").write_text("42")
    files = files_of(cell_in(shared), "extra.bin")
    for cell, push in ((other, ()), (cell_in(shared), (f"{shared}/secret:a",))):
        with pytest.raises(HostFileError, match="without a hash"):
            check_cell(cell, files.model_copy(update={"push": push}), ModelCache())


@pytest.mark.needs("libatomic1")
def test_container_that_was_replaced_is_another_one(shared: Path, tiny_bundle: Path) -> None:
    folder, models = shared / "tiny", ModelCache()
    folder.symlink_to(tiny_bundle)
    sha256 = models.open(folder).info.sha256
    cell = make_cell(
        "a/b/c", Perplexity(text="text.txt"), Requirement(), folder=shared, container=folder,
        container_sha256=sha256,
    )  # fmt: skip
    files = files_of(cell)
    check_cell(cell, files, models)
    folder.unlink()
    folder.mkdir()
    with pytest.raises(HostFileError, match="tiny"):
        check_cell(cell, files, models)
