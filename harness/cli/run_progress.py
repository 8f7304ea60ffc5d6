"""Progress of `qnnfarm run`: a live table on a terminal, plain lines elsewhere."""

import threading
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.plans.cells import Cell
from harness.plans.outcome import CellOutcome, Failure
from harness.plans.protocols import Observer
from harness.plans.wait_notices import NOTICE_AFTER_S

_MOST_ROWS = 20
_MOST_LABELS = 4


class RunProgress(Observer):
    """`Observer` that shows a plan run, live or as lines."""

    def __init__(self, console: Console, cells: Sequence[Cell], done_before: int) -> None:
        self._console = console
        self._live = console.is_terminal
        self._lock = threading.Lock()
        self._total = len(cells)
        self._before = done_before
        self._ended = {"done": 0, "failed": 0, "interrupted": 0}
        self._busy: dict[str, tuple[Cell, float]] = {}
        self._waiting: dict[str, tuple[str, float]] = {}
        self._seconds = 0.0
        self._most_devices = 0
        self._stopping = False

    def live(self) -> Live | None:
        """Return the live display, a context manager; `None` without a terminal."""
        if not self._live:
            return None
        return Live(
            get_renderable=self.render,
            console=self._console,
            refresh_per_second=4,
            transient=True,
        )

    def on_cell_start(self, cell: Cell, device: str) -> None:
        """See `Observer`."""
        with self._lock:
            self._busy[device] = (cell, time.monotonic())
            self._most_devices = max(self._most_devices, len(self._busy))

    def on_cell_retry(self, cell: Cell, device: str, failure: Failure) -> None:
        """See `Observer`."""
        with self._lock:
            self._busy.pop(device, None)
        self._print(f"retry {cell.label} after {failure.error} on {device}: {failure.reason}")

    def on_cell_end(self, outcome: CellOutcome) -> None:
        """See `Observer`."""
        with self._lock:
            self._busy.pop(outcome.device, None)
            self._ended[outcome.status] += 1
            self._seconds += outcome.duration_s
            count = f"[{self._before + sum(self._ended.values())}/{self._total}]"
        failure = outcome.failure
        if failure is not None:
            self._print(f"{count} failed {outcome.cell.label}: {failure.error}: {failure.reason}")
        elif not self._live:
            words = f"{outcome.status} {outcome.cell.label} on {outcome.device}"
            result = f": {outcome.result.summary}" if outcome.result.summary else ""
            self._print(f"{count} {words} in {outcome.duration_s:.1f} s{result}")

    def on_no_device(self, outcomes: Sequence[CellOutcome]) -> None:
        """See `Observer`."""
        with self._lock:
            for outcome in outcomes:
                self._ended[outcome.status] += 1
            count = f"[{self._before + sum(self._ended.values())}/{self._total}]"
        labels = [outcome.cell.label for outcome in outcomes]
        listing = ", ".join(labels[:_MOST_LABELS])
        if len(labels) > _MOST_LABELS:
            listing += f" and {len(labels) - _MOST_LABELS} more"
        failure = outcomes[0].failure
        if failure is not None:
            self._print(f"{count} failed {listing}: {failure.error}: {failure.reason}")

    def on_wait(self, requirement: str, reason: str) -> None:
        """See `Observer`."""
        with self._lock:
            _, since = self._waiting.pop(requirement, ("", time.monotonic() - NOTICE_AFTER_S))
            if reason:
                self._waiting[requirement] = reason, since
        if reason and not self._live:
            self._print(f"waiting for {requirement}: {reason}")

    def on_stop(self) -> None:
        """See `Observer`."""
        self._stopping = True
        self._print("stopping: ending what runs on the devices; interrupt again to leave at once")

    def render(self) -> Group:
        """Render the display as it is now."""
        with self._lock:
            busy = sorted(self._busy.items())
            waits = list(self._waiting.items())
            counts_by_end, seconds = dict(self._ended), self._seconds
        at = time.monotonic()
        rows = Table("device", "cell", "for", box=None, header_style="bold", pad_edge=False)
        for device, (cell, began) in busy[:_MOST_ROWS]:
            rows.add_row(Text(device), Text(cell.label), f"{at - began:.0f} s")
        if len(busy) > _MOST_ROWS:
            rows.add_row(f"and {len(busy) - _MOST_ROWS} more", "", "")
        for requirement, (reason, since) in waits:
            words = Text(f"waiting for {requirement}: {reason}")
            rows.add_row("", words, f"{at - since:.0f} s", style="yellow")
        n_left = self._total - self._before - sum(counts_by_end.values())
        counts = [
            f"{self._before + counts_by_end['done']} done",
            f"{counts_by_end['failed']} failed",
            f"{n_left} left",
        ]
        n_measured = counts_by_end["done"] + counts_by_end["failed"]
        if n_measured and n_left and not self._stopping:
            eta_s = n_left * (seconds / n_measured) / max(1, self._most_devices)
            counts.append(f"about {_duration(eta_s)} to go")
        head = "stopping: " if self._stopping else ""
        return Group(rows, Text(head + ", ".join(counts), style="bold"))

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
