"""HTP backend extensions: the vendor's JSON for contexts, graphs, devices and memory.

Keys and ranges: "QNN HTP Backend Extensions", docs.qualcomm.com 80-63442-10, and those that the
library of QNN 2.51 takes besides (`buildlib.container.genie_validator` asks it). `context` is one
object there and an array of them in 80-87189-2: both are read, and arrays are written.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, Self, TypeGuard, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_serializer,
    model_validator,
)
from pydantic_core import PydanticKnownError

from buildlib.config_model import ConfigModel, Count32, Size32, Whole, in_file, refuse
from buildlib.errors import InvalidOptionError
from buildlib.validation import NO_SUCH_KEY, RULE, Fault, NoEffect, first_fault, hints, nearest_key

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
    "system_settings",
    "llm_decode_default",
    "llm_decode_burst",
    "llm_decode_balanced",
    "llm_decode_high_performance",
    "llm_decode_sustained_high_performance",
    "llm_decode_high_power_saver",
    "llm_decode_low_power_saver",
    "llm_decode_low_balanced",
    "llm_decode_power_saver",
    "llm_decode_extreme_power_saver",
]


def _from_number(value: object) -> object:
    """Read `3.0` as 3, where the vendor's schema has a number that is a multiple of 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flag(value: object, info: ValidationInfo) -> object:
    """Read the 0 and 1 of files."""
    if not in_file(info):
        return value
    if isinstance(value, bool) or value not in (0, 1):
        raise PydanticKnownError("literal_error", {"expected": "0 or 1"})
    return bool(value)


def _whole_flag(value: object, info: ValidationInfo) -> object:
    """Read the 0 and 1 of files, where the library takes no 1.0."""
    if in_file(info) and isinstance(value, float):
        raise PydanticKnownError("int_type")
    return _flag(value, info)


_LLM_DECODE_ARCH = 79
_DROPS = "unknown key: QNN's library may refuse the whole file for it"
_Size32 = Annotated[Size32, Whole]
_Count32 = Annotated[Count32, Whole]
_Size = Annotated[int, Field(ge=0), Whole]
_Flag = Annotated[bool, BeforeValidator(_flag)]
_ADAPTERS_ARE_INPUTS = NoEffect(
    "adapters are inputs of the graphs (LoRA v1), and no weights of the binary", "ort-qnn"
)
_FLOATS_ARE_RELAXED = NoEffect(
    "the compiler computes floats with 16 bits in any case; false is refused", "ort-qnn"
)
_SECTIONS = ("context", "graphs", "devices", "memory", "groupContext")


class HtpOptions(ConfigModel):
    """Options of one object. Unknown options are kept, and written unchanged.

    A file may not have a key that is nearly one of these: it is a misspelling.
    """

    model_config = ConfigDict(extra="allow")

    SECTION: ClassVar[str]
    UNKNOWN: ClassVar = "unknown key: it has no effect"

    @model_validator(mode="after")
    def _keys_are_spelled_right(self, info: ValidationInfo) -> Self:
        for key in self.extras if in_file(info) else ():
            if near := nearest_key(key, hints([type(self)])):
                raise refuse(f"unknown key: did you mean {near}?", key, kind=NO_SUCH_KEY)
        return self

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

    def notes(self) -> Iterator[Fault]:
        """Yield the keys that nobody knows."""
        yield from (Fault((key,), NO_SUCH_KEY, self.UNKNOWN) for key in self.extras)


