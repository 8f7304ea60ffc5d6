"""Files of cells on another host: used where they are, or fetched over a real SSH connection."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.devices.devices import Devices
from harness.errors import HostFileError
from harness.lab.content import HostFiles, find_files
from harness.plans.cell_runner import ModelCache
from harness.plans.cells import Cell, make_cell
from harness.pool.requirement import Requirement
from harness.workloads.perplexity import Perplexity
from tests.ssh_server import SshServer, running_ssh_server


@pytest.fixture(scope="module")
def ssh_server(
    tmp_path_factory: pytest.TempPathFactory, new_port: Callable[[], int]
) -> Iterator[SshServer]:
    """The host that submitted, reached as `board`."""
    with running_ssh_server(tmp_path_factory.mktemp("ssh"), new_port()) as server:
        yield server


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


def cell_of(folder: Path, container: Path | None = None, sha256: str = "") -> Cell:
    return make_cell(
        "a/b/c",
        Perplexity(text="text.txt"),
        Requirement(),
        folder=folder,
        container=container,
        container_sha256=sha256,
    )


def test_files_of_a_shared_folder_are_used_where_they_are(files: HostFiles, origin: Path) -> None:
    cell = cell_of(origin)
    (found,) = find_files([cell], ("extra.bin:more",))
    here = files.localise(cell, found, "nowhere.invalid")
    assert here.cell.workload.text == str(origin / "text.txt")  # type: ignore[union-attr]
    assert here.push["more"].path == origin / "extra.bin"


def test_missing_files_are_fetched_once_and_checked(
    files: HostFiles, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of(origin)
    (found,) = find_files([cell], ("extra.bin:more",))
    is_file = Path.is_file
    with monkeypatch.context() as patch:  # this host has nothing of the submitting host's folder
        patch.setattr(Path, "is_file", lambda p: origin not in p.parents and is_file(p))
        here = files.localise(cell, found, "board")
    fetched = Path(here.cell.workload.text)  # type: ignore[union-attr]
    assert origin not in fetched.parents
    assert fetched.read_text() == "In the beginning"
    assert here.push["more"].path.read_bytes() == bytes(1000)
    (origin / "text.txt").unlink()
    assert files.localise(cell, found, "nobody.invalid").cell == here.cell, "it is here now"


def test_file_that_changed_after_it_was_submitted_is_refused(
    files: HostFiles, origin: Path
) -> None:
    cell = cell_of(origin)
    (found,) = find_files([cell], ())
    (origin / "text.txt").write_text("In the end")
    with pytest.raises(HostFileError, match="board changed it"):
        files.localise(cell, found, "board")


def test_host_that_cannot_be_reached_is_named(files: HostFiles, origin: Path) -> None:
    cell = cell_of(origin)
    (found,) = find_files([cell], ())
    (origin / "text.txt").unlink()
    with pytest.raises(HostFileError, match=r"nobody.invalid does not send it"):
        files.localise(cell, found, "nobody.invalid")
