"""Waiting for what other processes do, and whether they live."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 200.0


def wait_for(
    condition: Callable[[], object],
    state: Callable[[], object] = lambda: None,
    timeout_s: float = PATIENCE_S,
) -> None:
    """Wait until a condition holds; one that never does fails with a state that says why."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.01
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.1)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie only waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
