"""HTP backend extensions: the vendor's JSON for contexts, graphs, devices and memory.

Names: `qairt.api.common.backends.htp` and "HTP Backend Extensions", docs.qualcomm.com 80-87189-2.
`context` and `graphs` are read as one object or as an array of objects, and written as arrays.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer

from buildlib.errors import InvalidOptionError
from buildlib.validation import first_fault

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

_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_SECTIONS = ("context", "graphs", "devices", "memory", "groupContext")


class HtpOptions(BaseModel):
    """Options of one object. Unknown options are kept, and written unchanged."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    SECTION: ClassVar[str]

    @property
    def _extras(self) -> dict[str, Any]:
        """The vendor's name for options that have no field here."""
        return dict(self.model_extra or {})

    @property
    def extras(self) -> dict[str, Any]:
        """Options that have no field here."""
        return self._extras

    @classmethod
    def known_options(cls) -> tuple[str, ...]:
        """Return the dotted keys of all options."""
        return tuple(f"{cls.SECTION}.{name}" for name in cls.model_fields if name != "name")

    def as_extension(self) -> dict[str, Any]:
        """Return the options that were set, as JSON values."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"name"})


class HtpContextConfig(HtpOptions):
    """Options that all graphs of a context binary share.

    Attributes:
        weight_sharing_enabled: graphs keep one copy of equal weights.
        lora_weight_sharing: the same for the weights of LoRA adapters.
        extended_udma: the binary may be mapped outside the 32-bit address space.
    """

    SECTION = "context"

    weight_sharing_enabled: bool | None = None
    lora_weight_sharing: bool | None = None
    extended_udma: bool | None = None


class HtpGraphConfig(HtpOptions):
    """Compiler options of one graph or of all.

    Attributes:
        name: name of the graph; `None` applies to graphs without an entry and to options that
            an entry leaves open.
        vtcm_size_in_mb: tightly coupled memory to plan for; 0 is all of it.
        optimization_type: the compiler's effort.
        hvx_threads: vector threads to use; by default all.
        fp16_relaxed_precision: compute floats with 16 bits.
        dlbc: compress activations on their way to memory.
        dlbc_weights: compress weights.
    """

    SECTION = "graphs"

    name: str | None = None
    vtcm_size_in_mb: _Count | None = Field(
        default=None, validation_alias="vtcm_mb", serialization_alias="vtcm_mb"
    )
    optimization_type: Annotated[int, Field(ge=1, le=3)] | None = Field(
        default=None, validation_alias="O", serialization_alias="O"
    )
    hvx_threads: _Positive | None = None
    fp16_relaxed_precision: bool | None = None
    dlbc: bool | None = None
    dlbc_weights: bool | None = None

    @field_serializer("fp16_relaxed_precision", "dlbc", "dlbc_weights")
    def _flag(self, value: bool | None) -> int | None:  # noqa: FBT001 - pydantic's protocol
        return None if value is None else int(value)

    def with_defaults_from(self, other: "HtpGraphConfig") -> "HtpGraphConfig":
        """Return these options, completed by those of `other`."""
        return HtpGraphConfig.model_validate(
            {**other.model_dump(exclude_none=True), **self.model_dump(exclude_none=True)}
        )


class HtpDeviceCoreConfig(HtpOptions):
    """Performance settings of a core.

    Attributes:
        rpc_control_latency: microseconds.
    """

    SECTION = "devices.cores"

    core_id: _Count | None = None
    perf_profile: PerfProfile | None = None
    rpc_control_latency: _Count | None = None


class HtpDeviceConfig(HtpOptions):
    """The SoC, by the vendor's numbers."""

    SECTION = "devices"

    device_id: _Count | None = None
    soc_model: _Count | None = None
    dsp_arch: Annotated[str, Field(pattern=r"^v\d{2,3}$")] | None = None
    cores: tuple[HtpDeviceCoreConfig, ...] | None = None


class HtpMemoryConfig(HtpOptions):
    """Memory type of inputs and outputs."""

    SECTION = "memory"

    mem_type: Literal["shared_buffer"] | None = None


class HtpGroupContextConfig(HtpOptions):
    """Options that the contexts of a process share."""

    SECTION = "groupContext"

    share_resources: bool | None = None


