"""`StageObserver`, its events, and the observer that records time, memory and bytes of stages."""

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from buildlib.pipeline.runner import StageRecord

_SAMPLE_S = 0.1


@dataclass(frozen=True)
class StageStarted:
    """A stage begins.

    Attributes:
        number: from 1.
        total: number of stages of this run.
    """

    stage: str
    number: int
    total: int


@dataclass(frozen=True)
class StageStep:
    """A step of the running stage is done: one entry of the stage cache."""

    stage: str
    record: StageRecord


@dataclass(frozen=True)
class StageFinished:
    """A stage is done.

    Attributes:
        reused: whether all of it came from the cache.
        folders: its outputs in the cache.
        files: SHA-256 of the user's files that it read.
    """

    stage: str
    number: int
    total: int
    seconds: float
    reused: bool
    folders: tuple[Path, ...]
    files: Mapping[Path, str]


@dataclass(frozen=True)
class StageFailed:
    """A stage ended with an error, or was interrupted."""

    stage: str
    error: BaseException


class StageObserver(Protocol):
    """Receives the events of a pipeline, in its thread or a worker's; a subclass needs not all.

    An observer that raises ends the pipeline.
    """

    def on_stage_start(self, event: StageStarted) -> None:  # noqa: ARG002
        """Take note that a stage begins."""
        return

    def on_stage_step(self, event: StageStep) -> None:  # noqa: ARG002
        """Take note of a step of the running stage."""
        return

    def on_stage_end(self, event: StageFinished) -> None:  # noqa: ARG002
        """Take note that a stage is done."""
        return

    def on_stage_error(self, event: StageFailed) -> None:  # noqa: ARG002
        """Take note that a stage ended with an error."""
        return


@dataclass(frozen=True)
class StageProfile:
    """Cost of one stage.

    Attributes:
        peak_memory_bytes: resident memory of this process and its children together, at most,
            sampled ten times a second.
        output_bytes: of files on the disk that no stage before it had made; links count once.
    """

    stage: str
    seconds: float
    reused: bool
    peak_memory_bytes: int
    output_bytes: int


class StageProfilerObserver(StageObserver):
    """Records what each stage costs.

    Attributes:
        profiles: of the finished stages, in order.
    """

    def __init__(self) -> None:
        self.profiles: list[StageProfile] = []
        self._seen: set[tuple[int, int]] = set()
        self._sampler: _MemorySampler | None = None

    def on_stage_start(self, event: StageStarted) -> None:  # noqa: ARG002
        """Begin to sample memory."""
        self._sampler = _MemorySampler()

    def on_stage_end(self, event: StageFinished) -> None:
        """Record the stage."""
        peak = self._stop()
        size = _new_bytes(event.folders, self._seen)
        self.profiles.append(StageProfile(event.stage, event.seconds, event.reused, peak, size))

    def on_stage_error(self, event: StageFailed) -> None:  # noqa: ARG002
        """Stop to sample."""
        self._stop()

    def _stop(self) -> int:
        sampler, self._sampler = self._sampler, None
        return 0 if sampler is None else sampler.stop()


class StageFilesObserver(StageObserver):
    """Collects the files that stages read and made.

    Attributes:
        read: SHA-256 of the user's files.
        entries: folders in the stage cache.
    """

    def __init__(self) -> None:
        self.read: dict[Path, str] = {}
        self.entries: set[Path] = set()

    def on_stage_end(self, event: StageFinished) -> None:
        """Add the stage's."""
        self.read |= event.files
        self.entries |= set(event.folders)


@dataclass
class _MemorySampler:
    """Thread that samples the resident memory of this process and its children."""

    peak: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.peak

    def _run(self) -> None:
        own = psutil.Process()
        while True:
            self.peak = max(self.peak, _resident(own))
            if self._ended.wait(_SAMPLE_S):
                return


def _resident(process: psutil.Process) -> int:
    total = 0
    with suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def _new_bytes(folders: Iterable[Path], seen: set[tuple[int, int]]) -> int:
    """Add up files whose content no folder before had; remember them in `seen`."""
    total = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):
                    status = os.lstat(Path(parent, name))
                    key = status.st_dev, status.st_ino
                    if key not in seen:
                        seen.add(key)
                        total += status.st_size
    return total