class HtpContextConfig(HtpOptions):
    """Options of a context: of its binary, and of the one that a process makes from it.

    Attributes:
        weight_sharing_enabled: graphs keep one copy of equal weights.
        lora_weight_sharing: the same for the weights of LoRA adapters.
        extended_udma: the binary may be mapped outside the 32-bit address space.
        group_id: contexts of one group share their spill-fill buffer; 0 is the first.
        max_spill_fill_buffer_for_group: bytes of that buffer.
        file_read_memory_budget_in_mb: MiB of the binary that are read at a time; 0 reads it whole.
        io_memory_estimation: look for a process domain with room for inputs and outputs.
        concurrent_deserialization_patch: path of a file that it may read and write.
        reused_io_limit_mb: MiB of buffers that inputs and outputs share.
    """

    SECTION = "context"
    COMPILED: ClassVar = ("weight_sharing_enabled", "lora_weight_sharing", "extended_udma")
    """Options of the binary; the others are of the run."""

    weight_sharing_enabled: bool | None = None
    lora_weight_sharing: Annotated[bool | None, _ADAPTERS_ARE_INPUTS] = None
    extended_udma: bool | None = None
    group_id: _Size32 | None = None
    max_spill_fill_buffer_for_group: _Size | None = None
    file_read_memory_budget_in_mb: _Size | None = None
    io_memory_estimation: bool | None = None
    init_acceleration: bool | None = None
    concurrent_deserialization_patch: str | None = None
    lora_weight_sharing_ram_preload: bool | None = None
    reused_io_limit_mb: _Size32 | None = None
    skip_validation_on_binary_section: bool | None = None
    detachable_buffers_enabled: bool | None = None

    def notes(self) -> Iterator[Fault]:
        """Yield a size of a buffer that no group has."""
        yield from super().notes()
        if self.max_spill_fill_buffer_for_group and self.group_id != 0:
            place = ("max_spill_fill_buffer_for_group",)
            yield Fault(place, RULE, "it has no effect without group_id 0")

    def compiled_part(self) -> "HtpContextConfig":
        """Return the options of the binary alone."""
        run = set(type(self).model_fields) - set(self.COMPILED)
        return HtpContextConfig.model_validate(self.model_dump(exclude=run, exclude_unset=True))


class HtpGraphOptions(HtpOptions):
    """Compiler options of graphs.

    Attributes:
        vtcm_size_in_mb: tightly coupled memory to plan for; 0 is all of it.
        optimization_type: the compiler's effort.
        hvx_threads: vector threads to use; by default all.
        num_cores: cores that a call runs on.
        fp16_relaxed_precision: compute floats with 16 bits.
        dlbc: compress activations on their way to memory.
        dlbc_weights: compress weights.
    """

    SECTION = "graphs"
    UNKNOWN = _DROPS

    vtcm_size_in_mb: Annotated[int, Field(ge=0, le=4095), Whole] | None = Field(
        default=None, validation_alias="vtcm_mb", serialization_alias="vtcm_mb"
    )
    optimization_type: (
        Annotated[int, Field(ge=1, le=3), Whole, BeforeValidator(_from_number)] | None
    ) = Field(default=None, validation_alias="O", serialization_alias="O")
    hvx_threads: _Count32 | None = None
    fp16_relaxed_precision: Annotated[
        Annotated[bool, BeforeValidator(_whole_flag)] | None, _FLOATS_ARE_RELAXED
    ] = None
    dlbc: _Flag | None = None
    dlbc_weights: _Flag | None = None
    num_cores: _Count32 | None = None
    weights_packing: bool | None = None
    short_depth_conv_on_hmx_off: bool | None = None
    fold_relu_activation_into_conv_off: bool | None = None
    advanced_activation_fusion: bool | None = None
    monolithic_lstm: bool | None = None

    @field_serializer("fp16_relaxed_precision", "dlbc", "dlbc_weights")
    def _number(self, value: bool | None) -> int | None:  # noqa: FBT001 - pydantic's protocol
        return None if value is None else int(value)


class HtpGraphConfig(HtpGraphOptions):
    """Compiler options of one graph or of all.

    Attributes:
        name: name of the graph; `None` applies to graphs without an entry and to options that
            an entry leaves open.
    """

    name: str | None = None

    def with_defaults_from(self, other: "HtpGraphConfig") -> "HtpGraphConfig":
        """Return these options, completed by those of `other`."""
        return HtpGraphConfig.model_validate(
            {**other.model_dump(exclude_none=True), **self.model_dump(exclude_none=True)}
        )


