"""A backend with its device made for one SoC, and what is built on it. For child processes only."""

import ctypes as c
from pathlib import Path
from typing import Any

from buildlib.toolchains.qnn.api import BackendFunction, FunctionTable, load_backend, pointer_array
from buildlib.toolchains.qnn.structures import CONFIG_CUSTOM, HTP_DEVICE_SOC, Config, HtpConfig

_LOG_LEVEL_WARNING = 2


class HtpConfigs:
    """A list of HTP configurations in the form that the API takes, owning all its memory."""

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
    """The HTP backend with a device of the given SoC. One a process; the process ends with it."""

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
        """An empty context."""
        return self._created(
            BackendFunction.CONTEXT_CREATE, self.backend, self.device, configs.pointer
        )

    def context_from_binary(self, binary: bytes) -> c.c_void_p:
        """The context that a context binary holds."""
        context = c.c_void_p()
        self.qnn.call(
            BackendFunction.CONTEXT_CREATE_FROM_BINARY,
            self.backend, self.device, c.c_void_p(None), c.c_char_p(binary),
            c.c_uint64(len(binary)), c.pointer(context), c.c_void_p(None),
        )  # fmt: skip
        return context

    def graph(self, context: c.c_void_p, name: str) -> c.c_void_p:
        """The graph of that name."""
        graph = c.c_void_p()
        self.qnn.call(
            BackendFunction.GRAPH_RETRIEVE, context, c.c_char_p(name.encode()), c.pointer(graph)
        )
        return graph

    def build_id(self) -> str:
        """Build of the backend, e.g. `v2.51.0.260929181845`."""
        build = c.c_char_p()
        self.qnn.call(BackendFunction.BACKEND_GET_BUILD_ID, c.pointer(build))
        return (build.value or b"").decode(errors="replace")

    def _created(self, function: BackendFunction, *arguments: Any) -> c.c_void_p:  # noqa: ANN401
        """Call a function whose last parameter receives a new handle."""
        handle = c.c_void_p()
        given = (c.c_void_p(None) if a is None else a for a in arguments)
        self.qnn.call(function, *given, c.pointer(handle))
        return handle
