"""Child process of `tools.kv_trace`: a dialog whose graph calls are noted.

`QnnGraph_execute` of the backend is replaced, through its interface table, by a function that notes
the inputs of each call. No library is changed.
"""

import ctypes as c
import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.container.genie_config import GenieConfig
from buildlib.graph import interface
from buildlib.speculative.dialog_worker import answer
from buildlib.toolchains.child_process import serve
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from buildlib.toolchains.qnn import structures as qnn
from buildlib.toolchains.qnn.api import BackendFunction, FunctionTable, load_backend
from buildlib.toolchains.qnn.refusal import RefusedError

_PAGE = 4096
_READ_WRITE = 3
_EXECUTE = c.CFUNCTYPE(
    c.c_uint64, c.c_void_p,
    c.POINTER(qnn.QnnTensor), c.c_uint32, c.POINTER(qnn.QnnTensor), c.c_uint32,
    c.c_void_p, c.c_void_p,
)  # fmt: skip
_RETRIEVE = c.CFUNCTYPE(c.c_uint64, c.c_void_p, c.c_char_p, c.POINTER(c.c_void_p))
_KEY = re.compile(r"past_key_(\d+)_in")
_NEAR = 0.02
Tensors = Mapping[str, qnn.QnnTensor]


def trace(request: bytes) -> object:
    """Return the answers of `answer` to one dialog, and the calls of graphs meanwhile."""
    (text,) = json.loads(request)["dialogs"]
    tracer = KvTracer(GenieConfig.from_json(text))
    return {"answers": answer(request)["answers"], "calls": tracer.calls}


class KvTracer:
    """The replaced functions; `calls` has their notes as JSON values."""

    def __init__(self, config: GenieConfig) -> None:
        self.calls: list[dict[str, Any]] = []
        self._turns = _turns(config)
        self._graphs: dict[int, tuple[str, int]] = {}
        self._engines: dict[int, int] = {}
        self._origins: dict[int, dict[bytes, tuple[int, int]]] = {}
        self._ids: list[int] | None = None
        table = load_backend(find_libraries().htp)
        self._kept = (
            _replace(table, BackendFunction.GRAPH_RETRIEVE, _RETRIEVE, self._retrieve),
            _replace(table, BackendFunction.GRAPH_EXECUTE, _EXECUTE, self._execute),
        )

    def _retrieve(self, original: Any, context: int, name: bytes, graph: Any) -> int:  # noqa: ANN401
        code = int(original(context, name, graph))
        engine = self._engines.setdefault(context, len(self._engines))
        self._graphs[graph[0]] = (name.decode(), engine)
        return code

    def _execute(self, original: Any, graph: int, *given: Any) -> int:  # noqa: ANN401
        inputs, outputs = _named(given[0], given[1]), _named(given[2], given[3])
        if interface.INPUT_IDS in inputs:
            self._ids = _array(inputs[interface.INPUT_IDS]).ravel().tolist()
        elif interface.INPUTS_EMBEDS in inputs:
            self._ids = None
        layers = sorted(int(match[1]) for name in inputs if (match := _KEY.fullmatch(name)))
        note = self._note(graph, inputs, layers[-1]) if layers[:1] == [0] else None
        code = int(original(graph, *given))
        if note is not None:
            keys = _array(outputs[interface.past_key(layers[-1], "out")])
            origins = self._origins[note["engine"]]
            origins |= {keys[..., n].tobytes(): (note["number"], n) for n in range(keys.shape[-1])}
        return code

    def _note(self, graph: int, inputs: Tensors, layer: int) -> dict[str, Any]:
        """Note the inputs of a call, before it is computed."""
        name, engine = self._graphs.get(graph, ("?", -1))
        keys = _array(inputs[interface.past_key(layer, "in")])
        mask = _array(inputs[interface.ATTENTION_MASK])
        is_open = (mask == mask.max()).reshape(-1, mask.shape[-1])
        past = keys.shape[-1]
        origins = self._origins.setdefault(engine, {})
        columns = np.flatnonzero(is_open[:, :past].any(0))
        note = {
            "number": len(self.calls) + 1,
            "engine": engine,
            "graph": name,
            "ids": self._ids,
            "positions": self._positions(inputs),
            "sees": [np.flatnonzero(row[past:]).tolist() for row in is_open],
            "drafts": interface.HIDDEN_STATES in inputs,
            "columns": {int(n): origins.get(keys[..., n].tobytes()) for n in columns},
        }
        self.calls.append(note)
        return note

    def _positions(self, inputs: Tensors) -> list[int | None]:
        """Find the position of each row, by its cosines and sines."""
        if self._turns is None or interface.COS not in inputs:
            return []
        turns = [_floats(inputs[name]) for name in (interface.COS, interface.SIN)]
        rows = np.concatenate([one.reshape(-1, one.shape[-1]) for one in turns], axis=1)
        far = [np.abs(self._turns - row).max(1) for row in rows]
        return [int(one.argmin()) if one.min() < _NEAR else None for one in far]


def _turns(config: GenieConfig) -> npt.NDArray[np.float64] | None:
    """Return cosines and sines of all positions, `[CL, 2 * rope_dim]`; None without rope."""
    encoding = config.dialog.target_engine.model.positional_encoding
    first = encoding[0] if isinstance(encoding, tuple) else encoding
    if first is None or first.rope_dim is None or first.rope_theta is None:
        return None
    divisors = first.rope_theta ** (np.arange(first.rope_dim) / first.rope_dim)
    angles = np.arange(config.context_length)[:, None] / divisors
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def _replace(table: FunctionTable, function: BackendFunction, kind: Any, ours: Any) -> object:  # noqa: ANN401
    """Replace a function of a table by ours, which gets the original first.

    The caller keeps the result as long as the table is in use.
    """
    # The table lies in memory that is read-only once its library is loaded.
    entries = table.interface.fn
    original = kind(entries[function])
    place = c.addressof(entries) + function * c.sizeof(c.c_void_p)
    protect = c.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (c.c_void_p, c.c_size_t, c.c_int)
    if protect(place // _PAGE * _PAGE, _PAGE, _READ_WRITE) != 0:
        raise RefusedError(f"the backend's table cannot be written (errno {c.get_errno()})")
    replacement = kind(partial(ours, original))
    entries[function] = c.cast(replacement, c.c_void_p).value
    return replacement


def _named(tensors: Any, count: int) -> Tensors:  # noqa: ANN401  (a pointer to tensors)
    return {tensors[n].name.decode(): tensors[n] for n in range(count)}


def _array(tensor: qnn.QnnTensor) -> npt.NDArray[Any]:
    """Return a tensor's memory as an array of stored values."""
    shape = tuple(tensor.dimensions[: tensor.rank])
    dtype = np.dtype(qnn.DATA_TYPES[tensor.data_type])
    size = dtype.itemsize * int(np.prod(shape))
    memory = (c.c_uint8 * size).from_address(tensor.data)
    return np.ndarray(shape, dtype, memoryview(memory))


def _floats(tensor: qnn.QnnTensor) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = _array(tensor).astype(np.float64)
    return (values + float(tensor.quantize.offset)) * float(tensor.quantize.scale)


if __name__ == "__main__":
    serve({"trace": trace}, sys.argv[1:])