_Config = TypeVar("_Config", bound=HtpOptions)

HtpSections = tuple[
    list[HtpContextConfig],
    list[HtpGraphConfig],
    list[HtpDeviceConfig],
    HtpMemoryConfig | None,
    HtpGroupContextConfig | None,
    dict[str, Any],
]
"""Contexts, graphs, devices, memory, group of contexts, and unknown sections."""


class HtpConfigHelper:
    """Backend extensions as objects, and back."""

    @classmethod
    def from_backend_extension_dict(cls, backend_ext: Mapping[str, Any]) -> HtpSections:
        """Read parsed JSON. An entry for several `graph_names` becomes one for each of them."""
        memory = _objects(HtpMemoryConfig, backend_ext.get("memory"))
        group = _objects(HtpGroupContextConfig, backend_ext.get("groupContext"))
        return (
            _objects(HtpContextConfig, backend_ext.get("context")),
            _graphs(backend_ext.get("graphs")),
            _objects(HtpDeviceConfig, backend_ext.get("devices")),
            memory[0] if memory else None,
            group[0] if group else None,
            {name: value for name, value in backend_ext.items() if name not in _SECTIONS},
        )

    @classmethod
    def to_backend_extension_dict(
        cls,
        context_configs: Sequence[HtpContextConfig] = (),
        graph_configs: Sequence[HtpGraphConfig] = (),
        device_configs: Sequence[HtpDeviceConfig] = (),
        memory_config: HtpMemoryConfig | None = None,
        group_context_config: HtpGroupContextConfig | None = None,
        section_extras: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return JSON values; graphs that follow each other with equal options share an entry."""
        sections: dict[str, Any] = {
            "context": [config.as_extension() for config in context_configs],
            "graphs": _entries(graph_configs),
            "devices": [config.as_extension() for config in device_configs],
            "memory": memory_config and memory_config.as_extension(),
            "groupContext": group_context_config and group_context_config.as_extension(),
        }
        return {name: value for name, value in sections.items() if value} | dict(
            section_extras or {}
        )

    @classmethod
    def list_config_options(cls) -> tuple[str, ...]:
        """Return the dotted keys of every known option."""
        kinds = (
            HtpContextConfig,
            HtpGraphConfig,
            HtpDeviceConfig,
            HtpDeviceCoreConfig,
            HtpMemoryConfig,
            HtpGroupContextConfig,
        )
        return tuple(key for kind in kinds for key in kind.known_options())


def _objects(kind: type[_Config], section: object) -> list[_Config]:
    """Read a section that is one object or an array of them."""
    if section is None:
        return []
    return [validated(kind, value) for value in (section if _is_array(section) else [section])]


def _graphs(section: object) -> list[HtpGraphConfig]:
    entries = [] if section is None else section if _is_array(section) else [section]
    return [graph for entry in entries for graph in _named(entry)]


def _named(entry: object) -> list[HtpGraphConfig]:
    """Return an entry of `graphs` once for each graph that it names."""
    if not isinstance(entry, Mapping) or "graph_names" not in entry:
        return [validated(HtpGraphConfig, entry)]
    names = entry["graph_names"]
    if not _is_array(names) or not all(isinstance(name, str) for name in names):
        raise InvalidOptionError("graphs.graph_names", f"{names!r} is not a list of names", ())
    options = {key: value for key, value in entry.items() if key != "graph_names"}
    return [validated(HtpGraphConfig, {**options, "name": name}) for name in names]


def _is_array(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _entries(graphs: Sequence[HtpGraphConfig]) -> list[dict[str, Any]]:
    entries = []
    for is_named, neighbours in groupby(graphs, lambda graph: graph.name is not None):
        if not is_named:
            entries += [graph.as_extension() for graph in neighbours]
            continue
        for shared, group in groupby(neighbours, HtpGraphConfig.as_extension):
            entries.append({"graph_names": [graph.name for graph in group], **shared})
    return entries


def validated(kind: type[_Config], values: object) -> _Config:
    """Validate the options of a section."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        fault = first_fault(error, kind)
        where = ".".join(str(part) for part in (kind.SECTION, *fault.location))
        raise InvalidOptionError(where, fault.reason, ()) from error
