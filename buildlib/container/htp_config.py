"""`htp_backend_ext_config.json`: devices, context and memory for QNN's HTP extensions.

Keys: "Gen AI Backend Extensions", docs.qualcomm.com 80-87189-2, and AI Hub's template. `context` is
an object in AI Hub's files and an array of objects in the newer documentation: both are read, and
written as they were.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from buildlib.container.config_model import ConfigModel
from buildlib.targets import Target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.htp_extensions import PerfProfile


class HtpCore(ConfigModel):
    """One core and how fast it runs; `rpc_control_latency` in microseconds."""

    core_id: Annotated[int, Field(ge=0)] = 0
    perf_profile: PerfProfile = "burst"
    rpc_control_latency: Annotated[int, Field(ge=0)] | None = 100


class HtpDevice(ConfigModel):
    """The SoC that the binaries were compiled for."""

    device_id: Annotated[int, Field(ge=0)] | None = None
    soc_model: Annotated[int, Field(ge=0)]
    dsp_arch: Annotated[str, Field(pattern=r"^v\d{2,3}$")]
    cores: tuple[HtpCore, ...] = (HtpCore(),)


class HtpContext(ConfigModel):
    """Options of context creation."""

    weight_sharing_enabled: bool
    lora_weight_sharing_enabled: bool | None = None


class HtpMemory(ConfigModel):
    """Memory of inputs and outputs."""

    mem_type: Literal["shared_buffer"] = "shared_buffer"


class HtpGraph(ConfigModel):
    """Options of graphs by name; `O` is the compiler's effort."""

    graph_names: tuple[str, ...]
    optimization: Annotated[int, Field(ge=1, le=3)] | None = Field(
        default=None, validation_alias="O", serialization_alias="O"
    )
    vtcm_mb: Annotated[int, Field(ge=0)] | None = None
    dlbc: Annotated[int, Field(ge=0, le=1)] | None = None


class HtpGroupContext(ConfigModel):
    """Resources that contexts of one process share."""

    share_resources: bool


class HtpConfig(ConfigModel):
    """`htp_backend_ext_config.json`."""

    devices: tuple[HtpDevice, ...]
    memory: HtpMemory | None = None
    context: HtpContext | tuple[HtpContext, ...] | None = None
    graphs: tuple[HtpGraph, ...] | HtpGraph | None = None
    group_context: HtpGroupContext | None = Field(
        default=None, validation_alias="groupContext", serialization_alias="groupContext"
    )

    @property
    def contexts(self) -> tuple[HtpContext, ...]:
        """`context` in either of its forms."""
        if self.context is None:
            return ()
        return self.context if isinstance(self.context, tuple) else (self.context,)


def htp_config(compiled: CompileConfig | Target) -> HtpConfig:
    """The extensions that Genie runs binaries with, or those that suit a target.

    What the compiler alone reads is left out: all options of graphs, and most of contexts.

    Raises:
        GenieConfigError: an option that is not known.
    """
    config = CompileConfig.for_target(compiled) if isinstance(compiled, Target) else compiled
    values: dict[str, Any] = config.to_backend_extensions()
    values.pop("graphs", None)
    values["context"] = {"weight_sharing_enabled": config.weight_sharing}
    return HtpConfig.from_json(json.dumps(values))
