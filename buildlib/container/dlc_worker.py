"""The child that reads DLCs: `python -m buildlib.container.dlc_worker describe ANSWER_FILE`.

The system library hands a DLC's graphs to a backend only. Ours is an interface of functions that
record their arguments, so that nothing is compiled and no weights are copied.
"""

import ctypes as c
import dataclasses
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from buildlib.container.dlc import DlcGraph
from buildlib.toolchains.base import ScaleOffset, TensorInfo
from buildlib.toolchains.child_process import serve
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from buildlib.toolchains.qnn.api import (
    BACKEND_TABLE_ENTRIES,
    FunctionTable,
    SystemFunction,
    load_system,
)
from buildlib.toolchains.qnn.refusal import RefusedError
from buildlib.toolchains.qnn.structures import (
    DATA_TYPES,
    ENCODING_DEFINED,
    ENCODING_SCALE_OFFSET,
    BackendInterfaceHeader,
    QnnTensor,
    QnnVersion,
    QuantizeParams,
)

_CORE_API = QnnVersion(2, 40, 0)
_ENTRIES = BACKEND_TABLE_ENTRIES[2, 40]
_PROPERTY_HAS_CAPABILITY = 0
_GRAPH_CREATE = 15
_GRAPH_ADD_NODE = 18
_TENSOR_CREATE_CONTEXT = 23
_TENSOR_CREATE_GRAPH = 24
_NOT_SUPPORTED = 1000
_APP_WRITE, _APP_READ, _STATIC = 0, 1, 4
_MAX_RANK = 16
_BW_SCALE_OFFSET, _BW_AXIS_SCALE_OFFSET, _BLOCKWISE_EXPANSION = 2, 3, 5
_BYTES = frozenset({"int8", "uint8"})
_ANY_HANDLE = 1


class _Interface(c.Structure):
    _fields_ = (*BackendInterfaceHeader._fields_, ("fn", c.c_void_p * _ENTRIES))


class _OpConfig(c.Structure):
    """An operator, version 1 and its version."""

    _fields_ = (
        ("version", c.c_uint32),
        ("name", c.c_char_p),
        ("package", c.c_char_p),
        ("type", c.c_char_p),
        ("parameter_count", c.c_uint32),
        ("parameters", c.c_void_p),
        ("input_count", c.c_uint32),
        ("inputs", c.c_void_p),
        ("output_count", c.c_uint32),
        ("outputs", c.c_void_p),
    )


class _Blocks(c.Structure):
    """`Qnn_BlockwiseExpansion_t`: scales of blocks as multiples of their channel's."""

    _fields_ = (
        ("axis", c.c_int32),
        ("scale_offsets", c.c_void_p),
        ("blocks_per_axis", c.c_uint32),
        ("block_scale_bits", c.c_uint32),
    )


