"""Progress of a build or a pipeline on stderr, in stages."""

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from buildlib.progress import WorkNote, telling
from harness.console import progress

if TYPE_CHECKING:
    from buildlib.builder.runner import StageRecord
    from buildlib.numerics.comparison import SideComparison


_TELL_S, _MOST_SILENT_S = 15.0, 60.0
"""Seconds until a stage is told of for the first time, and the most between two times."""


class StageBar:
    """A progress bar over stages, from the first work on; lines where stderr is no terminal."""

    def __init__(self, title: str) -> None:
        self._bar = progress(
            SpinnerColumn(),
            TextColumn("{task.fields[title]}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.description}", markup=False),
            TimeElapsedColumn(),
        )
        self._title = title
        self._stack, self._lock, self._ended = ExitStack(), threading.Lock(), threading.Event()
        self._running: dict[str, tuple[float, str]] = {}
        self._task = self._bar.add_task("starting", total=1, title=title)
        self.is_terminal = self._bar.console.is_terminal

    def __enter__(self) -> Self:
        self._stack.enter_context(telling(self._hear))
        if not self.is_terminal:
            self._stack.callback(self._ended.set)
            threading.Thread(target=self._tell, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()
        self._bar.stop()

    def _hear(self, work: WorkNote) -> None:
        """Note how far a stage is, and show it on a terminal."""
        with self._lock:
            began, _ = self._running.pop(work.name, (time.monotonic(), ""))
            if not work.ended:
                self._running[work.name] = began, work.words
        if self.is_terminal and not work.ended:
            self._bar.start()
            self.update(description=f"{work.name}: {work.words}" if work.words else work.name)

    def _tell(self) -> None:
        """Tell of stages that take long, less and less often."""
        told: dict[str, float] = {}
        while not self._ended.wait(1.0):
            with self._lock:
                running = dict(self._running)
            told = {name: moment for name, moment in told.items() if name in running}
            for name, (began, words) in running.items():
                seconds = time.monotonic() - began
                if seconds >= 2 * told.get(name, _TELL_S / 2) or (
                    seconds - told.get(name, seconds) >= _MOST_SILENT_S
                ):
                    told[name] = seconds
                    far = f", {words}" if words else ""
                    self.print(f"{self._title}: {name}: still running, {seconds:.0f} s{far}")

    def update(self, **fields: Any) -> None:  # noqa: ANN401 - those of `Progress.update`
        """Change fields of the bar."""
        self._bar.update(self._task, **fields)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(line, markup=False, soft_wrap=True)


class ModelBar(StageBar):
    """A progress bar over what is read before any stage: the weights of a GGUF."""

    def __init__(self) -> None:
        super().__init__("model")

    def _hear(self, work: WorkNote) -> None:
        began, _ = self._running.get(work.name, (time.monotonic(), ""))
        super()._hear(work)
        if work.ended and not self.is_terminal:
            self.print(f"model: {work.name} ({stage_time(time.monotonic() - began, reused=False)})")


class BuildBar(StageBar):
    """A progress bar over a build's stages."""

    def compared(self, comparison: "SideComparison") -> None:
        """Show a comparison."""
        self.update(description=f"verified {comparison.side} {comparison.where}")

    def show(self, record: "StageRecord") -> None:
        """Advance to a stage that has ended."""
        text = describe_stage(record)
        self.update(completed=record.number, total=record.total, description=text)
        if not self.is_terminal:
            place = f"{record.number}/{record.total} " if record.total else ""
            self.print(f"{self._title}: {place}{text}")


def describe_stage(record: "StageRecord") -> str:
    """Describe a stage that has ended: its work, and its time."""
    return f"{record.operation} {record.subject} ({stage_time(record.seconds, record.reused)})"


def stage_time(seconds: float, reused: bool) -> str:
    """Format the time of a stage."""
    return "cached" if reused else f"{seconds:.1f} s"
