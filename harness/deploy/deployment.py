"""Deployment of one run: digests of its files, and how they got to the device."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[int, int], None]
"""Called with the bytes pushed so far and the bytes to push."""

Shown = Callable[[str], AbstractContextManager[Progress]]
"""Shows a deployment to the device of that serial, while the block lasts."""


@dataclass(frozen=True, slots=True)
class DeployFile:
    """A file of this host that a run needs.

    Attributes:
        executable: whether the run starts it as a program.
        origin: where this host has it from, in words; the device does not learn it.
    """

    path: Path
    executable: bool = False
    origin: str = ""


@dataclass(frozen=True, slots=True)
class DeployedFile:
    """A file as the run finds it.

    Attributes:
        name: its path inside the run folder.
        pushed: whether it had to be pushed; otherwise the device held its content already.
    """

    name: str
    sha256: str
    size: int
    pushed: bool


@dataclass(frozen=True, slots=True)
class Deployment:
    """The run folder on a device, and where each content in it came from.

    Attributes:
        scripts_dir: the folder on the device that holds `run.sh` and its siblings.
        run_dir: the run folder on the device: links into the store, by the files' names.
        pushed_bytes: a content that has several names is pushed, and counts, once.
        reused_bytes: likewise, of contents that the device held already.
        resumed_bytes: the part of `reused_bytes` that an interrupted deployment had pushed.
        evicted_bytes: size of the contents that were evicted from the store to make room.
        elapsed_s: from the first hash on the host to the finished run folder.
        stages: its stages in their order, with the seconds that each took.
    """

    serial: str
    run_id: str
    scripts_dir: str
    run_dir: str
    files: tuple[DeployedFile, ...]
    pushed_bytes: int
    reused_bytes: int
    elapsed_s: float
    resumed_bytes: int = 0
    evicted_bytes: int = 0
    stages: tuple[tuple[str, float], ...] = ()

    @property
    def pushed(self) -> tuple[str, ...]:
        """Names of the files that had to be pushed."""
        return tuple(file.name for file in self.files if file.pushed)
