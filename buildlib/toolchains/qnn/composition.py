"""Composition of DLCs to a context binary through the QNN C API. For child processes only."""

import ctypes as c
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from buildlib.toolchains.base import TensorInfo
from buildlib.toolchains.ort_qnn.stand_ins import operation_of
from buildlib.toolchains.qnn import structures as qnn_types
from buildlib.toolchains.qnn.api import (
    BackendFunction,
    FunctionTable,
    HtpConfigs,
    HtpSession,
    QnnCallError,
    SystemFunction,
)
from buildlib.toolchains.qnn.refusal import RefusedError
from buildlib.toolchains.qnn.structures import HtpCustomConfig
from buildlib.toolchains.requests import CompileRequest, GraphRequest, OperationRequest

_GRAPH_INFO_VERSION_1 = 1
_QNN_ERROR_INVALID_ARGUMENT = 1003


def compose_binary(
    session: HtpSession,
    system: FunctionTable,
    request: CompileRequest,
    operations: frozenset[str] = frozenset(),
) -> None:
    """Compile all graphs in one context, and write its binary.

    A DLC must hold one graph, which gets the stem of the DLC as its name.

    Args:
        session: where op packages are registered.
        system: reads the DLCs.
        operations: of the op packages, in place of their stand-ins in the DLCs.
    """
    context = session.new_context(_context_configs(request))
    for graph in request.graphs:
        with _opened(system, graph.dlc) as handle:
            try:
                composer = _GraphComposer(session, graph, operations)
                composer.compose(system, handle, context)
                _finalize(session, context, graph.dlc.stem)
            except QnnCallError as error:
                reason = f"graph {graph.dlc.stem} does not compile ({error})"
                if operations:
                    reason += (
                        f"; is there a kernel of {', '.join(sorted(operations))} for its types?"
                    )
                raise RefusedError(reason) from error
    _write_binary(session.qnn, context, request.binary)


def _finalize(session: HtpSession, context: c.c_void_p, name: str) -> None:
    session.qnn.call(
        BackendFunction.GRAPH_FINALIZE,
        session.graph(context, name), c.c_void_p(None), c.c_void_p(None),
    )  # fmt: skip


def _context_configs(request: CompileRequest) -> HtpConfigs:
    flags = {
        qnn_types.HTP_CONTEXT_WEIGHT_SHARING: request.weight_sharing,
        qnn_types.HTP_CONTEXT_LORA_WEIGHT_SHARING: request.lora_weight_sharing,
        qnn_types.HTP_CONTEXT_EXTENDED_UDMA: request.extended_udma,
    }
    return HtpConfigs(
        *(
            HtpCustomConfig(option=option, value=int(flag))
            for option, flag in flags.items()
            if flag is not None
        )
    )


def _graph_configs(request: GraphRequest) -> HtpConfigs:
    configs = [HtpCustomConfig(option=qnn_types.HTP_GRAPH_VTCM_SIZE, value=request.vtcm_mb)]
    if request.hvx_threads is not None:
        configs.append(
            HtpCustomConfig(option=qnn_types.HTP_GRAPH_HVX_THREADS, value=request.hvx_threads)
        )
    numbers = {
        qnn_types.HTP_OPTIMIZATION_FINALIZE_FLAG: request.optimization_level,
        qnn_types.HTP_OPTIMIZATION_DLBC: request.dlbc,
        qnn_types.HTP_OPTIMIZATION_DLBC_WEIGHTS: request.dlbc_weights,
    }
    configs += [
        HtpCustomConfig(option=qnn_types.HTP_GRAPH_OPTIMIZATION, value=kind, second=float(number))
        for kind, number in numbers.items()
        if number is not None
    ]
    return HtpConfigs(*configs)


@contextmanager
def _opened(system: FunctionTable, dlc: Path) -> Iterator[c.c_void_p]:
    """Open a DLC; its graphs need the handle until they are finalized."""
    handle = c.c_void_p()
    try:
        system.call(
            SystemFunction.DLC_CREATE_FROM_FILE,
            c.c_void_p(None), c.c_char_p(str(dlc).encode()), c.pointer(handle),
        )  # fmt: skip
    except RefusedError as error:
        raise RefusedError(f"{dlc.name} is not a readable DLC ({error})") from error
    yield handle
    system.call(SystemFunction.DLC_FREE, handle)


