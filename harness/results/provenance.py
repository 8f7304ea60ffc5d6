"""Provenance of a result: versions, the host, the user's git commit, the writing process."""

import functools
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from harness import processes
from harness.results.records import Provenance, now

SILENCE = timedelta(hours=24)
"""Time after which a run of a writer that cannot be asked counts as interrupted."""
_GIT_TIMEOUT_S = 10.0
_CI_BRANCHES = (
    "GITHUB_HEAD_REF",  # of a pull request
    "GITHUB_REF_NAME",
    "CI_MERGE_REQUEST_SOURCE_BRANCH_NAME",
    "CI_COMMIT_BRANCH",
    "BUILDKITE_BRANCH",
    "GIT_BRANCH",  # Jenkins
)
HOST_LIBRARIES = (
    "onnxruntime",
    "onnxruntime-qnn",
    "onnx",
    "onnx-ir",
    "numpy",
    "tokenizers",
    "adbutils",
)
"""Python distributions whose versions can change a result."""


def capture(toolchain: str, toolchain_versions: Mapping[str, str]) -> Provenance:
    """Record the provenance of a run that starts now.

    Args:
        toolchain: name of the container's compiler.
        toolchain_versions: of the compiler and its parts.
    """
    state = git_state(Path.cwd())
    return Provenance(
        toolchain=toolchain,
        toolchain_versions=dict(toolchain_versions),
        library_versions={"python": platform.python_version(), **_installed(HOST_LIBRARIES)},
        qnnfarm_version=own_version(),
        host=f"{platform.node()} ({platform.system()} {platform.machine()})",
        git_commit=state.commit,
        git_dirty=state.dirty,
        git_branch=state.branch,
    )


@functools.cache
def own_version() -> str:
    """Return the version of qnnfarm."""
    return importlib.metadata.version("qnnfarm")


class GitState(NamedTuple):
    """State of the repository around a folder; None without one, or without git.

    Attributes:
        dirty: whether there are uncommitted changes to files that git knows.
        branch: for a detached commit, that of the CI job.
    """

    commit: str | None = None
    dirty: bool | None = None
    branch: str | None = None


def git_state(folder: Path) -> GitState:
    """Read the state of the repository around a folder."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return GitState()
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    # CI jobs check out a commit, not a branch, and name the branch in their environment.
    ci_branches = (value for name in _CI_BRANCHES if (value := os.environ.get(name)))
    branch = _git(folder, "symbolic-ref", "--quiet", "--short", "HEAD") or next(ci_branches, None)
    return GitState(commit, None if changes is None else bool(changes), branch)


def git_history(folder: Path, reference: str) -> tuple[str, ...]:
    """List the commits that a reference of git reaches, newest first; none without it, or git."""
    commits = _git(folder, "rev-list", "--max-count=5000", "--end-of-options", reference, "--")
    return tuple((commits or "").split())


def git_branch_history(folder: Path, branch: str) -> tuple[str, ...]:
    """List the commits of a branch, here and at the origin, no parent before its child."""
    places = [f"refs/{place}/{branch}" for place in ("heads", "remotes/origin")]
    options = ("--topo-order", "--max-count=5000", "--ignore-missing")
    commits = _git(folder, "rev-list", *options, "--end-of-options", *places, "--")
    return tuple((commits or "").split())


def git_branches(folder: Path) -> str:
    """List all that `git_branch_history` and `git_default_branch` go by; empty without git."""
    form = "--format=%(refname) %(objectname) %(symref)"
    return _git(folder, "for-each-ref", form, "refs/heads", "refs/remotes/origin") or ""


def git_default_branch(folder: Path) -> str | None:
    """Return the default branch of the repository that a folder was cloned from, if git knows."""
    branch = _git(folder, "symbolic-ref", "--quiet", "--short", "refs/remotes/origin/HEAD")
    return branch.partition("/")[2] if branch else None


def this_writer() -> str:
    """Mark this process: boot, PID namespace, PID, and start time in ticks since boot.

    It tells a run in progress from one whose process died.
    """
    return ":".join((*_place(), str(os.getpid()), str(processes.own_start())))


def has_ended(writer: str, began: datetime) -> bool:
    """Tell whether the process that writes a run has ended, as far as this host can know.

    Of a process of another host, or from before a restart of this one, nothing is known but its
    time: it counts as ended `SILENCE` after the run began. If it lives, it finishes its run still.
    """
    boot, namespace, pid, start = (writer.split(":") + [""] * 4)[:4]
    is_here = bool(namespace) and (boot, namespace) == _place()
    if not (is_here and pid.isdecimal() and start.isdecimal()):
        return now() - began > SILENCE
    return processes.has_ended(int(pid), int(start))


def _place() -> tuple[str, str]:
    """Return the boot and the PID namespace, e.g. `4026531836`, of this process."""
    return processes.boot_id(), processes.pid_namespace().removeprefix("pid:[").removesuffix("]")


def _git(folder: Path, *arguments: str) -> str | None:
    # A repository's own configuration may name programs to run; fsmonitor is the one that `status`
    # starts.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def _installed(libraries: Sequence[str]) -> dict[str, str]:
    versions = {}
    for name in libraries:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
