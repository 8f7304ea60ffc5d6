"""SIGKILL at the steps of a build: the cache stays sound."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")  # noqa: S108 - a disk takes minutes for thousands of fsyncs


@pytest.mark.parametrize(
    ("stride", "at_least"),
    [
        pytest.param(1, 100, marks=pytest.mark.slow, id="steps"),
        pytest.param(11, 12, id="few"),
    ],
)
def test_a_killed_build_leaves_nothing_that_looks_whole(stride: int, at_least: int) -> None:
    script = Path(__file__).with_name("kill_scenario.py")
    in_memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        done = subprocess.run(
            [sys.executable, str(script), str(stride), f"{folder}/root", "7"],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= at_least
