"""The inside of a step's child process: reads a request, answers it, and never outlives its parent.

The other side is `buildlib.toolchains.process`.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

Command: TypeAlias = Callable[[bytes], object]

_PR_SET_PDEATHSIG = 1


class RefusedError(Exception):
    """A step cannot be done, for a reason that is one line and needs no stack trace."""


def serve(commands: Mapping[str, Command], arguments: list[str]) -> None:
    """Answer one request and end the process.

    The process ends without running destructors: some of the libraries crash in theirs.

    Args:
        commands: what each command does with the request; the result must be JSON.
        arguments: the command, and the file that takes the answer.
    """
    command, answer_path = arguments
    _die_with_parent()
    status = 0
    try:
        answer: dict[str, object] = {"ok": commands[command](sys.stdin.buffer.read())}
        text = json.dumps(answer)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
        status = 1
        text = json.dumps({"error": _one_line(error)})
    _write_whole(Path(answer_path), text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ.get("QNNFARM_PARENT_PID", str(os.getppid())):
        os._exit(1)


def _one_line(error: Exception) -> str:
    said = " ".join(str(error).split()) or "no message"
    return said if isinstance(error, RefusedError) else f"{type(error).__name__}: {said}"


def _write_whole(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.replace(path)
