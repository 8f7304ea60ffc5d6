"""Steps of a toolchain in child processes: the parent's side, and the child's.

The native libraries abort, crash and hang on some inputs. A child leads its own session, writes all
output to a log file, and is killed with everything it started when its time is up or the caller is
interrupted. It also dies with its parent.
"""

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from buildlib.cancellation import track_child
from buildlib.error_base import one_line
from buildlib.errors import ToolchainError, ToolchainTimeoutError
from buildlib.files import atomic_write
from buildlib.toolchains.qnn.refusal import RefusedError

_TAIL_LINES = 20
_TAIL_BYTES = 16 * 1024
_LINE_CHARS = 400
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NOISE = ("# LIBNATIVE:", "$ ")
_WARNING = re.compile(r"^<[WIV]>|\[W:|\bWARNING:")
Command: TypeAlias = Callable[[bytes], object]
_PR_SET_PDEATHSIG = 1
_LAUNCH = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes a program that dies with its parent; the kernel keeps that wish over `exec`."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the worker.

    Attributes:
        module: for `python -m`: reads the request on stdin, and writes its answer as JSON
            into the file named by its last argument: `{"ok": ...}` or `{"error": "one line"}`.
        command: the worker's first argument, and the name of the step in errors.
        subject: the file that errors speak of.
        library_path: `LD_LIBRARY_PATH` of the child.
    """

    module: str
    command: str
    subject: Path
    timeout_s: float
    library_path: str


@dataclass(frozen=True, slots=True)
class Program:
    """One call of a program that is not ours.

    Attributes:
        arguments: the program and its arguments.
        command, subject: as those of a `Step`.
        folder: its working folder.
    """

    arguments: Sequence[str]
    command: str
    subject: Path
    timeout_s: float
    environment: Mapping[str, str]
    folder: Path


def dying_with_parent(arguments: Sequence[str]) -> list[str]:
    """Return the command line of a program that ends with the thread that starts it."""
    return [sys.executable, "-I", "-c", _LAUNCH, str(os.getpid()), *arguments]


def run_program(program: Program, log_dir: Path | None = None) -> Path:
    """Run a program and return its log; the first line is the command line.

    Args:
        log_dir: where its log is kept; by default the temporary folder, where the caller removes
            that of a program that ended well.
    """
    with _log_file(program, log_dir) as log_path:
        log_path.write_text(f"$ {shlex.join(program.arguments)}\n", encoding="utf-8")
        arguments = dying_with_parent(program.arguments)
        environment = program.environment
        status = _wait(program, arguments, environment, b"", log_path, folder=program.folder)
        if status == 0:
            return log_path
    raise _failure(program, status, {}, log_path)


def run_step(step: Step, request: bytes, log_dir: Path | None = None) -> Any:  # noqa: ANN401 - JSON
    """Run a step and return its answer as parsed JSON.

    Args:
        request: as the worker of the step reads it.
        log_dir: where logs are kept, one file a step; by default the temporary folder, and then
            only the logs of failed steps are kept.
    """
    with tempfile.TemporaryDirectory(prefix="qnnfarm-step-") as scratch:
        answer_path = Path(scratch) / "answer.json"
        with _log_file(step, log_dir) as log_path:
            status = _run(step, request, answer_path, log_path)
            answer = _read_answer(answer_path)
            if status == 0 and "ok" in answer:
                if log_dir is None:
                    log_path.unlink(missing_ok=True)
                return answer["ok"]
        raise _failure(step, status, answer, log_path)


@contextlib.contextmanager
def _log_file(step: Step | Program, log_dir: Path | None) -> Iterator[Path]:
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", step.subject.stem)[:80]
    handle, name = tempfile.mkstemp(f"-{step.command}-{stem}.log", "qnnfarm-", log_dir)
    os.close(handle)
    try:
        yield Path(name)
    except BaseException:  # interrupted or cancelled: no error will name the log
        if log_dir is None:
            Path(name).unlink(missing_ok=True)
        raise


def _run(step: Step, request: bytes, answer: Path, log_path: Path) -> int | None:
    environment = os.environ | {
        "LD_LIBRARY_PATH": step.library_path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "",
        "OPENBLAS_NUM_THREADS": "1",  # NumPy starts one a core on import, and no step multiplies
        "QNNFARM_PARENT_PID": str(os.getpid()),
    }
    arguments = [sys.executable, "-P", "-m", step.module, step.command, str(answer)]
    return _wait(step, arguments, environment, request, log_path)


def _wait(
    call: Step | Program,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    request: bytes,
    log_path: Path,
    folder: Path | None = None,
) -> int | None:
    """Return the exit status of the child: negative for a signal, `None` after a timeout."""
    with log_path.open("ab") as log:
        child = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    with track_child(child):
        try:
            child.communicate(request, timeout=call.timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_session(child)
    return child.returncode


def _kill_session(child: "subprocess.Popen[bytes]") -> None:
    """Kill the child and all that it started; it leads a session and thus its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _read_answer(path: Path) -> dict[str, Any]:
    try:
        answer = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _failure(
    call: Step | Program, status: int | None, answer: dict[str, Any], log_path: Path
) -> ToolchainError:
    kind = ToolchainTimeoutError if status is None else ToolchainError
    tail = _log_tail(log_path)
    if status is None:
        reason = f"no end after {call.timeout_s:g} s, killed"
    elif isinstance(answer.get("error"), str):
        reason = answer["error"]
    elif status < 0:
        reason = f"the process was ended by {_signal_name(-status)}"
        if status == -signal.SIGKILL:
            reason += ", as the kernel does when memory runs out"
    elif isinstance(call, Program):
        reason = f"it ended with status {status}"
    else:
        reason = f"the process ended with status {status} and no answer"
    return kind(call.command, str(call.subject), reason, status, tail, str(log_path))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _log_tail(path: Path) -> tuple[str, ...]:
    """Return the last meaningful lines, without colours and control characters."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = (
        "".join(c if c.isprintable() else " " for c in _ESCAPES.sub("", line)).strip()
        for line in text.splitlines()
    )
    texts = [line[:_LINE_CHARS] for line in lines if line and not line.startswith(_NOISE)]
    # Warnings count only if there is nothing else: the compiler warns about every graph.
    telling = [line for line in texts if not _WARNING.search(line)]
    return tuple((telling or texts)[-_TAIL_LINES:])


def serve(commands: Mapping[str, Command], arguments: list[str]) -> None:
    """Answer one request and end the process.

    The process ends without running destructors: some of the libraries crash in theirs.

    Args:
        commands: functions of the request by command; results must be JSON values.
        arguments: the command, and the file that takes the answer.
    """
    command, answer_path = arguments
    _die_with_parent()
    status = 0
    try:
        answer: dict[str, object] = {"ok": commands[command](sys.stdin.buffer.read())}
        text = json.dumps(answer)
    except Exception as error:  # noqa: BLE001 - the parent must learn of any error
        status = 1
        text = json.dumps({"error": _one_line(error)})
    with atomic_write(Path(answer_path), sync=False) as file:
        file.write(text.encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ.get("QNNFARM_PARENT_PID", str(os.getppid())):
        os._exit(1)


def _one_line(error: Exception) -> str:
    text = one_line(str(error)) or "no message"
    return text if isinstance(error, RefusedError) else f"{type(error).__name__}: {text}"
