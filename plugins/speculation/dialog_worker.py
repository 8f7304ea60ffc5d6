"""Child process that holds dialogs: `python -m plugins.speculation.dialog_worker`."""

import ctypes as c
import json
import os
import sys
from typing import Any

from buildlib.toolchains.child_process import serve
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from buildlib.toolchains.qnn.execution import keep_to_one_cpu
from buildlib.toolchains.qnn.refusal import RefusedError

_VERSION = ("Major", "Minor", "Patch")
_COMPLETE = 0
_CONTEXT_EXCEEDED = 4
_Callback = c.CFUNCTYPE(None, c.c_char_p, c.c_int, c.c_void_p)


def answer(request: bytes) -> dict[str, Any]:
    """Return the answer of each dialog to each prompt; each answer is that of a new dialog.

    The request has `folder`, where Genie looks for files; `dialogs`, the texts of configurations;
    and `prompts`.
    """
    task = json.loads(request)
    os.chdir(task["folder"])
    keep_to_one_cpu()
    genie = GenieLibrary()
    texts = [[genie.ask(text, prompt) for prompt in task["prompts"]] for text in task["dialogs"]]
    return {"genie": genie.version(), "answers": texts}


class GenieLibrary:
    """The installed libGenie."""

    def __init__(self) -> None:
        try:
            self._library = c.CDLL(str(find_libraries().genie))
        except OSError as error:
            raise RefusedError(f"Genie does not load: {error}") from error

    def version(self) -> str:
        """Return the version of its API, such as `1.21.0`."""
        parts = (getattr(self._library, f"Genie_getApi{part}Version") for part in _VERSION)
        return ".".join(str(part()) for part in parts)

    def ask(self, config: str, prompt: str) -> str:
        """Return the answer of a new dialog."""
        handle = self._created("GenieDialogConfig_createFromJson", c.c_char_p(config.encode()))
        dialog = self._created("GenieDialog_create", handle)
        pieces: list[bytes] = []
        take = _Callback(lambda piece, _code, _user: pieces.append(piece or b""))
        text = c.c_char_p(prompt.encode())
        status = self._library.GenieDialog_query(dialog, text, _COMPLETE, take, None)
        if status not in {0, _CONTEXT_EXCEEDED}:
            raise RefusedError(f"GenieDialog_query failed with status {status}")
        self._library.GenieDialog_free(dialog)
        self._library.GenieDialogConfig_free(handle)
        return b"".join(pieces).decode(errors="replace")

    def _created(self, function: str, given: Any) -> c.c_void_p:  # noqa: ANN401  (any C value)
        handle = c.c_void_p()
        status = getattr(self._library, function)(given, c.byref(handle))
        if status != 0:
            raise RefusedError(f"{function} failed with status {status}")
        return handle


if __name__ == "__main__":
    serve({"answer": answer}, sys.argv[1:])
