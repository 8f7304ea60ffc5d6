"""Child process of the validator: `python -m buildlib.container.genie_validator_worker`.

Genie is loaded once, and a fork of that process judges one configuration after the other. Where
Genie crashes or hangs, the fork dies alone, and another one goes on behind that configuration.
"""

import ctypes
import json
import os
import signal
import sys

from buildlib.toolchains.child_process import serve
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from buildlib.toolchains.qnn.refusal import RefusedError

_LIMIT_S = 10
_LONGEST = 1 << 20


def judge(request: bytes) -> object:
    """Return Genie's status for each configuration, and its output.

    The request is a list of pairs: the function that creates it, and its text in Latin-1. A status
    above 0 is the signal that ended Genie.
    """
    try:
        genie = ctypes.CDLL(str(find_libraries().genie))
    except OSError as error:
        raise RefusedError(f"Genie does not load: {error}") from error
    questions = json.loads(request)
    strangers = {function for function, _ in questions if not hasattr(genie, function)}
    if strangers:
        raise RefusedError(f"this Genie has no {min(strangers)}")
    texts = [(function, text.encode("latin-1")) for function, text in questions]
    answers: list[dict[str, object]] = []
    while len(answers) < len(texts):
        batch, status = _ask(genie, texts[len(answers) :])
        answers += batch
        if status != 0:
            answers.append({"status": status, "said": ""})
    return answers


def _ask(
    genie: ctypes.CDLL, questions: list[tuple[str, bytes]]
) -> tuple[list[dict[str, object]], int]:
    """Return the answers up to the end, or up to the signal that ended Genie."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _answer(genie, questions, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as lines:
        answers = [json.loads(line) for line in lines if line.endswith("\n")]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status > 0:
        raise RefusedError(f"Genie ended with status {status}")
    return answers, -status


def _answer(genie: ctypes.CDLL, questions: list[tuple[str, bytes]], writing: int) -> None:
    """Write a line for each question, and end this process.

    Genie prints messages to both streams: they are taken from a file between two questions.
    """
    output = os.memfd_create("said")
    os.dup2(output, 1)
    os.dup2(output, 2)
    libc = ctypes.CDLL(None)
    for function, text in questions:
        answer: dict[str, object] = {"status": -1, "said": "a null byte in the text"}
        if b"\0" not in text:
            os.ftruncate(output, 0)
            os.lseek(output, 0, os.SEEK_SET)
            signal.alarm(_LIMIT_S)
            handle = ctypes.c_void_p()
            status = int(getattr(genie, function)(ctypes.c_char_p(text), ctypes.byref(handle)))
            libc.fflush(None)
            words = os.pread(output, _LONGEST, 0).decode(errors="replace")
            answer = {"status": status, "said": words}
        os.write(writing, json.dumps(answer).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    serve({"judge": judge}, sys.argv[1:])
