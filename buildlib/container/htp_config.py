"""`htp_backend_ext_config.json`: devices, context and memory for QNN's HTP extensions.

Keys: "Gen AI Backend Extensions", docs.qualcomm.com 80-87189-2, and AI Hub's template. `context` is
an object in AI Hub's files and an array of objects in the newer documentation: both are read, and
written as they were.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field

from buildlib.container.config_model import ConfigModel, One, OneOrSeveral, Several, Text
from buildlib.targets import Target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.htp_extensions import PerfProfile

_CORE: Mapping[str, object] = {"core_id": 0, "perf_profile": "burst", "rpc_control_latency": 100}
"""Settings of a core in the files that we write, where no option says otherwise."""


class HtpCore(ConfigModel):
    """One core and how fast it runs; latencies and times in microseconds."""

    core_id: Annotated[int, Field(ge=0)] | None = None
    perf_profile: PerfProfile | None = None
    rpc_control_latency: Annotated[int, Field(ge=0)] | None = None
    rpc_polling_time: Annotated[int, Field(ge=0)] | None = None


class HtpDevice(ConfigModel):
    """The SoC that the binaries were compiled for, by the vendor's number."""

    device_id: Annotated[int, Field(ge=0)] | None = None
    soc_model: Annotated[int, Field(ge=0)] | None = None
    soc_id: Annotated[int, Field(ge=0)] | None = None
    dsp_arch: Annotated[str, Field(pattern=r"^v\d{2,3}$")] | None = None
    cores: tuple[HtpCore, ...] | None = None


class HtpContext(ConfigModel):
    """Options of context creation."""

    weight_sharing_enabled: bool | None = None
    lora_weight_sharing: bool | None = None
    extended_udma: bool | None = None


class HtpMemory(ConfigModel):
    """Memory of inputs and outputs."""

    mem_type: Literal["shared_buffer"] | None = None


_Flag = Annotated[int, Field(ge=0, le=1)]


class HtpGraph(ConfigModel):
    """Options of graphs by name; `O` is the compiler's effort."""

    graph_names: tuple[str, ...] | None = None
    optimization: Annotated[
        Annotated[int, Field(ge=1, le=3)] | None,
        Field(alias="O"),
    ] = None
    vtcm_mb: Annotated[int, Field(ge=0)] | None = None
    hvx_threads: Annotated[int, Field(ge=1)] | None = None
    fp16_relaxed_precision: _Flag | None = None
    dlbc: _Flag | None = None
    dlbc_weights: _Flag | None = None


class HtpGroupContext(ConfigModel):
    """Resources that contexts of one process share."""

    share_resources: bool


class BackendExtensions(ConfigModel):
    """The library that reads a file of extensions, and that file."""

    shared_library_path: Text
    config_file_path: Text | None = None


class BackendExtensionsConfig(ConfigModel):
    """The outer file, which qnn-net-run and qnn-context-binary-generator take."""

    backend_extensions: BackendExtensions


_Item = TypeVar("_Item")
_OneOrMore: TypeAlias = Annotated[
    Annotated[_Item, One] | Annotated[tuple[_Item, ...], Several], OneOrSeveral
]


class HtpConfig(ConfigModel):
    """`htp_backend_ext_config.json`."""

    devices: tuple[HtpDevice, ...] | None = None
    memory: HtpMemory | None = None
    context: _OneOrMore[HtpContext] | None = None
    graphs: _OneOrMore[HtpGraph] | None = None
    group_context: Annotated[HtpGroupContext | None, Field(alias="groupContext")] = None

    @property
    def contexts(self) -> tuple[HtpContext, ...]:
        """`context` in either of its forms."""
        if self.context is None:
            return ()
        return self.context if isinstance(self.context, tuple) else (self.context,)

    def without_sharing(self) -> "HtpConfig":
        """Return a copy with contexts that share no weights."""
        off = {"weight_sharing_enabled": False, "lora_weight_sharing": None}
        contexts = tuple(context.model_copy(update=off) for context in self.contexts)
        several = isinstance(self.context, tuple)
        return self.model_copy(
            update={"context": contexts if several else next(iter(contexts), None)}
        )


def htp_config(compiled: CompileConfig | Target) -> HtpConfig:
    """Return the extensions that Genie runs binaries with, or those that suit a target.

    Options of the compiler alone are left out: all those of graphs, and most of contexts.
    """
    config = CompileConfig.for_target(compiled) if isinstance(compiled, Target) else compiled
    values: dict[str, Any] = config.to_backend_extensions()
    values.pop("graphs", None)
    values["context"] = {"weight_sharing_enabled": config.weight_sharing}
    for device in values.get("devices", ()):
        device["cores"] = [{**_CORE, **core} for core in device.get("cores") or [{}]]
    return HtpConfig.from_json(json.dumps(values))
