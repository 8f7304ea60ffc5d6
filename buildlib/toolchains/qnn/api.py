"""Calls of the QNN C API, over ctypes.

For child processes only: the libraries abort on some errors. A process may load `libQnnHtp.so`
once, and never `libHtpPrepare.so` beside it.
"""

import ctypes as c
import os
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from buildlib.toolchains.child_process import RefusedError
from buildlib.toolchains.qnn.structures import (
    CONFIG_CUSTOM,
    HTP_DEVICE_SOC,
    BackendInterfaceHeader,
    Config,
    HtpConfig,
    OperationName,
    SystemInterfaceHeader,
    Version,
)
from buildlib.toolchains.requests import OpPackageLibrary

BACKEND_TABLE_ENTRIES: Final = {(2, 40): 75}
"""Entries of a backend's function table by core API version.

The whole interface is passed by value to `QnnSystemDlc_composeGraphs`, so a wrong count corrupts
the stack: a version that is not listed is refused rather than guessed.
"""

SYSTEM_API_MAJOR: Final = 1
SYSTEM_API_MINORS: Final = range(10, 16)
_LOG_LEVEL_WARNING = 2
_PROVIDER_NOT_FOUND = 4006
_OPERATION_NOT_FOUND = 5005
_UNREGISTERED = (
    "an operation of the binary is not known; the op package that has it is not registered"
)


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


class FunctionTable:
    """A table of function pointers and a way to call them.

    Args:
        interface: the structure whose `fn` field is the table. It must outlive this object.
    """

    def __init__(self, interface: Any) -> None:  # noqa: ANN401 - made at run time, see below
        self.interface = interface

    def call(self, function: BackendFunction | SystemFunction, *arguments: Any) -> None:  # noqa: ANN401
        """Call a function with ctypes values, each in its own type.

        Raises:
            QnnCallError: it returned an error.
        """
        code = self.function(function, *(type(a) for a in arguments))(*arguments)
        if code:
            raise QnnCallError(function.name, code)

    def function(self, function: BackendFunction | SystemFunction, *types: Any) -> Any:  # noqa: ANN401
        """Return the function that takes these ctypes types and returns an error number."""
        return c.CFUNCTYPE(c.c_uint64, *types)(self.interface.fn[function])


def load_backend(library: Path) -> FunctionTable:
    """Load a backend, normally `libQnnHtp.so`."""
    address = _first_provider(library, "QnnInterface_getProviders")
    header = BackendInterfaceHeader.from_address(address)
    version = (header.core_api.major, header.core_api.minor)
    entries = BACKEND_TABLE_ENTRIES.get(version)
    if entries is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in BACKEND_TABLE_ENTRIES)
        raise RefusedError(
            f"{library.name} has QNN core API {header.core_api}, this project knows {known}"
        )
    return FunctionTable(_interface_type(BackendInterfaceHeader, entries).from_address(address))


def load_system(library: Path) -> FunctionTable:
    """Load `libQnnSystem.so`."""
    address = _first_provider(library, "QnnSystemInterface_getProviders")
    api: Version = SystemInterfaceHeader.from_address(address).api
    if api.major != SYSTEM_API_MAJOR or api.minor not in SYSTEM_API_MINORS:
        known = f"{SYSTEM_API_MAJOR}.{SYSTEM_API_MINORS[0]} to .{SYSTEM_API_MINORS[-1]}"
        raise RefusedError(f"{library.name} has QNN system API {api}, this project knows {known}")
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


def pointer_array(pointers: list[int]) -> Any:  # noqa: ANN401 - an array type of its own length
    """Return a null-terminated array of pointers, the form of configuration lists in the API."""
    return (c.c_void_p * (len(pointers) + 1))(*pointers, None)


class HtpConfigs:
    """HTP configurations as a list for the API; owns all its memory."""

    def __init__(self, *custom: HtpConfig) -> None:
        self._custom = custom
        self._configs = [
            Config(option=CONFIG_CUSTOM, custom=c.addressof(config)) for config in custom
        ]
        self.array = pointer_array([c.addressof(config) for config in self._configs])

    @property
    def pointer(self) -> c.c_void_p:
        """Valid as long as this object lives."""
        return c.cast(self.array, c.c_void_p)


class HtpSession:
    """The HTP backend with a device of the given SoC: one a process, and it ends with it."""

    def __init__(self, library: Path, soc_model: int | None = None) -> None:
        self.qnn: FunctionTable = load_backend(library)
        self.log = self._created(BackendFunction.LOG_CREATE, None, c.c_uint32(_LOG_LEVEL_WARNING))
        self.backend = self._created(BackendFunction.BACKEND_CREATE, self.log, None)
        # Without the SoC the device refuses 16-bit operations when a graph is finalized.
        soc = () if soc_model is None else (HtpConfig(option=HTP_DEVICE_SOC, value=soc_model),)
        self._device_configs = HtpConfigs(*soc)
        self.device = self._created(
            BackendFunction.DEVICE_CREATE, self.log, self._device_configs.pointer
        )

    def new_context(self, configs: HtpConfigs) -> c.c_void_p:
        """Create an empty context."""
        return self._created(
            BackendFunction.CONTEXT_CREATE, self.backend, self.device, configs.pointer
        )

    def context_from_binary(self, binary: bytes) -> c.c_void_p:
        """Load the context of a context binary."""
        context = c.c_void_p()
        try:
            self.qnn.call(
                BackendFunction.CONTEXT_CREATE_FROM_BINARY,
                self.backend, self.device, c.c_void_p(None), c.c_char_p(binary),
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

    def register_op_package(self, package: OpPackageLibrary) -> None:
        """Make the operations of an op package known to the backend, before it has contexts."""
        try:
            self.qnn.call(
                BackendFunction.BACKEND_REGISTER_OP_PACKAGE,
                self.backend, c.c_char_p(os.fsencode(package.library)),
                c.c_char_p(package.provider.encode()), c.c_char_p(b"CPU"),
            )  # fmt: skip
        except QnnCallError as error:
            if error.code == _PROVIDER_NOT_FOUND:
                raise RefusedError(f"the package has no function {package.provider!r}") from error
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
        """Call a function whose last parameter receives a new handle."""
        handle = c.c_void_p()
        given = (c.c_void_p(None) if a is None else a for a in arguments)
        self.qnn.call(function, *given, c.pointer(handle))
        return handle
