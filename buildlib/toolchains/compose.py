"""DLCs to one context binary through the QNN C API. For child processes only."""

import ctypes as c
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from buildlib.toolchains.child import RefusedError
from buildlib.toolchains.qnn_api import BackendFunction, FunctionTable, SystemFunction
from buildlib.toolchains.qnn_session import HtpConfigs, HtpSession
from buildlib.toolchains.qnn_types import (
    HTP_CONTEXT_WEIGHT_SHARING,
    HTP_GRAPH_OPTIMIZATION,
    HTP_GRAPH_VTCM_SIZE,
    HTP_OPTIMIZATION_FINALIZE_FLAG,
    HtpConfig,
)

_GRAPH_INFO_VERSION_1 = 1
_QNN_ERROR_INVALID_ARGUMENT = 1003


def compose_binary(
    session: HtpSession,
    system: FunctionTable,
    dlcs: Sequence[Path],
    *,
    weight_sharing: bool,
    vtcm_mb: int,
    optimization_level: int,
) -> bytearray:
    """Compose all graphs into one context, compile them, and return the context's binary.

    A DLC must hold one graph; it gets the stem of the DLC as its name.

    Raises:
        RefusedError: a DLC is not readable, holds more than one graph, or does not compile.
    """
    context = session.new_context(
        HtpConfigs(HtpConfig(option=HTP_CONTEXT_WEIGHT_SHARING, value=int(weight_sharing)))
    )
    configs = HtpConfigs(
        HtpConfig(option=HTP_GRAPH_VTCM_SIZE, value=vtcm_mb),
        HtpConfig(
            option=HTP_GRAPH_OPTIMIZATION,
            value=HTP_OPTIMIZATION_FINALIZE_FLAG,
            second=optimization_level,
        ),
    )
    for dlc in dlcs:
        with _opened(system, dlc) as handle:
            composer = _GraphComposer(session, dlc.stem, configs)
            composer.compose(system, handle, context)
            session.qnn.call(
                BackendFunction.GRAPH_FINALIZE,
                session.graph(context, dlc.stem), c.c_void_p(None), c.c_void_p(None),
            )  # fmt: skip
    return _binary_of(session.qnn, context)


@contextmanager
def _opened(system: FunctionTable, dlc: Path) -> Iterator[c.c_void_p]:
    """A DLC's handle; the graphs composed from it need it until they are finalized."""
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
    """Composes a DLC through a backend interface whose `graphCreate` is ours.

    The name of a DLC's graph is chosen by ONNX Runtime (a hash), and composing takes no
    configuration for a graph of unknown name. The interface is passed by value, so ours differs in
    this one function: it gives the graph its name and its configuration.
    """

    def __init__(self, session: HtpSession, name: str, configs: HtpConfigs) -> None:
        self._session = session
        self._name = name
        self._configs = configs
        self._created = 0
        interface_type = type(session.qnn.interface)
        self._interface = interface_type.from_buffer_copy(session.qnn.interface)
        types = (c.c_void_p, c.c_char_p, c.c_void_p, c.c_void_p)
        self._create = session.qnn.function(BackendFunction.GRAPH_CREATE, *types)
        self._callback = c.CFUNCTYPE(c.c_uint64, *types)(self._graph_create)
        self._interface.fn[BackendFunction.GRAPH_CREATE] = c.cast(self._callback, c.c_void_p).value

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
        """Called by the system library for every graph of the DLC; the name must stay unique."""
        self._created += 1
        if self._created > 1:
            return _QNN_ERROR_INVALID_ARGUMENT
        return int(self._create(context, self._name.encode(), self._configs.pointer, graph))


def _binary_of(qnn: FunctionTable, context: c.c_void_p) -> bytearray:
    size, written = c.c_uint64(), c.c_uint64()
    qnn.call(BackendFunction.CONTEXT_GET_BINARY_SIZE, context, c.pointer(size))
    binary = bytearray(size.value)
    buffer = (c.c_char * size.value).from_buffer(binary)
    qnn.call(
        BackendFunction.CONTEXT_GET_BINARY,
        context, c.cast(buffer, c.c_void_p), c.c_uint64(size.value), c.pointer(written),
    )  # fmt: skip
    del buffer  # a bytearray cannot shrink while it is exported
    del binary[written.value :]
    return binary
