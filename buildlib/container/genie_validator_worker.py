"""Child process of the validator: `python -m buildlib.container.genie_validator_worker`."""

import ctypes
import json
import os
import sys
import tempfile

from buildlib.toolchains.child_process import RefusedError, serve
from buildlib.toolchains.ort_qnn.wheel import find_libraries


def _kind(request: bytes) -> str:
    try:
        found = json.loads(request)
    except (ValueError, RecursionError):
        return "Dialog"
    return "Embedding" if isinstance(found, dict) and "embedding" in found else "Dialog"


def validate(request: bytes) -> object:
    """Return Genie's status for a configuration, and its output."""
    try:
        genie = ctypes.CDLL(str(find_libraries().genie))
        create = getattr(genie, f"Genie{_kind(request)}Config_createFromJson")
    except (OSError, AttributeError) as error:
        raise RefusedError(f"Genie does not load: {error}") from error
    if b"\0" in request:
        return {"status": -1, "said": "a null byte in the text"}
    handle = ctypes.c_void_p()
    with tempfile.TemporaryFile() as said:
        # Genie prints messages to both streams.
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        status = int(create(ctypes.c_char_p(request), ctypes.byref(handle)))
        ctypes.CDLL(None).fflush(None)
        said.seek(0)
        return {"status": status, "said": said.read().decode(errors="replace")}


if __name__ == "__main__":
    serve({"validate": validate}, sys.argv[1:])
