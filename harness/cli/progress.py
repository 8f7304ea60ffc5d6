"""Progress on stderr: of a deployment in bytes, of a build or a pipeline in stages."""

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from harness.console import print_remark, progress, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildlib.builder.runner import StageRecord
    from buildlib.numerics.comparison import StageComparison
    from harness.deploy.push import Progress as OnProgress


@contextmanager
def deploy_progress(device: str) -> "Iterator[OnProgress]":
    """Show one deployment to `device`; gives its `on_progress`.

    The bar appears with the first pushed byte, says when the device hashes, and goes away at the
    end. There is none where stderr is not a terminal.
    """
    device = visible(device)
    with progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ) as bar:
        task = bar.add_task(f"push to {device}", total=None, visible=False)

        def update(sent: int, total: int) -> None:
            what = "push to" if sent < total else "hashing on"
            bar.update(
                task, completed=sent, total=total, description=f"{what} {device}", visible=True
            )

        yield update


def tell_running(seconds: float, words: str) -> None:
    """Say that a command on a device still runs, and how far it is."""
    print_remark(f"still running, {seconds:.0f} s" + (f": {words}" if words else ""))


class StageBar:
    """A progress bar over stages; lines where stderr is no terminal."""

    def __init__(self, title: str) -> None:
        self._bar = progress(
            SpinnerColumn(),
            TextColumn("{task.fields[title]}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.description}", markup=False),
            TimeElapsedColumn(),
        )
        self._task = self._bar.add_task("starting", total=1, title=title)
        self.is_terminal = self._bar.console.is_terminal

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.stop()

    def update(self, **fields: Any) -> None:  # noqa: ANN401 - those of `Progress.update`
        """Change fields of the bar."""
        self._bar.update(self._task, **fields)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(line, markup=False, soft_wrap=True)


class BuildBar(StageBar):
    """A progress bar over a build's stages."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        self._title = title

    def compared(self, comparison: "StageComparison") -> None:
        """Show a comparison."""
        self.update(description=f"verified {comparison.stage} {comparison.subject}")

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
