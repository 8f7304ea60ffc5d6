"""The command line, with the cache that all tests share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import command_line

Run = Callable[..., command_line.Done]


@pytest.fixture
def qnnfarm(adb_environment: Path, build_cache: Path) -> Run:
    """Runs `qnnfarm ARGUMENT...`; builds use the cache that all tests share."""

    def run(
        *arguments: str | Path, timeout_s: float = 280, **environment: str
    ) -> command_line.Done:
        variables = {"QNNFARM_CACHE_DIR": str(build_cache), "COLUMNS": "120"} | environment
        return command_line.qnnfarm(
            *arguments, cwd=adb_environment, env=os.environ | variables, timeout_s=timeout_s
        )

    return run
