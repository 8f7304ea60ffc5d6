"""Peak resident memory of this process with all that descend from it, sampled."""

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryMeter:
    """Samples while it is entered. Memory that processes share counts once for each of them.

    Attributes:
        peak_bytes: the largest sample.
    """

    def __init__(self, period_s: float = 0.1) -> None:
        self.peak_bytes = 0
        self._since_lap = 0
        self._period_s = period_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def lap(self) -> int:
        """Return the largest sample since the last call."""
        peak, self._since_lap = self._since_lap, 0
        return peak

    def _sample(self) -> None:
        while not self._end.is_set():
            now = sum(map(resident_bytes, _family(os.getpid())))
            self.peak_bytes = max(self.peak_bytes, now)
            self._since_lap = max(self._since_lap, now)
            self._end.wait(self._period_s)


def _family(root: int) -> list[int]:
    """Return a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
        children.setdefault(parent, []).append(int(stat.parent.name))
    family = [root]
    for pid in family:
        family += children.get(pid, [])
    return family


def resident_bytes(pid: int) -> int:
    """Return the resident memory of one process; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0
