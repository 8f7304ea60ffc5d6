"""`htp_backend_ext_config.json`: devices, context and memory for QNN's HTP extensions.

Keys: "Gen AI Backend Extensions", docs.qualcomm.com 80-87189-2, and AI Hub's template. `context` is
an object in AI Hub's files and an array of objects in the newer documentation: both are read, and
written as they were.
"""

from typing import Annotated, Literal

from pydantic import Field

from buildlib.container.config_model import ConfigModel
from buildlib.targets import Target

PerfProfile = Literal[
    "default",
    "burst",
    "balanced",
    "high_performance",
    "sustained_high_performance",
    "high_power_saver",
    "low_power_saver",
    "low_balanced",
    "power_saver",
    "extreme_power_saver",
]


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
    """How contexts are made."""

    weight_sharing_enabled: bool
    lora_weight_sharing_enabled: bool | None = None


class HtpMemory(ConfigModel):
    """How inputs and outputs reach the processor."""

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
    """What contexts of one process share."""

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


def htp_config(target: Target) -> HtpConfig:
    """The extensions for a target: full speed, shared buffers, shared weights where they run."""
    return HtpConfig(
        devices=(HtpDevice(soc_model=target.soc.soc_model, dsp_arch=target.soc.dsp_arch),),
        memory=HtpMemory(),
        context=HtpContext(weight_sharing_enabled=target.weight_sharing),
    )