class HtpDeviceCoreConfig(HtpOptions):
    """Performance settings of a core; latencies and times in microseconds.

    Attributes:
        perf_profile: clocks and sleep; the profiles `llm_decode_*` need Hexagon v79.
        rpc_polling_time: how long a call waits for its answer by polling.
    """

    SECTION = "devices.cores"
    UNKNOWN = _DROPS

    core_id: _Size32 | None = None
    perf_profile: PerfProfile | None = None
    rpc_control_latency: _Size32 | None = None
    rpc_polling_time: _Size32 | None = None
    hmx_timeout_us: _Size32 | None = None
    adaptive_polling_time: _Size32 | None = None
    ddr_perf_mode: bool | None = None


def profile_fault(core: HtpDeviceCoreConfig, htp_arch: int) -> str:
    """Say why an architecture has not the profile of a core; empty where it has."""
    if htp_arch >= _LLM_DECODE_ARCH or not (core.perf_profile or "").startswith("llm_decode"):
        return ""
    return f"{core.perf_profile} needs Hexagon v{_LLM_DECODE_ARCH}, and this is v{htp_arch}"


class HtpDeviceConfig(HtpOptions):
    """The SoC by the vendor's numbers, and how a process runs on it.

    Attributes:
        soc_model: 0 lets `dsp_arch` tell it.
        soc_id: a former name of `soc_model`.
        pd_session: whether the process domain on the DSP runs signed code alone.
        use_client_context: a power context of its own; not from Hexagon v68 on.
    """

    SECTION = "devices"

    device_id: _Size32 | None = None
    soc_model: _Size32 | None = None
    soc_id: _Size32 | None = None
    dsp_arch: Annotated[str, Field(pattern=r"^v\d{2,3}$")] | None = None
    pd_session: Literal["signed", "unsigned"] | None = None
    profiling_level: str | None = None
    use_client_context: bool | None = None
    core_type: _Size32 | None = None
    core_id: tuple[_Size32, ...] | None = None
    cores: tuple[HtpDeviceCoreConfig, ...] | None = None

    def notes(self) -> Iterator[Fault]:
        """Yield profiles that the architecture has not."""
        yield from super().notes()
        for index, core in enumerate(self.cores or ()):
            if self.dsp_arch and (reason := profile_fault(core, int(self.dsp_arch[1:]))):
                yield Fault(("cores", index, "perf_profile"), RULE, reason)


class HtpMemoryConfig(HtpOptions):
    """Memory type of inputs and outputs."""

    SECTION = "memory"

    mem_type: Literal["shared_buffer"] | None = None


class HtpGroupContextConfig(HtpOptions):
    """Options that the contexts of a process share.

    Attributes:
        reused_io_limit_mb: MiB of buffers that their inputs and outputs share.
    """

    SECTION = "groupContext"

    share_resources: bool | None = None
    reused_io_limit_mb: _Size32 | None = None


HTP_KINDS: tuple[type[HtpOptions], ...] = (
    HtpContextConfig,
    HtpGraphConfig,
    HtpDeviceConfig,
    HtpDeviceCoreConfig,
    HtpMemoryConfig,
    HtpGroupContextConfig,
)

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
    def full_key(cls, key: str) -> str:
        """Return the key of an option of cores that is given without them, as `devices.KEY`."""
        section, _, name = key.rpartition(".")
        of_core = name in HtpDeviceCoreConfig.model_fields.keys() - HtpDeviceConfig.model_fields
        return f"devices.cores.{name}" if section == "devices" and of_core else key

    @classmethod
    def list_config_options(cls) -> tuple[str, ...]:
        """Return the dotted keys of every known option."""
        return tuple(key for kind in HTP_KINDS for key in kind.known_options())


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
