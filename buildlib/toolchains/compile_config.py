"""Target and options of a context binary, in the vendor's vocabulary."""

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from buildlib.errors import InvalidOptionError, UnknownOptionError
from buildlib.targets import Target, parse_target
from buildlib.toolchains.htp_extensions import (
    HtpConfigHelper,
    HtpContextConfig,
    HtpDeviceConfig,
    HtpDeviceCoreConfig,
    HtpGraphConfig,
    HtpGroupContextConfig,
    HtpMemoryConfig,
    HtpOptions,
    validated,
)

_DEFAULT_OPTIMIZATION = 3
_Config = TypeVar("_Config", bound=HtpOptions)


class BackendType(StrEnum):
    """Backends that binaries are compiled for."""

    HTP = "HTP"


_BackendField = Annotated[
    BackendType,
    BeforeValidator(
        lambda value: value.removeprefix("BackendType.") if isinstance(value, str) else value
    ),
    PlainSerializer(lambda backend: f"BackendType.{backend.name}", return_type=str),
]
"""Written as in the documented sidecar, `BackendType.HTP`; `HTP` is read too."""
_SocField = Annotated[
    Target,
    BeforeValidator(lambda value: parse_target(value) if isinstance(value, str) else value),
    PlainSerializer(lambda target: f"chipset:{target}", return_type=str),
]


def _default_context(given: dict[str, Any]) -> HtpContextConfig:
    target = given.get("soc_details")
    sharing = target.weight_sharing if isinstance(target, Target) else None
    return HtpContextConfig(weight_sharing_enabled=sharing)


