"""Calls of the QNN C API, over ctypes.

For child processes and devices only: the libraries abort on some errors. A process may load
`libQnnHtp.so` once, and never `libHtpPrepare.so` beside it. This file and the two that it imports
go to devices with the graph runtime: standard library only, Python 3.8+.
"""

from __future__ import annotations

import ctypes as c
import os
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from buildlib.toolchains.qnn.refusal import RefusedError
from buildlib.toolchains.qnn.structures import (
    CONFIG_CUSTOM,
    HTP_DEVICE_SOC,
    PROFILE_CYCLES,
    PROFILE_DETAILED,
    PROFILE_NODE,
    BackendInterfaceHeader,
    BinaryInfoV3,
    HtpCustomConfig,
    OperationName,
    ProfileEvent,
    QnnConfig,
    QnnVersion,
    SystemInterfaceHeader,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BACKEND_TABLE_ENTRIES: Final = {(2, 40): 75}
"""Entries of a backend's function table by core API version.

The whole interface is passed by value to `QnnSystemDlc_composeGraphs`, so a wrong count corrupts
the stack: a version that is not listed is refused rather than guessed.
"""

CORE_API_MAJOR: Final = 2
SYSTEM_API_MAJOR: Final = 1
SYSTEM_API_MINORS: Final = range(10, 16)
_LOG_LEVEL_WARNING = 2
_PROVIDER_NOT_FOUND = 4006
_OPERATION_NOT_FOUND = 5005
_UNREGISTERED = (
    "an operation of the binary is not known; the op package that has it is not registered"
)
_BINARY_INFO_VERSION = 3


class BackendFunction(IntEnum):
    """Places in a backend's function table; later versions append and never reorder."""

    BACKEND_CREATE = 1
    BACKEND_GET_BUILD_ID = 4
    BACKEND_REGISTER_OP_PACKAGE = 5
    BACKEND_GET_SUPPORTED_OPERATIONS = 6
    BACKEND_FREE = 8
    CONTEXT_CREATE = 9
    CONTEXT_GET_BINARY_SIZE = 11
    CONTEXT_GET_BINARY = 12
    CONTEXT_CREATE_FROM_BINARY = 13
    CONTEXT_FREE = 14
    GRAPH_CREATE = 15
    GRAPH_ADD_NODE = 18
    GRAPH_FINALIZE = 19
    GRAPH_RETRIEVE = 20
    GRAPH_EXECUTE = 21
    TENSOR_CREATE_GRAPH_TENSOR = 24
    LOG_CREATE = 25
    PROFILE_CREATE = 28
    PROFILE_GET_EVENTS = 30
    PROFILE_GET_SUB_EVENTS = 31
    PROFILE_GET_EVENT_DATA = 32
    PROFILE_FREE = 34
    DEVICE_CREATE = 40
    DEVICE_FREE = 43


class SystemFunction(IntEnum):
    """Places in the system library's function table."""

    CONTEXT_CREATE = 0
    CONTEXT_GET_BINARY_INFO = 1
    CONTEXT_FREE = 3
    DLC_CREATE_FROM_FILE = 8
    DLC_COMPOSE_GRAPHS = 10
    DLC_FREE = 12


class QnnCallError(RefusedError):
    """A call returned an error; the low 16 bits are its number in the vendor's headers."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned QNN error {code & 0xFFFF}")
        self.code = code & 0xFFFF


Binary = Any
"""A context binary: bytes, or a ctypes array over a mapped file."""


class FunctionTable:
    """A table of function pointers and a way to call them.

    Args:
        interface: a structure with the table as its field `fn`. It must outlive this object.
    """

    def __init__(self, interface: Any) -> None:  # noqa: ANN401 - made at run time, see below
        self.interface = interface

    def call(self, function: BackendFunction | SystemFunction, *arguments: Any) -> None:  # noqa: ANN401
        """Call a function with ctypes values, each in its own type."""
        code = self.function(function, *(type(a) for a in arguments))(*arguments)
        if code:
            raise QnnCallError(function.name, code)

    def function(self, function: BackendFunction | SystemFunction, *types: Any) -> Any:  # noqa: ANN401
        """Return the function that takes these ctypes types and returns an error number."""
        return c.CFUNCTYPE(c.c_uint64, *types)(self.interface.fn[function])


def load_backend(library: Path, *, whole: bool = True) -> FunctionTable:
    """Load a backend, normally `libQnnHtp.so`.

    Args:
        whole: know the length of its table, so that it can be passed by value; without it any
            version 2 of the core API serves: their tables begin alike.
    """
    address = _first_provider(library, "QnnInterface_getProviders")
    header = BackendInterfaceHeader.from_address(address)
    version = (header.core_api.major, header.core_api.minor)
    entries = BACKEND_TABLE_ENTRIES.get(version)
    if not whole and header.core_api.major == CORE_API_MAJOR:
        entries = max(BackendFunction) + 1
    if entries is None:
        versions = ", ".join(f"{major}.{minor}" for major, minor in BACKEND_TABLE_ENTRIES)
        raise RefusedError(
            f"{library.name} has QNN core API {header.core_api}, this project knows {versions}"
        )
    return FunctionTable(_interface_type(BackendInterfaceHeader, entries).from_address(address))


def load_system(library: Path) -> FunctionTable:
    """Load `libQnnSystem.so`."""
    address = _first_provider(library, "QnnSystemInterface_getProviders")
    api: QnnVersion = SystemInterfaceHeader.from_address(address).api
    if api.major != SYSTEM_API_MAJOR or api.minor not in SYSTEM_API_MINORS:
        range_text = f"{SYSTEM_API_MAJOR}.{SYSTEM_API_MINORS[0]} to .{SYSTEM_API_MINORS[-1]}"
        raise RefusedError(
            f"{library.name} has QNN system API {api}, this project knows {range_text}"
        )
    entries = max(SystemFunction) + 1
    return FunctionTable(_interface_type(SystemInterfaceHeader, entries).from_address(address))


def _first_provider(library: Path, symbol: str) -> int:
    """Return the address of the first interface that a library offers."""
    try:
        get_providers = getattr(c.CDLL(str(library)), symbol)
    except (OSError, AttributeError) as error:
        raise RefusedError(f"cannot load {library}: {error}") from error
    providers = c.POINTER(c.c_void_p)()
    count = c.c_uint32()
    code = get_providers(c.byref(providers), c.byref(count))
    if code or not count.value or not providers[0]:
        raise RefusedError(f"{library.name} offers no interface (QNN error {code & 0xFFFF})")
    return int(providers[0])


def _interface_type(header: type[c.Structure], entries: int) -> type[c.Structure]:
    """Return the header's fields followed by `fn`, a table of that many functions."""
    fields = (*header._fields_, ("fn", c.c_void_p * entries))
    return type("Interface", (c.Structure,), {"_fields_": fields})


def raw_binary_info(system: FunctionTable, binary: Binary) -> tuple[BinaryInfoV3, c.c_void_p]:
    """Return the library's own structure, and the handle that owns it."""
    handle, info, size = c.c_void_p(), c.c_void_p(), c.c_uint64()
    system.call(SystemFunction.CONTEXT_CREATE, c.pointer(handle))
    try:
        system.call(
            SystemFunction.CONTEXT_GET_BINARY_INFO,
            handle, c.cast(binary, c.c_void_p), c.c_uint64(len(binary)), c.pointer(info),
            c.pointer(size),
        )  # fmt: skip
    except QnnCallError as error:
        raise RefusedError(
            f"it is damaged, of a newer QNN, or another kind of file (QNN error {error.code}); "
            "what can be read are containers, context binaries, DLCs and entries of the cache"
        ) from error
    if not info.value:
        raise RefusedError("it holds no information")
    raw = BinaryInfoV3.from_address(info.value)
    if raw.version != _BINARY_INFO_VERSION:
        raise RefusedError(f"its information has version {raw.version}, 3 is known")
    return raw, handle


def pointer_array(pointers: list[int]) -> Any:  # noqa: ANN401 - an array type of its own length
    """Return a null-terminated array of pointers, the form of configuration lists in the API."""
    return (c.c_void_p * (len(pointers) + 1))(*pointers, None)


class HtpConfigs:
    """HTP configurations as a list for the API; owns all its memory."""

    def __init__(self, *custom: HtpCustomConfig) -> None:
        self._custom = custom
        self._configs = [
            QnnConfig(option=CONFIG_CUSTOM, custom=c.addressof(config)) for config in custom
        ]
        self.array = pointer_array([c.addressof(config) for config in self._configs])

    @property
    def pointer(self) -> c.c_void_p:
        """Valid as long as this object lives."""
        return c.cast(self.array, c.c_void_p)


LogCallback = c.CFUNCTYPE(None, c.c_char_p, c.c_int, c.c_uint64, c.c_void_p)
"""Takes the format of a message, its level, a time, and the `va_list` of its values."""


class HtpBackend:
    """The HTP backend, without a device: it knows operations and op packages.

    Args:
        whole: as `load_backend` takes it.
        log: a `LogCallback`; without one the log goes to stdout, or to logcat on Android.
        log_level: 1 for errors alone, up to 5.
    """

    def __init__(
        self,
        library: Path,
        *,
        whole: bool = True,
        log: Any = None,  # noqa: ANN401 - a ctypes function
        log_level: int = _LOG_LEVEL_WARNING,
    ) -> None:
        self.qnn: FunctionTable = load_backend(library, whole=whole)
        self._log_callback = log
        callback = c.cast(log, c.c_void_p) if log else None
        self.log = self._created(BackendFunction.LOG_CREATE, callback, c.c_uint32(log_level))
        self.backend = self._created(BackendFunction.BACKEND_CREATE, self.log, None)

    def register_op_package(self, library: str | Path, provider: str, target: str = "CPU") -> None:
        """Make the operations of an op package known to the backend, before it has contexts.

        Args:
            target: of the kernels of this library: `CPU`, or `HTP` for those on a DSP.
        """
        try:
            self.qnn.call(
                BackendFunction.BACKEND_REGISTER_OP_PACKAGE,
                self.backend, c.c_char_p(os.fsencode(library)), c.c_char_p(provider.encode()),
                c.c_char_p(target.encode()),
            )  # fmt: skip
        except QnnCallError as error:
            if error.code == _PROVIDER_NOT_FOUND:
                raise RefusedError(f"the package has no function {provider!r}") from error
            raise

    def operations(self) -> list[str]:
        """Return all operations that the backend knows, e.g. `qti.aisw::Relu`."""
        count, names = c.c_uint32(), c.POINTER(OperationName)()
        self.qnn.call(
            BackendFunction.BACKEND_GET_SUPPORTED_OPERATIONS,
            self.backend, c.pointer(count), c.pointer(names),
        )  # fmt: skip
        return [f"{n.package.decode()}::{n.operation.decode()}" for n in names[: count.value]]

    def build_id(self) -> str:
        """Return the build of the backend, e.g. `v2.51.0.260929181845`."""
        build = c.c_char_p()
        self.qnn.call(BackendFunction.BACKEND_GET_BUILD_ID, c.pointer(build))
        return (build.value or b"").decode(errors="replace")

    def _created(self, function: BackendFunction, *arguments: Any) -> c.c_void_p:  # noqa: ANN401
        """Call a function with a last parameter that receives a new handle."""
        handle = c.c_void_p()
        values = (c.c_void_p(None) if a is None else a for a in arguments)
        self.qnn.call(function, *values, c.pointer(handle))
        return handle


class HtpSession(HtpBackend):
    """The HTP backend with a device of the given SoC: one a process, and it ends with it.

    Args:
        soc_model: the SoC; None for that of the device.
        whole, log, log_level: see `HtpBackend`.
    """

    def __init__(
        self,
        library: Path,
        soc_model: int | None = None,
        *,
        whole: bool = True,
        log: Any = None,  # noqa: ANN401 - a ctypes function
        log_level: int = _LOG_LEVEL_WARNING,
    ) -> None:
        super().__init__(library, whole=whole, log=log, log_level=log_level)
        # Without the SoC the device refuses 16-bit operations when a graph is finalized.
        soc = (
            () if soc_model is None else (HtpCustomConfig(option=HTP_DEVICE_SOC, value=soc_model),)
        )
        self._device_configs = HtpConfigs(*soc)
        self.device = self._created(
            BackendFunction.DEVICE_CREATE, self.log, self._device_configs.pointer
        )

    def new_context(self, configs: HtpConfigs) -> c.c_void_p:
        """Create an empty context."""
        return self._created(
            BackendFunction.CONTEXT_CREATE, self.backend, self.device, configs.pointer
        )

    def context_from_binary(self, binary: Binary) -> c.c_void_p:
        """Load the context of a context binary."""
        context = c.c_void_p()
        try:
            self.qnn.call(
                BackendFunction.CONTEXT_CREATE_FROM_BINARY,
                self.backend, self.device, c.c_void_p(None), c.cast(binary, c.c_void_p),
                c.c_uint64(len(binary)), c.pointer(context), c.c_void_p(None),
            )  # fmt: skip
        except QnnCallError as error:
            if error.code == _OPERATION_NOT_FOUND:
                raise RefusedError(f"{error}: {_UNREGISTERED}") from error
            raise
        return context

    def graph(self, context: c.c_void_p, name: str) -> c.c_void_p:
        """Return the graph of that name."""
        graph = c.c_void_p()
        self.qnn.call(
            BackendFunction.GRAPH_RETRIEVE, context, c.c_char_p(name.encode()), c.pointer(graph)
        )
        return graph

    def execute(
        self,
        graph: c.c_void_p,
        inputs: Any,  # noqa: ANN401
        outputs: Any,  # noqa: ANN401
        profile: c.c_void_p | None = None,
    ) -> None:
        """Run a graph on arrays of `Tensor`, each of which points to its memory."""
        self.qnn.call(
            BackendFunction.GRAPH_EXECUTE,
            graph,
            c.cast(inputs, c.c_void_p), c.c_uint32(len(inputs)),
            c.cast(outputs, c.c_void_p), c.c_uint32(len(outputs)),
            profile or c.c_void_p(None), c.c_void_p(None),
        )  # fmt: skip

    def node_cycles(self, run: Callable[[c.c_void_p], object]) -> list[tuple[str, int]]:
        """Return the cycles of each node, by its name, while `run` executes with a profile."""
        profile = self._created(
            BackendFunction.PROFILE_CREATE, self.backend, c.c_uint32(PROFILE_DETAILED)
        )
        try:
            run(profile)
            total = self._events(BackendFunction.PROFILE_GET_EVENTS, profile)
            nodes = [
                self._event(node)
                for event in total
                for node in self._events(BackendFunction.PROFILE_GET_SUB_EVENTS, c.c_uint64(event))
            ]
            return [
                ((node.identifier or b"").decode(errors="replace"), int(node.value))
                for node in nodes
                if (node.type, node.unit) == (PROFILE_NODE, PROFILE_CYCLES)
            ]
        finally:
            self.qnn.call(BackendFunction.PROFILE_FREE, profile)

    def _events(self, function: BackendFunction, of: c.c_void_p | c.c_uint64) -> list[int]:
        events, count = c.POINTER(c.c_uint64)(), c.c_uint32()
        self.qnn.call(function, of, c.pointer(events), c.pointer(count))
        return list(events[: count.value])

    def _event(self, event: int) -> ProfileEvent:
        data = ProfileEvent()
        function = BackendFunction.PROFILE_GET_EVENT_DATA
        self.qnn.call(function, c.c_uint64(event), c.pointer(data))
        return data
