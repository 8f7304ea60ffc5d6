"""What is recorded about where a result comes from."""

import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from harness.results import provenance
from harness.results.records import now
from tests.system import program


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(
        [program("git"), "-C", str(folder), *identity, *arguments], check=True, capture_output=True
    )


def test_the_commit_and_whether_it_is_all(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "faster-rope")
    assert provenance.git_state(tmp_path) == (None, None, None)
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    commit, dirty, branch = provenance.git_state(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    assert dirty is False
    assert branch == "faster-rope"
    (tmp_path / "file").write_text("two")
    assert provenance.git_state(tmp_path) == (commit, True, "faster-rope")


def test_a_job_that_checks_out_a_commit_names_its_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in provenance._CI_BRANCHES:
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-qm", "one", "--allow-empty")
    git(tmp_path, "checkout", "-q", "--detach")
    assert provenance.git_state(tmp_path).branch is None
    monkeypatch.setenv("GITHUB_HEAD_REF", "")
    monkeypatch.setenv("GITHUB_REF_NAME", "main")
    assert provenance.git_state(tmp_path).branch == "main"


def test_no_repository_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance.git_state(tmp_path / "missing") == (None, None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_state(tmp_path) == (None, None, None)


def test_versions_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "HOST_LIBRARIES", ("sqlalchemy", "no-such-distribution"))
    found = provenance.capture("ort_qnn", {"qnn": "2.51"})
    assert set(found.library_versions) == {"python", "sqlalchemy"}
    assert found.toolchain_versions == {"qnn": "2.51"}
    assert found.host


def test_a_live_writer_is_not_gone() -> None:
    mark = provenance.this_writer()
    long_ago, lately = (now() - timedelta(hours=hours) for hours in (25, 23))
    assert not provenance.has_ended(mark, long_ago)
    boot, namespace, pid, started = mark.split(":")
    assert provenance.has_ended(f"{boot}:{namespace}:{pid}:{int(started) - 1}", lately)
    for nonsense in ("", ":::", "x", f"{boot}:{namespace}", f"{boot}:{namespace}:²:1"):
        assert not provenance.has_ended(nonsense, lately)


def test_a_writer_elsewhere_is_gone_after_a_day() -> None:
    _, namespace, pid, _ = provenance.this_writer().split(":")
    of_another_host = f"another-boot:{namespace}:{pid}:1"
    assert not provenance.has_ended(of_another_host, now() - timedelta(hours=23))
    assert provenance.has_ended(of_another_host, now() - timedelta(hours=25))