class _GraphComposer:
    """Composes a DLC through a backend interface with functions of our own.

    ONNX Runtime chooses the name of a DLC's graph (a hash), and composing takes no configuration
    for a graph of unknown name. The interface is passed by value, so in ours `graphCreate` gives
    the graph its name and its configuration, and makes its ports if their order matters: a binary
    has them as they were made. `tensorCreateGraphTensor` then gives these out, and `graphAddNode`
    makes stand-ins the operations that they stand for.
    """

    def __init__(
        self, session: HtpSession, request: GraphRequest, operations: frozenset[str]
    ) -> None:
        self._operations = operations
        self._session = session
        self._name = request.dlc.stem
        self._configs = _graph_configs(request)
        self._ports = request.ports
        self._port_ids: dict[bytes, int] = {}
        self._created = 0
        interface_type = type(session.qnn.interface)
        self._interface = interface_type.from_buffer_copy(session.qnn.interface)
        types = (c.c_void_p, c.c_char_p, c.c_void_p, c.c_void_p)
        self._callbacks: list[Any] = []
        self._create = self._replace(BackendFunction.GRAPH_CREATE, self._graph_create, *types)
        if self._ports is not None:
            tensors = (c.c_void_p, c.POINTER(qnn_types.QnnTensor))
            place = BackendFunction.TENSOR_CREATE_GRAPH_TENSOR
            self._create_tensor = self._replace(place, self._graph_tensor, *tensors)
        if operations:
            nodes = (c.c_void_p, qnn_types.OperationConfig)
            place = BackendFunction.GRAPH_ADD_NODE
            self._add_node = self._replace(place, self._graph_add_node, *nodes)

    def _replace(self, place: BackendFunction, own: Callable[..., int], *types: Any) -> Any:  # noqa: ANN401
        """Put a function of ours into the interface, and return the backend's."""
        callback = c.CFUNCTYPE(c.c_uint64, *types)(own)
        self._callbacks.append(callback)  # or it would be freed
        self._interface.fn[place] = c.cast(callback, c.c_void_p).value
        return self._session.qnn.function(place, *types)

    def compose(self, system: FunctionTable, dlc: c.c_void_p, context: c.c_void_p) -> None:
        graphs, count = c.c_void_p(), c.c_uint32()
        system.call(
            SystemFunction.DLC_COMPOSE_GRAPHS,
            dlc, c.c_void_p(None), c.c_uint32(0), self._session.backend, context, self._interface,
            c.c_uint32(_GRAPH_INFO_VERSION_1), c.pointer(graphs), c.pointer(count),
        )  # fmt: skip
        if count.value != 1:
            raise RefusedError(f"{self._name}.dlc holds {count.value} graphs where one is expected")

    def _graph_create(self, context: Any, _name: bytes, _configs: Any, graph: Any) -> int:  # noqa: ANN401
        """Create the one graph that a DLC may hold; called by the system library."""
        self._created += 1
        if self._created > 1:
            return _QNN_ERROR_INVALID_ARGUMENT
        status = self._create(context, self._name.encode(), self._configs.pointer, graph)
        if self._ports is not None and not status:
            kinds = {
                qnn_types.TENSOR_INPUT: self._ports.inputs,
                qnn_types.TENSOR_OUTPUT: self._ports.outputs,
            }
            handle = c.c_void_p.from_address(graph)
            for tensor in (_new_tensor(info, kind) for kind in kinds for info in kinds[kind]):
                status = status or self._create_tensor(handle, c.pointer(tensor))
                self._port_ids[tensor.name] = tensor.id
        return int(status)

    def _graph_tensor(self, graph: Any, tensor: Any) -> int:  # noqa: ANN401
        """Create a tensor, or give out the port of its name; called by the system library."""
        port_id = self._port_ids.get(tensor.contents.name)
        if port_id is None:
            return int(self._create_tensor(graph, tensor))
        tensor.contents.id = port_id
        return 0

    def _graph_add_node(self, graph: Any, node: qnn_types.OperationConfig) -> int:  # noqa: ANN401
        """Add a node, or the operation that it stands for; called by the system library."""
        operation = operation_of(node.name.decode(errors="replace"))
        if operation in self._operations:
            package, _, name = operation.rpartition("::")
            node.package, node.operation = package.encode(), name.encode()
            node.parameter_count = 0
        return int(self._add_node(graph, node))


