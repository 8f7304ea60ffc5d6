"""The command line as its users run it: a process, its streams and its exit code.

The process is forked from one that has imported all commands, which takes longer than most of them.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import harness.cli

_PROGRAM = str(Path(harness.cli.__file__).with_name("__main__.py"))
IMPORTED = (
    "harness.cli.app", "harness.plans.plan_run", "buildlib.genai", "reports.page",
    "reports.html_file", "vl_convert", "pandas", "scipy.stats",
)  # fmt: skip
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(IMPORTED))

Done = subprocess.CompletedProcess[str]


def qnnfarm(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 280,
) -> Done:
    """Run `qnnfarm ARGUMENT...`, by default in the environment of the test, 120 columns wide.

    With a `PYTHONPATH` in `env`, which says what is imported, in a new interpreter.
    """
    words = [str(argument) for argument in arguments]
    variables = dict(os.environ | {"COLUMNS": "120"} if env is None else env)
    if env is not None and "PYTHONPATH" in env:
        command = [sys.executable, "-m", "harness.cli", *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=variables, cwd=cwd,
            timeout=timeout_s,
        )  # fmt: skip
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(words, cwd=cwd or Path.cwd(), env=variables, streams=(out, err))
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout_s)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode())
        status = process.exitcode
        process.close()
    return subprocess.CompletedProcess(words, status or 0, *texts)


def start(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], streams: tuple[IO[bytes], IO[bytes]]
) -> BaseProcess:
    """Start `qnnfarm WORD...`, with files for its output and its errors."""
    paths = [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in streams]
    process = _CONTEXT.Process(target=_run, args=(list(words), str(cwd), dict(env), paths))
    process.start()
    return process


def _run(words: list[str], folder: str, variables: dict[str, str], streams: list[str]) -> None:
    """Be `python -m harness.cli`."""
    from harness.cli.app import main

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(path, os.O_WRONLY | os.O_APPEND) for path in streams]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - until the end
        for number, mode in enumerate("rww")
    )
    sys.argv = [_PROGRAM, *words]
    main()