class CompileConfig(BaseModel):
    """Target and compiler options of a context binary.

        CompileConfig(backend="HTP", soc_details="chipset:SM8850")

    `model_dump(mode="json")` and `model_validate` are inverse. An unknown key is an
    `UnknownOptionError`, unless `model_config["extra"]` is `allow`, as the vendor's documentation
    sets it for descriptions of cache entries that hold more.

    Attributes:
        backend: that runs it.
        soc_details: the SoC, written as `chipset:SM8750`; with `:emulator`, its emulator.
        context: by default weights are shared where the target can load such binaries.
        graphs: at most one entry of each name; the one without a name applies to all graphs, for
            options that their own entries leave open.
        section_extras: unknown sections of backend extensions.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    backend: _BackendField = BackendType.HTP
    soc_details: _SocField
    context: HtpContextConfig = Field(default_factory=_default_context)
    graphs: tuple[HtpGraphConfig, ...] = ()
    devices: tuple[HtpDeviceConfig, ...] = ()
    memory: HtpMemoryConfig | None = None
    group_context: HtpGroupContextConfig | None = Field(
        default=None, validation_alias="groupContext", serialization_alias="groupContext"
    )
    section_extras: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _read_strings(cls, data: object) -> object:
        """Take values as a sidecar of the documented layout has them."""
        if not isinstance(data, Mapping):
            return data
        texts = {key: value for key, value in data.items() if isinstance(value, str)}
        read = {key: json.loads(text) for key, text in texts.items() if text[:1] in ("{", "[")}
        return {**data, **read, **{key: None for key, text in texts.items() if text == "None"}}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: object) -> object:
        names = {field.validation_alias or name for name, field in cls.model_fields.items()}
        if isinstance(data, Mapping) and cls.model_config.get("extra") != "allow":
            for key in data.keys() - names - cls.model_fields.keys():
                known = *cls.model_fields, *HtpConfigHelper.list_config_options()
                raise UnknownOptionError(str(key), known)
        return data

    @classmethod
    def for_target(
        cls, target: Target, *, optimization_level: int = _DEFAULT_OPTIMIZATION
    ) -> "CompileConfig":
        """Return defaults for the target: weight sharing where it can run, all VTCM, and speed."""
        return cls(
            soc_details=target,
            context=HtpContextConfig(weight_sharing_enabled=target.weight_sharing),
            graphs=(
                HtpGraphConfig(
                    vtcm_size_in_mb=target.soc.vtcm_mb, optimization_type=optimization_level
                ),
            ),
            devices=(
                HtpDeviceConfig(
                    soc_model=target.soc.soc_model,
                    dsp_arch=target.soc.dsp_arch,
                    cores=(
                        HtpDeviceCoreConfig(
                            core_id=0, perf_profile="burst", rpc_control_latency=100
                        ),
                    ),
                ),
            ),
            memory=HtpMemoryConfig(mem_type="shared_buffer"),
        )

    @classmethod
    def from_backend_extensions(
        cls, extensions: Mapping[str, Any], target: Target
    ) -> "CompileConfig":
        """Overlay parsed backend-extension JSON on the defaults of a target.

        Raises:
            InvalidOptionError: an option has a value it cannot take, there is more than one
                context or device, or the device is another SoC than the target.
        """
        base = cls.for_target(target)
        sections = HtpConfigHelper.from_backend_extension_dict(extensions)
        contexts, graphs, devices, memory, group, extras = sections
        for section, objects in (("context", contexts), ("devices", devices)):
            if len(objects) > 1:
                reason = f"a binary is compiled for one, and here are {len(objects)}"
                raise InvalidOptionError(section, reason, ())
        for device in devices:
            _check_device(device, target)
        return base.model_copy(
            update={
                "context": _overridden(base.context, contexts[0]) if contexts else base.context,
                "graphs": _merged(base.graphs, graphs),
                "devices": tuple(_overridden(base.devices[0], device) for device in devices)
                or base.devices,
                "memory": memory or base.memory,
                "group_context": group,
                "section_extras": extras,
            }
        )

    def to_backend_extensions(self) -> dict[str, Any]:
        """Return the equivalent backend-extension JSON values."""
        return HtpConfigHelper.to_backend_extension_dict(
            (self.context,),
            self.graphs,
            self.devices,
            self.memory,
            self.group_context,
            self.section_extras,
        )

    def with_options(self, options: Mapping[str, object]) -> "CompileConfig":
        """Return a copy with dotted keys set, such as `graphs.vtcm_size_in_mb` for all graphs."""
        config = self
        for key, value in options.items():
            config = config._with_option(key, value)
        return config

    def with_graph_options(
        self, names: Sequence[str], options: Mapping[str, object]
    ) -> "CompileConfig":
        """Return a copy with `graphs.*` keys set for the graphs of these names alone."""
        values = {_field(HtpGraphConfig, key): value for key, value in options.items()}
        entries = tuple(validated(HtpGraphConfig, {**values, "name": name}) for name in names)
        return self.model_copy(update={"graphs": _merged(self.graphs, entries)})

    def graph(self, name: str) -> HtpGraphConfig:
        """Return the options of one graph."""
        entries = {entry.name: entry for entry in self.graphs}
        options = HtpGraphConfig(optimization_type=_DEFAULT_OPTIMIZATION)
        for key in (None, name):
            options = entries[key].with_defaults_from(options) if key in entries else options
        vtcm = options.vtcm_size_in_mb or self.target.soc.vtcm_mb
        return options.model_copy(update={"name": name, "vtcm_size_in_mb": vtcm})

    def compiled_part(self) -> "CompileConfig":
        """Return the options that affect the binary; other changes need no compiling."""
        return CompileConfig(
            backend=self.backend,
            soc_details=self.soc_details,
            context=self.context.compiled_part(),
            graphs=self.graphs,
            section_extras=self.section_extras,
        )

    @property
    def target(self) -> Target:
        """Target that it is compiled for."""
        return self.soc_details

    @property
    def weight_sharing(self) -> bool:
        """True if graphs of one binary keep one copy of equal weights."""
        return bool(self.context.weight_sharing_enabled)

    @property
    def vtcm_mb(self) -> int:
        """Tightly coupled memory, in MiB, that graphs without options of their own plan for."""
        return self.graph("").vtcm_size_in_mb or self.target.soc.vtcm_mb

    @property
    def optimization_level(self) -> int:
        """The compiler's effort, 1 to 3, for graphs without options of their own."""
        return self.graph("").optimization_type or _DEFAULT_OPTIMIZATION

    def as_options(self) -> dict[str, str | int | bool]:
        """Return all set options by dotted key in a fixed order, with the target."""
        options: dict[str, str | int | bool] = {
            "target": str(self.target),
            "soc_model": self.target.soc.soc_model,
            "dsp_arch": self.target.soc.dsp_arch,
        }
        for entry in self.sections():
            name = getattr(entry, "name", None)
            prefix = f"{entry.SECTION}[{name}]" if name else entry.SECTION
            for key, value in entry.model_dump(exclude_none=True, exclude={"name"}).items():
                if isinstance(value, str | int):
                    options[f"{prefix}.{key}"] = value
        return options

    def sections(self) -> Iterator[HtpOptions]:
        """Yield every object of every section, including cores of devices."""
        yield self.context
        yield from self.graphs
        for device in self.devices:
            yield device
            yield from device.cores or ()
        if self.memory is not None:
            yield self.memory
        if self.group_context is not None:
            yield self.group_context

    def _with_option(self, key: str, value: object) -> "CompileConfig":
        key = HtpConfigHelper.full_key(key)
        match key.rpartition(".")[0]:
            case "context":
                update: dict[str, object] = {"context": _set(self.context, key, value)}
            case "graphs":
                update = {"graphs": _merged(self.graphs, [_set(HtpGraphConfig(), key, value)])}
            case "devices":
                device = _set(self.devices[0] if self.devices else HtpDeviceConfig(), key, value)
                _check_device(device, self.target)
                update = {"devices": (device,)}
            case "devices.cores":
                device = self.devices[0] if self.devices else HtpDeviceConfig()
                cores = tuple(
                    _set(core, key, value) for core in device.cores or (HtpDeviceCoreConfig(),)
                )
                update = {"devices": (device.model_copy(update={"cores": cores}),)}
            case "memory":
                update = {"memory": _set(self.memory or HtpMemoryConfig(), key, value)}
            case "groupContext":
                group = self.group_context or HtpGroupContextConfig()
                update = {"group_context": _set(group, key, value)}
            case _:
                raise UnknownOptionError(key, HtpConfigHelper.list_config_options())
        return self.model_copy(update=update)