def compile_operation(session: HtpSession, request: OperationRequest) -> int:
    """Compile a graph of one node of an op package, write its binary, and return its size."""
    session.register_op_package(request.package.library, request.package.provider)
    context, graph = session.new_context(HtpConfigs()), c.c_void_p()
    package, _, operation = request.operation.rpartition("::")
    name, call = operation.encode(), session.qnn.call
    call(
        BackendFunction.GRAPH_CREATE,
        context, c.c_char_p(name), HtpConfigs().pointer, c.pointer(graph),
    )  # fmt: skip
    tensors = []
    for infos, kind in (
        (request.inputs, qnn_types.TENSOR_INPUT),
        (request.outputs, qnn_types.TENSOR_OUTPUT),
    ):
        array = (qnn_types.QnnTensor * len(infos))(*(_new_tensor(info, kind) for info in infos))
        for tensor in array:
            call(BackendFunction.TENSOR_CREATE_GRAPH_TENSOR, graph, c.pointer(tensor))
        tensors.append(array)
    node = qnn_types.OperationConfig(
        version=1, name=name, package=package.encode(), operation=name,
        input_count=len(request.inputs), inputs=tensors[0],
        output_count=len(request.outputs), outputs=tensors[1],
    )  # fmt: skip
    call(BackendFunction.GRAPH_ADD_NODE, graph, node)
    try:
        call(BackendFunction.GRAPH_FINALIZE, graph, c.c_void_p(None), c.c_void_p(None))
    except QnnCallError as error:
        reason = "no kernel of the package takes tensors of these types and shapes"
        raise RefusedError(f"{reason}, or it needs parameters ({error})") from error
    return _write_binary(session.qnn, context, request.binary)


def _new_tensor(info: TensorInfo, kind: int) -> qnn_types.QnnTensor:
    """Return a graph's tensor; integers with an encoding are fixed-point numbers."""
    fixed = info.encoding is not None
    numbers = {
        name: number
        for number, name in reversed(qnn_types.DATA_TYPES.items())
        if fixed == (0x300 <= number < 0x500)
    }
    tensor = qnn_types.QnnTensor(
        version=1, name=info.name.encode(), type=kind, data_type=numbers[info.dtype],
        rank=len(info.shape), dimensions=(c.c_uint32 * len(info.shape))(*info.shape),
    )  # fmt: skip
    tensor.quantize.definition = tensor.quantize.encoding = qnn_types.UNDEFINED
    if info.encoding is not None:
        tensor.quantize.definition = qnn_types.ENCODING_DEFINED
        tensor.quantize.encoding = qnn_types.ENCODING_SCALE_OFFSET
        tensor.quantize.scale = info.encoding.scale
        tensor.quantize.offset = info.encoding.offset
    return tensor


def _write_binary(qnn: FunctionTable, context: c.c_void_p, path: Path) -> int:
    """Let the backend write into the mapped file: a large binary is never copied in memory."""
    # The backend records the size that it is given, so the file gets the size that it tells.
    size, end = c.c_uint64(), c.c_uint64()
    qnn.call(BackendFunction.CONTEXT_GET_BINARY_SIZE, context, c.pointer(size))
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, size.value)  # a full disk is an error, not a signal
        with mmap.mmap(file.fileno(), size.value) as memory:
            address = c.addressof(c.c_char.from_buffer(memory))
            qnn.call(
                BackendFunction.CONTEXT_GET_BINARY,
                context, c.c_void_p(address), size, c.pointer(end),
            )  # fmt: skip
        file.truncate(end.value)
        os.fsync(file.fileno())
    return end.value
