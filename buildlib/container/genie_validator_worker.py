"""Child process of the validator: `python -m buildlib.container.genie_validator_worker`.

Genie is loaded once, and a fork of that process judges one configuration after the other. Where
Genie crashes or hangs, the fork dies alone, and another one goes on behind that configuration.
"""

import ctypes
import json
import os
import re
import signal
import sys

from buildlib.toolchains.child_process import serve
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from buildlib.toolchains.qnn.refusal import RefusedError

EXTENSIONS, NODE = "GenieDialog_create", "GenieNode_create"
_WARNINGS = 2
_DIALOG = """{"dialog": {"version": 1, "type": "basic",
 "context": {"version": 1, "size": 1, "n-vocab": 1, "bos-token": -1, "eos-token": 0},
 "sampler": {"version": 1}, "tokenizer": {"version": 1, "path": "/"},
 "engine": {"version": 1, "n-threads": 1,
  "backend": {"version": 1, "type": "QnnHtp", "extensions": "%s",
   "QnnHtp": {"version": 1, "use-mmap": false, "spill-fill-bufsize": 0, "mmap-budget": 0,
              "poll": false, "cpu-mask": "0x0", "kv-dim": 1}},
  "model": {"version": 1, "type": "binary", "binary": {"version": 1, "ctx-bins": ["/"]}}}}}"""
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
    if any(function in {EXTENSIONS, NODE} for function, _ in questions):
        _load_backend()
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
            if function == EXTENSIONS:
                status = _create_dialog(genie, text)
            elif function == NODE:
                status = _create_node(genie, text)
            else:
                status = _create(genie, function, ctypes.c_char_p(text))[0]
            libc.fflush(None)
            words = os.pread(output, _LONGEST, 0).decode(errors="replace")
            answer = {"status": status, "said": words}
        os.write(writing, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _create(genie: ctypes.CDLL, function: str, *arguments: object) -> tuple[int, ctypes.c_void_p]:
    handle = ctypes.c_void_p()
    return int(getattr(genie, function)(*arguments, ctypes.byref(handle))), handle


def _create_node(genie: ctypes.CDLL, text: bytes) -> int:
    """Let Genie create a node without its model: it judges the configuration before that."""
    status, _ = _create(genie, "GenieNodeConfig_createFromJson", text)
    if status != 0:
        return status
    models = re.compile(rb'("(?:ctx-bins|model-bin)"\s*:\s*\[?\s*)"(?:[^"\\]|\\.)*"')
    _, config = _create(genie, "GenieNodeConfig_createFromJson", models.sub(rb'\1"/"', text))
    return _create(genie, NODE, config)[0]


def _load_backend() -> None:
    """Load what a dialog would load and unload again, each time."""
    libraries = find_libraries()
    try:
        for path in (libraries.htp, libraries.system, libraries.extensions):
            ctypes.CDLL(str(path))
    except OSError as error:
        raise RefusedError(f"the HTP backend does not load: {error}") from error


def _create_dialog(genie: ctypes.CDLL, extensions: bytes) -> int:
    """Let Genie create a dialog with a file of extensions, and with no model; return its status.

    It reads the extensions first, and says whether that failed in a warning of its log.
    """
    file = os.memfd_create("extensions")
    os.write(file, extensions)
    dialog = _DIALOG % f"/proc/self/fd/{file}"
    status, config = _create(genie, "GenieDialogConfig_createFromJson", dialog.encode())
    if status == 0:
        _, log = _create(genie, "GenieLog_create", None, None, _WARNINGS)
        genie.GenieDialogConfig_bindLogger(config, log)
        status, _ = _create(genie, EXTENSIONS, config)
    os.close(file)
    return status


if __name__ == "__main__":
    serve({"judge": judge}, sys.argv[1:])
