"""Events of a pipeline's stages, and the observer that records time, memory and bytes of them."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from buildlib.builder.runner import StageRecord

_SAMPLE_S = 0.1
_SAMPLE_PART = 0.01
"""Of a CPU at most: a sample looks through all processes of the machine."""


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


StageEvent = StageStarted | StageStep | StageFinished | StageFailed
StageObserver = Callable[[StageEvent], object]
"""Called with the events of a pipeline, in its thread or a worker's; an error ends the pipeline."""


@dataclass(frozen=True)
class StageProfile:
    """Cost of one stage.

    Attributes:
        peak_memory_bytes: resident memory of this process and its children together, at most,
            sampled ten times a second, or as often as takes a hundredth of a CPU.
        output_bytes: of files on the disk that no stage before it had made; links count once.
    """

    stage: str
    seconds: float
    reused: bool
    peak_memory_bytes: int
    output_bytes: int


class StageProfiler:
    """An observer that records the cost of each stage.

    Attributes:
        profiles: of the finished stages, in order.
    """

    def __init__(self) -> None:
        self.profiles: list[StageProfile] = []
        self._known: set[tuple[int, int]] = set()
        self._sampler: _MemorySampler | None = None

    def __call__(self, event: StageEvent) -> None:
        """Sample memory from the start of a stage to its end, and record it then."""
        if isinstance(event, StageStarted):
            self._sampler = _MemorySampler()
        elif not isinstance(event, StageStep) and self._sampler is not None:
            peak, self._sampler = self._sampler.stop(), None
            if isinstance(event, StageFinished):
                size = _new_bytes(event.folders, self._known)
                profile = StageProfile(event.stage, event.seconds, event.reused, peak, size)
                self.profiles.append(profile)


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
            began = time.thread_time()
            self.peak = max(self.peak, _resident(own))
            took = time.thread_time() - began
            if self._ended.wait(max(_SAMPLE_S, took / _SAMPLE_PART)):
                return


def _resident(process: psutil.Process) -> int:
    total = 0
    with suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def _new_bytes(folders: Iterable[Path], seen: set[tuple[int, int]]) -> int:
    """Add up files that no folder before had; remember them in `seen`."""
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
