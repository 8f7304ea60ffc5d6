"""The command line as its users run it: a process, its streams and its exit code.

The process is forked from one that has imported all commands, which takes longer than most of them.
Other programs of a test that need our packages are forked from it too.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Self

import harness.cli

QNNFARM = "import harness.cli.app, sys; sys.argv[0] = 'cli'; harness.cli.app.main()"
"""A program that is the command line, for those that begin with something else."""
_PROGRAM = str(Path(harness.cli.__file__).with_name("__main__.py"))
IMPORTED = (
    "harness.cli.app", "harness.plans.plan_run", "buildlib.genai", "reports.page",
    "reports.html_file", "vl_convert",
    # What commands import when they need it.
    "buildlib.builder_options", "buildlib.cache.finished_builds", "buildlib.cache.entries",
    "buildlib.numerics", "buildlib.toolchains.ort_qnn.toolchain", "encodings.idna",
    "harness.cli.device_lease", "harness.cli.progress", "harness.devices.adb.discovery",
    "importlib.readers", "psycopg",
    "rich.markdown", "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.sqlite",
    "typer._adapters", "typer.rich_utils",
)  # fmt: skip
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.forked_commands"])

Done = subprocess.CompletedProcess[str]


def qnnfarm(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 800,
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


class Started:
    """A command that runs, as `subprocess.Popen` has it: streams, signals, an exit status.

    It is in the process group of the tests.

    Args:
        arguments: as `qnnfarm` has them; or `-c`, a program, and its arguments, as Python has them.
    """

    def __init__(
        self, *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self._words = [str(argument) for argument in arguments]
        (given, taken), out, err = os.pipe(), os.pipe(), os.pipe()
        theirs = (given, out[1], err[1])
        folder, variables = cwd or Path.cwd(), os.environ if env is None else env
        self._process = _fork(self._words, folder, variables, theirs)
        for end in theirs:
            os.close(end)
        self.stdin = os.fdopen(taken, "w", encoding="utf-8")
        self.stdout, self.stderr = (os.fdopen(end, encoding="utf-8") for end, _ in (out, err))

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; `None` while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status, or `None` while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended and return its exit status."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._words, timeout or 0)
        return self.returncode

    def communicate(self, said: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Say something on its standard input; return the rest of its streams at its end."""
        if not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                self.stdin.write(said)
        texts: dict[str, str] = {}

        def read(name: str, stream: IO[str]) -> None:
            texts[name] = "" if stream.closed else stream.read()

        readers = [
            threading.Thread(target=read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.stdout), ("err", self.stderr))
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        self._close()
        return texts["out"], texts["err"]

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                stream.close()


def start(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], streams: tuple[IO[bytes], IO[bytes]]
) -> BaseProcess:
    """Start `qnnfarm WORD...` with files for its output and its errors."""
    with Path(os.devnull).open("rb") as nothing:
        files = (nothing.fileno(), *(stream.fileno() for stream in streams))
        return _fork(words, cwd, env, files)


def _fork(
    words: Sequence[str], cwd: Path, env: Mapping[str, str], files: Sequence[int]
) -> BaseProcess:
    """Fork a process whose first three files are these."""
    passed = [Connection(os.dup(file)) for file in files]  # as what can be sent to a process
    process = _CONTEXT.Process(target=_run, args=(list(words), str(cwd), dict(env), passed))
    process.start()
    for connection in passed:
        connection.close()
    return process


def _run(
    words: list[str], folder: str, variables: dict[str, str], streams: list[Connection]
) -> None:
    """Be `python -m harness.cli WORD...`, or `python -c PROGRAM WORD...`."""
    from harness.cli.app import main

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()  # a test may have a zone of its own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - until the end
        for number, mode in enumerate("rww")
    )
    if words[:1] == ["-c"]:
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - a test's
        return
    sys.argv = [_PROGRAM, *words]
    main()
