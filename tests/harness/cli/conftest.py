"""The command line as its users run it: a process, its streams and its exit code."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def qnnfarm(adb_environment: Path, build_cache: Path) -> Run:
    """Runs `qnnfarm ARGUMENT...`; builds use the cache that all tests share."""

    def run(
        *arguments: str | Path, timeout_s: float = 280, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        variables = {"QNNFARM_CACHE_DIR": str(build_cache), "COLUMNS": "120"} | environment
        return subprocess.run(
            [sys.executable, "-m", "harness.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=os.environ | variables,
            cwd=adb_environment,
        )

    return run