class _Recorder:
    """A backend that compiles nothing and takes note of everything."""

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self._tensors: dict[int, list[TensorInfo]] = {_APP_WRITE: [], _APP_READ: []}
        self._operators: Counter[str] = Counter()
        self._weights: Counter[str] = Counter()
        self._ids = 0
        self.interface = _Interface(backend_id=0, name=b"notebook", core_api=_CORE_API)
        self._callbacks: list[Any] = []
        for place in range(_ENTRIES):
            self._set(place, lambda *_: 0)
        self._set(_PROPERTY_HAS_CAPABILITY, lambda *_: _NOT_SUPPORTED)
        self._set(_GRAPH_CREATE, self._graph, c.c_void_p, c.c_char_p, c.c_void_p, c.c_void_p)
        self._set(_GRAPH_ADD_NODE, self._node, c.c_void_p, _OpConfig)
        for place in (_TENSOR_CREATE_CONTEXT, _TENSOR_CREATE_GRAPH):
            self._set(place, self._tensor, c.c_void_p, c.c_void_p)

    def read(self, system: FunctionTable, dlc: bytes) -> DlcGraph:
        """Return the graph of a DLC."""
        handle, graphs, count = c.c_void_p(), c.c_void_p(), c.c_uint32()
        system.call(
            SystemFunction.DLC_CREATE_FROM_FILE,
            c.c_void_p(None), c.c_char_p(dlc), c.pointer(handle),
        )  # fmt: skip
        system.call(
            SystemFunction.DLC_COMPOSE_GRAPHS,
            handle, c.c_void_p(None), c.c_uint32(0), c.c_void_p(_ANY_HANDLE),
            c.c_void_p(_ANY_HANDLE), self.interface, c.c_uint32(1), c.pointer(graphs),
            c.pointer(count),
        )  # fmt: skip
        if len(self.graphs) != 1:
            raise RefusedError(f"it holds {len(self.graphs)} graphs where one is expected")
        return DlcGraph(
            name=self.graphs[0],
            inputs=tuple(self._tensors[_APP_WRITE]),
            outputs=tuple(self._tensors[_APP_READ]),
            operators=dict(self._operators.most_common()),
            weight_elements=dict(self._weights.most_common()),
        )

    def _set(self, place: int, function: Callable[..., int], *types: Any) -> None:  # noqa: ANN401
        callback = c.CFUNCTYPE(c.c_uint64, *types)(function)
        self._callbacks.append(callback)
        self.interface.fn[place] = c.cast(callback, c.c_void_p).value

    def _graph(self, _context: int, name: bytes, _configs: int, graph: int) -> int:
        self.graphs.append(_text(name))
        c.c_void_p.from_address(graph).value = _ANY_HANDLE
        return 0

    def _node(self, _graph: int, operator: _OpConfig) -> int:
        self._operators[_text(operator.type)] += 1
        return 0

    def _tensor(self, _graph: int, address: int) -> int:
        tensor = QnnTensor.from_address(address)
        self._ids += 1
        tensor.id = self._ids
        described = _describe(tensor)
        if tensor.type in self._tensors:
            self._tensors[tensor.type].append(described)
        elif tensor.type == _STATIC:
            self._weights[_weight_type(tensor, described)] += math.prod(described.shape)
        return 0


def describe(request: bytes) -> object:
    """Return the graphs of the DLC at the path in the request."""
    graph = _Recorder().read(
        load_system(find_libraries().system), os.fsencode(os.fsdecode(request))
    )
    return [dataclasses.asdict(graph)]


def _describe(tensor: QnnTensor) -> TensorInfo:
    params = tensor.quantize
    per_tensor = params.definition == ENCODING_DEFINED and params.encoding == ENCODING_SCALE_OFFSET
    return TensorInfo(
        name=_text(tensor.name),
        shape=tuple(tensor.dimensions[i] for i in range(min(tensor.rank, _MAX_RANK))),
        dtype=DATA_TYPES.get(tensor.data_type, f"unknown 0x{tensor.data_type:04x}"),
        encoding=ScaleOffset(params.scale, params.offset) if per_tensor else None,
    )


def _weight_type(tensor: QnnTensor, described: TensorInfo) -> str:
    """Return a weight's type; a DLC has a byte for each integer, its encoding tells the bits."""
    params = tensor.quantize
    if params.definition != ENCODING_DEFINED or described.dtype not in _BYTES:
        return described.dtype
    union = c.addressof(params) + QuantizeParams.scale.offset
    if params.encoding in {_BW_SCALE_OFFSET, _BW_AXIS_SCALE_OFFSET}:
        bits = c.c_uint32.from_address(union).value
    elif params.encoding == _BLOCKWISE_EXPANSION:
        blocks = c.c_void_p.from_address(union).value
        bits = 8 - _Blocks.from_address(blocks).block_scale_bits if blocks else 8
    else:
        return described.dtype
    return described.dtype.replace("8", str(bits)) if 0 < bits < 8 else described.dtype


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")


if __name__ == "__main__":
    serve({"describe": describe}, sys.argv[1:])
