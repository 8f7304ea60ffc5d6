"""Files of cells on another host: used where they are, or fetched over a real SSH connection."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildlib.cache.inventory import summarize, verify
from buildlib.cache.layout import entry_folders
from buildlib.cache.removal import EntryUsage, prune
from harness.devices.devices import Devices
from harness.errors import HostFileError
from harness.lab.content import BUILD, HostFiles, LocalCell, find_files
from harness.plans.cell_runner import ModelCache
from harness.plans.cells import Cell, make_cell
from harness.pool.requirement import Requirement
from harness.workloads.perplexity import Perplexity
from tests.ssh_server import SshServer


@pytest.fixture
def files(ssh_server: SshServer, tmp_path: Path) -> Iterator[HostFiles]:
    with HostFiles(ModelCache(), Devices(ssh_config=ssh_server.config), tmp_path / "cache") as it:
        yield it


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "text.txt").write_text("In the beginning")
    (folder / "extra.bin").write_bytes(bytes(1000))
    return folder


def cell_of(folder: Path, text: str = "text.txt") -> Cell:
    return make_cell("a/b/c", Perplexity(text=text), Requirement(), folder=folder)


def test_files_of_a_shared_folder_are_used_where_they_are(files: HostFiles, origin: Path) -> None:
    cell = cell_of(origin)
    (found,) = find_files([cell], ("extra.bin:more",))
    with files.localise(cell, found, "nowhere.invalid") as here:
        assert here.cell.workload.text == str(origin / "text.txt")  # type: ignore[union-attr]
        assert here.push["more"].path == origin / "extra.bin"


def fetched(here: LocalCell) -> str:
    """Return the text of a cell."""
    return Path(here.cell.workload.text).read_text()  # type: ignore[union-attr]


def test_missing_files_are_fetched_once_and_checked(
    files: HostFiles, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of(origin)
    (found,) = find_files([cell], ("extra.bin:more",))
    is_file = Path.is_file
    with monkeypatch.context() as patch:  # this host has nothing of the submitting host's folder
        patch.setattr(Path, "is_file", lambda p: origin not in p.parents and is_file(p))
        with files.localise(cell, found, "board") as here:
            assert not Path(here.cell.workload.text).is_relative_to(origin)  # type: ignore[union-attr]
            assert fetched(here) == "In the beginning"
            assert here.push["more"].path.read_bytes() == bytes(1000)
    (origin / "text.txt").unlink()
    with files.localise(cell, found, "nobody.invalid") as again:
        assert again.cell == here.cell, "it is here now"
    extra = cell_of(origin, text="../origin/more.txt")
    (origin / "more.txt").write_text("In the beginning")
    (found,) = find_files([extra], ())
    (origin / "more.txt").unlink()
    with files.localise(extra, found, "nobody.invalid") as here:
        assert fetched(here) == "In the beginning", "the same content is not fetched again"


def test_file_comes_from_another_host_that_has_it(
    ssh_server: SshServer, origin: Path, tmp_path: Path
) -> None:
    cell = cell_of(origin)
    (found,) = find_files([cell], ())
    held = tmp_path / "held"
    (origin / "text.txt").rename(held)
    (sha256,) = found.inputs.values()
    sources = {sha256: [("away.invalid", "/held"), ("board", str(held))]}
    devices = Devices(ssh_config=ssh_server.config)
    with HostFiles(ModelCache(), devices, tmp_path / "cache", lambda _: sources) as files:
        with files.localise(cell, found, "nobody.invalid") as here:
            assert fetched(here) == "In the beginning"
        assert list(files.contents()) == [sha256]


def test_fetched_files_follow_the_rules_of_the_cache(
    files: HostFiles, origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, cell = tmp_path / "cache", cell_of(origin)
    (found,) = find_files([cell], ())
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda p: origin not in p.parents and is_file(p))
    with files.localise(cell, found, "board") as here:
        pruned = prune(cache, everything=True)
        assert (pruned.removed, len(pruned.in_use)) == ((), 1), "a cell uses it"
        assert fetched(here) == "In the beginning"
    (entry,) = [EntryUsage.of(folder) for folder in entry_folders(cache)]
    assert summarize(entry).subject == "1 file of board"
    assert [check.problem for check in verify(cache)] == [None]
    assert len(prune(cache, to_bytes=0).removed) == 1
    assert files.contents() == {}


def test_contents_are_those_of_a_build_that_was_done_again(
    files: HostFiles, tmp_path: Path
) -> None:
    """Builds of 4-bit weights differ each time."""
    for text in ("first", "second"):

        def make(folder: Path, text: str = text) -> None:
            (folder / "model.bin").write_text(text)

        with files.entry(BUILD, {"id": "one"}, "one", make):
            assert list(files.contents()) == [hashlib.sha256(text.encode()).hexdigest()]
        prune(tmp_path / "cache", to_bytes=0)


def test_file_that_changed_after_it_was_submitted_is_refused(
    files: HostFiles, origin: Path
) -> None:
    cell = cell_of(origin)
    (found,) = find_files([cell], ())
    (origin / "text.txt").write_text("In the end")
    with (
        pytest.raises(HostFileError, match="board changed it"),
        files.localise(cell, found, "board"),
    ):
        pass


def test_hosts_that_cannot_be_reached_are_named(
    ssh_server: SshServer, origin: Path, tmp_path: Path
) -> None:
    cell = cell_of(origin)
    (found,) = find_files([cell], ())
    (sha256,) = found.inputs.values()
    (origin / "text.txt").unlink()
    devices = Devices(ssh_config=ssh_server.config)
    others = {sha256: [("away.invalid", "/held"), ("board", str(tmp_path / "removed"))]}
    with HostFiles(ModelCache(), devices, tmp_path / "cache", lambda _: others) as files:
        named = r"away.invalid does not .*board does not .*nobody.invalid does not send it"
        with (
            pytest.raises(HostFileError, match=named),
            files.localise(cell, found, "nobody.invalid"),
        ):
            pass
