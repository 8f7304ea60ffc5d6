"""Child process: parts of a configuration that a program has to call for, on the emulator.

`genie_features.py PART` runs in the folder of a dialog, and prints the text as JSON, which is that
of the plain dialog.
"""

import copy
import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from device_scripts import genie_api
from device_scripts.genie_api import DialogConfigHandle, DialogHandle, Genie

PROMPT = b"In the beginning God created"
_HANDLES = ctypes.POINTER(ctypes.c_void_p)
_CHOOSE = ctypes.CFUNCTYPE(
    None, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(ctypes.c_int32)
)
genie_api._SIGNATURES.update(
    {
        "GenieSampler_registerCallback": (ctypes.c_char_p, _CHOOSE),
        "GenieDialog_getSampler": (ctypes.c_void_p, _HANDLES),
        "GenieSamplerConfig_createFromJson": (ctypes.c_char_p, _HANDLES),
        "GenieSampler_applyConfig": (ctypes.c_void_p, ctypes.c_void_p),
    }
)
Values = dict[str, Any]


class Program:
    """A program that holds dialogs of one folder."""

    def __init__(self) -> None:
        self.genie = Genie()
        self.values: Values = json.loads(Path("genie_config.json").read_text())
        self.values["dialog"]["max-num-tokens"] = 6

    def dialog(self, **changes: object) -> DialogHandle:
        values = copy.deepcopy(self.values)
        values["dialog"].update(changes)
        return DialogHandle(DialogConfigHandle(self.genie, json.dumps(values).encode()))

    def plain(self) -> bytes:
        dialog = self.dialog()
        text = said(lambda sink: dialog.query(PROMPT, sink))
        dialog.close()
        return text

    def custom_sampler(self) -> bytes:
        def choose(size: int, logits: int, _count: int, tokens: Any) -> None:  # noqa: ANN401
            values = (ctypes.c_float * (size // 4)).from_address(logits)
            tokens[0] = int(np.argmax(np.ctypeslib.as_array(values)))

        callback = _CHOOSE(choose)
        self.genie.call("GenieSampler_registerCallback", b"choose", callback)
        sampler = {"version": 1, "type": "custom", "callback-name": "choose"}
        dialog = self.dialog(sampler=sampler)
        text = said(lambda sink: dialog.query(PROMPT, sink))
        dialog.close()
        return text

    def applied_sampler(self) -> bytes:
        dialog = self.dialog(sampler={"version": 1, "seed": 3, "temp": 5.0, "top-k": 40})
        sampler = self.genie.create("GenieDialog_getSampler", dialog.handle)
        text = json.dumps({"sampler": {"version": 1, "top-k": 1}}).encode()
        config = self.genie.create("GenieSamplerConfig_createFromJson", text)
        self.genie.call("GenieSampler_applyConfig", sampler, config)
        answer = said(lambda sink: dialog.query(PROMPT, sink))
        dialog.close()
        return answer

    def vectors(self, datatype: str, kind: str | None = None) -> bytes:
        """Ask with rows of the table; `kind` is that of the embedding block."""
        table = self.values["dialog"]["embedding"]
        size, grid = table["size"], table["quant-param"]
        rows = np.fromfile(table["lut-path"], np.uint16).reshape(-1, size)
        if datatype == "float32":
            rows = ((rows.astype(np.float64) + grid["offset"]) * grid["scale"]).astype(np.float32)
        block: Values = {"version": 1, "size": size, "datatype": datatype}
        block |= {"quant-param": grid} if "fixed" in datatype else {}
        block |= {"type": kind} if kind else {}
        dialog = self.dialog(embedding=block)
        ids = [self.values["dialog"]["context"]["bos-token"], *dialog.encode(PROMPT)]
        asked = rows[ids].tobytes()
        text = said(
            lambda sink: dialog.embedding_query(asked, lambda t, _: rows[t].tobytes(), sink)
        )
        dialog.close()
        return text


def said(ask: Callable[[Callable[[bytes], None]], int]) -> bytes:
    """The text of a query."""
    pieces: list[bytes] = []
    ask(pieces.append)
    return b"".join(pieces)


def main(part: str, *options: str) -> None:
    text = getattr(Program(), part)(*options)
    sys.stdout.write(f"{json.dumps({'text': text.decode(errors='replace')})}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
