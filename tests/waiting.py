"""Waiting for what other processes do, and whether they live."""

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from harness.clock import DeadlineExceeded
from harness.errors import DeviceTimeoutError

PATIENCE_S = 200.0
PATIENCE_VARIABLE = "QNNFARM_TEST_PATIENCE_S"
"""Seconds instead of `PATIENCE_S`, for what is left of a file whose tests waited in vain."""
IN_VAIN = (TimeoutError, subprocess.TimeoutExpired, DeadlineExceeded, DeviceTimeoutError)
"""Errors of waits that ended without what they waited for."""
_Found = TypeVar("_Found")


def patience_s() -> float:
    """Return how long to wait for what comes in a moment on an idle machine."""
    return float(os.environ.get(PATIENCE_VARIABLE, PATIENCE_S))


def wait_for(
    condition: Callable[[], _Found],
    state: Callable[[], object] = lambda: None,
    timeout_s: float | None = None,
) -> _Found:
    """Wait until a condition holds, and return it; one that never does fails with a state."""
    patience = patience_s() if timeout_s is None else timeout_s
    deadline, pause_s = time.monotonic() + patience, 0.01
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came of it in {patience:g} s: {state()}")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.1)
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie only waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for_upkeep() -> None:
    """Wait for repairs by closed pools; they end with a process, but not with a test in it.

    Each ends after the step that it is at.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("qnnfarm-upkeep-"):
            thread.join()
