"""The command line, with the cache that all tests share."""

import functools
import io
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cli import app
from tests import command_line
from tests.buildlib.op_packages import build_package
from tests.waiting import wait_for_upkeep

Run = Callable[..., command_line.Done]
_command_line = functools.cache(app.command_line)


@pytest.fixture
def qnnfarm(adb_environment: Path, build_cache: Path, tmp_path: Path) -> Run:
    """Runs `qnnfarm ARGUMENT...` in this process, in the folder of the test.

    A process of its own takes a second: `process` starts one for what changes its process, what
    looks at it from outside, and what starts programs that print.
    """

    def run(*arguments: object, **environment: str) -> command_line.Done:
        words = [str(argument) for argument in arguments]
        streams = {
            name: io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
            for name in ("stdin", "stdout", "stderr")
        }
        variables = {"QNNFARM_CACHE_DIR": str(build_cache), "COLUMNS": "120"} | environment
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("default")
            patch.setattr(app, "command_line", _command_line)
            patch.setattr(signal, "signal", lambda *_: None)
            patch.setattr(sys, "argv", ["qnnfarm", *words])
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.chdir(tmp_path)
            with pytest.raises(SystemExit) as end:
                app.main()
            wait_for_upkeep()
            texts = []
            for stream in (streams["stdout"], streams["stderr"]):
                stream.seek(0)
                texts.append(stream.read())
        return subprocess.CompletedProcess(words, int(end.value.code or 0), *texts)

    return run


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of an op package."""
    return build_package(tmp_path_factory.mktemp("package") / "libScale.so")


@pytest.fixture
def process(adb_environment: Path, build_cache: Path) -> Run:
    """Runs `qnnfarm ARGUMENT...` as a process."""

    def run(*arguments: str | Path, **environment: str) -> command_line.Done:
        variables = {"QNNFARM_CACHE_DIR": str(build_cache), "COLUMNS": "120"} | environment
        return command_line.qnnfarm(*arguments, cwd=adb_environment, env=os.environ | variables)

    return run
