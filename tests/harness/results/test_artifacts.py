"""Files that are kept with runs, by content beside the database."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from harness.errors import ArtifactError, NotStoredError, RunConflictError
from harness.results import maintenance
from harness.results.artifacts import ArtifactFolder
from harness.results.maintenance import PrunePolicy
from harness.results.records import now
from harness.results.store import ResultsStore
from tests.harness.results.places import make_run


@pytest.fixture(autouse=True)
def shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNNFARM_ARTIFACTS_DIR", str(tmp_path / "shared"))


def test_a_file_is_kept_with_its_run(store: ResultsStore) -> None:
    run = make_run()
    with store.recording(run) as recorder:
        kept = recorder.add_artifact("run.log", b"one\x00two", "log")
        with pytest.raises(RunConflictError, match=r"'run\.log' exists already"):
            recorder.add_artifact("run.log", b"other", "log")
    assert store.artifacts(run.id) == (kept,)
    bare = make_run()
    with store.recording(bare):
        pass
    assert store.artifacts_of([bare.id, run.id]) == {bare.id: (), run.id: (kept,)}
    assert (kept.kind, kept.size_bytes) == ("log", 7)
    assert store.read_artifact(kept) == b"one\x00two"
    with pytest.raises(NotStoredError):
        store.artifacts("0" * 32)


def test_equal_contents_are_kept_once_and_go_with_their_last_run(store: ResultsStore) -> None:
    old = make_run(created_at=now() - timedelta(days=9))
    new = make_run()
    for run in (old, new):
        with store.recording(run) as recorder:
            kept = recorder.add_artifact("run.log", b"same", "log")
            recorder.add_artifact("id", run.id.encode())
    folder = ArtifactFolder.of(store.location)
    assert len(list(folder.folder.glob("??/*"))) == 3
    aged = time.time() - 7200
    for path in folder.folder.glob("??/*"):
        os.utime(path, (aged, aged))
    removed = sum(
        maintenance.prune(store.database, PrunePolicy(now() - timedelta(days=1))),
        maintenance.PruneCounts(),
    )
    assert (removed.runs, removed.artifacts) == (1, 2)
    assert maintenance.sweep_artifacts(store.database) == 32
    assert store.read_artifact(kept) == b"same"
    assert len(list(folder.folder.glob("??/*"))) == 2


def test_a_young_content_without_a_row_stays(tmp_path: Path) -> None:
    folder = ArtifactFolder(tmp_path)
    sha256 = folder.put(b"about to be named")
    assert folder.sweep(frozenset()) == 0
    assert folder.read(sha256) == b"about to be named"


def test_damaged_and_missing_artifacts_are_errors(tmp_path: Path) -> None:
    folder = ArtifactFolder(tmp_path)
    sha256 = folder.put(b"text")
    folder.path(sha256).write_bytes(b"tex!")
    with pytest.raises(ArtifactError, match="damaged"):
        folder.read(sha256)
    folder.path(sha256).unlink()
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        folder.read(sha256)


def test_it_lies_beside_a_file_and_never_in_a_folder_of_two(tmp_path: Path) -> None:
    folders = {ArtifactFolder.of(str(tmp_path / name)).folder for name in ("r.db", "r.sqlite")}
    assert folders == {tmp_path / "r.db.artifacts", tmp_path / "r.sqlite.artifacts"}


def test_of_a_server_it_is_in_the_state_folder_unless_one_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "postgresql+psycopg://lab:***@db.example/results"
    assert ArtifactFolder.of(url).folder == tmp_path / "shared"
    monkeypatch.delenv("QNNFARM_ARTIFACTS_DIR")
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path))
    assert ArtifactFolder.of(url).folder == tmp_path / "artifacts" / "db.example_results"