def _merged(
    graphs: Sequence[HtpGraphConfig], more: Sequence[HtpGraphConfig]
) -> tuple[HtpGraphConfig, ...]:
    """Merge entries of equal names; later options win."""
    entries: dict[str | None, HtpGraphConfig] = {}
    for entry in (*graphs, *more):
        entries[entry.name] = (
            entry.with_defaults_from(entries[entry.name]) if entry.name in entries else entry
        )
    return tuple(entries.values())


def _set(config: _Config, key: str, value: object) -> _Config:
    name = _field(type(config), key)
    return validated(type(config), {**config.model_dump(exclude_unset=True), name: value})


def _field(kind: type[HtpOptions], key: str) -> str:
    """Return the field that a dotted key names, in either spelling."""
    section, _, name = key.rpartition(".")
    fields = {field.validation_alias: name_here for name_here, field in kind.model_fields.items()}
    name = fields.get(name, name)
    if section != kind.SECTION or name not in kind.model_fields or name == "name":
        raise UnknownOptionError(key, kind.known_options())
    return name


def _overridden(base: _Config, over: _Config) -> _Config:
    values = {**base.model_dump(exclude_unset=True), **over.model_dump(exclude_unset=True)}
    return validated(type(base), values)


def _check_device(device: HtpDeviceConfig, target: Target) -> None:
    soc = target.soc
    for name, stated, own in (
        ("soc_model", device.soc_model, soc.soc_model),
        ("dsp_arch", device.dsp_arch, soc.dsp_arch),
    ):
        if stated and stated != own:
            reason = f"it is {stated}, and the target {target} has {own}; set the target instead"
            raise InvalidOptionError(f"devices.{name}", reason, ())
