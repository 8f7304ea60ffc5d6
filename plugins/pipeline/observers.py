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
from harness.errors import WrongUseError

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
    """

    stage: str
    number: int
    total: int
    seconds: float
    reused: bool
    folders: tuple[Path, ...]


@dataclass(frozen=True)
class StageFailed:
    """A stage ended with an error, or was interrupted."""

    stage: str
    error: BaseException


StageEvent = StageStarted | StageStep | StageFinished | StageFailed
OnStageEvent = Callable[[StageEvent], object]
"""Called with the events of a pipeline, in its thread or a worker's; an error ends the pipeline."""

_METHODS: Mapping[type, tuple[str, ...]] = {
    StageStarted: ("on_stage_start", "on_stage_started", "on_stage_begin"),
    StageStep: ("on_stage_step",),
    StageFinished: ("on_stage_end", "on_stage_finished", "on_stage_complete", "on_stage_completed"),
    StageFailed: ("on_stage_error", "on_stage_failed", "on_stage_failure"),
}


class StageObserver:
    """An observer with a method for each kind of event, of which it has those that it needs.

    `on_stage_start`, `on_stage_step`, `on_stage_end`, `on_stage_error`; each takes the event. The
    vendor's document names the class and no method, so the usual other names are taken, too.

    Raises:
        WrongUseError: a subclass has a method `on_stage_*` that no event would call.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        known = [name for names in _METHODS.values() for name in names]
        for name in vars(cls):
            if name.startswith("on_stage") and name not in known:
                raise WrongUseError(
                    f"{cls.__name__}.{name}: no event calls it; there are {', '.join(known)}"
                )

    def __call__(self, event: StageEvent) -> None:
        """Hand an event to its method."""
        for name in _METHODS[type(event)]:
            if (method := getattr(self, name, None)) is not None:
                method(event)


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


class StageProfiler(StageObserver):
    """An observer that records the cost of each stage.

    Attributes:
        profiles: of the finished stages, in order.
    """

    def __init__(self) -> None:
        self.profiles: list[StageProfile] = []
        self._known: set[tuple[int, int]] = set()
        self._sampler: _MemorySampler | None = None

    def on_stage_start(self, event: StageStarted) -> None:  # noqa: ARG002
        """Sample memory from now on."""
        self._sampler = _MemorySampler()

    def on_stage_end(self, event: StageFinished) -> None:
        """Record what the stage cost."""
        if self._sampler is not None:
            peak, self._sampler = self._sampler.stop(), None
            size = _new_bytes(event.folders, self._known)
            profile = StageProfile(event.stage, event.seconds, event.reused, peak, size)
            self.profiles.append(profile)

    def on_stage_error(self, event: StageFailed) -> None:  # noqa: ARG002
        """Sample no longer."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None


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
