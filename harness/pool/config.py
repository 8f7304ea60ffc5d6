"""`pool.yaml`: which devices a pool has, and what may be done to them."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from buildlib.errors import UnknownSocError
from buildlib.targets import find_soc
from harness.devices.spec import DeviceSpec, DeviceType
from harness.errors import DeviceSpecError, PoolConfigError, VirtualDeviceChangeError
from harness.pool.evidence import QuarantineRule
from harness.pool.wording import reason, together

_MOST_BYTES = 1 << 20
_DEEPEST = 20
_WHOLE = "the pool"
_PLACEHOLDER = re.compile(r"\{\w+\}")
_OF_TEXTS = {"exclude", "tags", "power_cycle", "steps"}

PLACEHOLDERS = ("name", "serial", "key")
"""What `{...}` in a `power_cycle` may be."""

Name = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._:@%\[\]-]{0,127}$", strict=True)
]
Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$", strict=True)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=r"^[^\x00]*$")]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
StepName = Literal["reconnect", "adb_server", "reboot", "power_cycle"]

STEPS: tuple[StepName, ...] = ("reconnect", "adb_server", "reboot", "power_cycle")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _fillable(words: tuple[str, ...] | None) -> tuple[str, ...] | None:
    known = [f"{{{name}}}" for name in PLACEHOLDERS]
    for word in words or ():
        if wrong := next((p for p in _PLACEHOLDER.findall(word) if p not in known), None):
            raise ValueError(f"there is no {wrong}, but {', '.join(known)}")
    return words


class DeviceEntry(_Model):
    """One device, or those that are found.

    Attributes:
        discover: `adb`: all devices of the adb server (`host`'s, if given); `virtual`: all
            virtual devices of this user.
        exclude: identifiers that are found but not wanted.
        soc: of a virtual device that is to be made if there is none of that name.
    """

    name: Name | None = None
    type: DeviceType | None = None
    identifier: Annotated[str, StringConstraints(max_length=400)] = ""
    discover: Literal["adb", "virtual"] | None = None
    host: Name | None = None
    exclude: tuple[str, ...] = ()
    tags: frozenset[Tag] = frozenset()
    soc: Tag | None = None
    power_cycle: tuple[Word, ...] | None = None

    _fillable = field_validator("power_cycle")(_fillable)

    @field_validator("soc")
    @classmethod
    def _in_the_catalog(cls, soc: str | None) -> str | None:
        try:
            return None if soc is None else find_soc(soc).name
        except UnknownSocError as error:
            hint = f"did you mean {error.near}? " if error.near else ""
            known = ", ".join(error.known)
            raise ValueError(f"there is no SoC {error.name!r}: {hint}known are {known}") from None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.discover is None) == (self.type is None):
            raise ValueError("give either `type` (and `identifier`) or `discover`")
        if self.discover is None and (self.host or self.exclude):
            raise ValueError("`host` and `exclude` go with `discover`")
        if self.discover == "virtual" and self.host:
            raise ValueError("virtual devices are on this host")
        if self.discover and (self.name or self.identifier or self.soc):
            raise ValueError("devices that are found have names, identifiers and SoCs of their own")
        if self.soc and self.type != "virtual":
            raise ValueError("`soc` is for virtual devices; others say it themselves")
        if self.type is not None:
            try:
                DeviceSpec(self.type, self.identifier)
            except DeviceSpecError as error:
                raise ValueError(str(error)) from None
        return self

    @property
    def spec(self) -> DeviceSpec | None:
        """The device that is named; `None` for those that are found."""
        return None if self.type is None else DeviceSpec(self.type, self.identifier)


class HostConfig(_Model):
    """A host whose devices are reached through SSH.

    Attributes:
        adb_port: on which its adb server listens; by default what `~/.ssh/config` says by
            `SetEnv ANDROID_ADB_SERVER_PORT=...`, else 5037.
        adb_server_ours: whether that server may be restarted.
    """

    adb_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    adb_server_ours: bool = False


class AdbServerConfig(_Model):
    """The adb server of this host; `ours`: it may be restarted, as nobody else's hang on it."""

    ours: bool = False


class RecoveryConfig(_Model):
    """What is tried with a device that failed, in which order, and how often.

    Attributes:
        power_cycle: program and arguments, run without a shell; `{name}`, `{serial}` and `{key}`
            in them become the device's.
        backoff_s: after a recovery that failed, doubled each time up to `max_backoff_s`.
    """

    steps: tuple[StepName, ...] = STEPS
    power_cycle: tuple[Word, ...] = ()
    backoff_s: Seconds = 10.0
    max_backoff_s: Seconds = 900.0
    reboot_timeout_s: Seconds = 300.0
    power_cycle_timeout_s: Seconds = 60.0
    return_timeout_s: Seconds = 30.0

    _fillable = field_validator("power_cycle")(_fillable)

    @field_validator("steps")
    @classmethod
    def _once(cls, steps: tuple[StepName, ...]) -> tuple[StepName, ...]:
        if len(set(steps)) < len(steps):
            raise ValueError("a step is given twice")
        return steps

    def backoff(self, attempts: int) -> float:
        """Seconds to wait after that many failures."""
        return min(self.backoff_s * 2.0 ** min(attempts, 30), self.max_backoff_s)


class QuarantineConfig(_Model):
    """When evidence is enough, and how long a device is out before a probation run.

    Attributes:
        backoff_s: doubled by each probation that fails and each return, up to `max_backoff_s`.
    """

    limit: Annotated[float, Field(gt=0, le=1000)] = 3.0
    window: Annotated[int, Field(ge=1, le=1000)] = 10
    backoff_s: Seconds = 60.0
    max_backoff_s: Seconds = 3600.0

    @property
    def rule(self) -> QuarantineRule:
        """The same for the ledger."""
        return QuarantineRule(self.limit, self.window, self.backoff_s, self.max_backoff_s)


class LeaseConfig(_Model):
    """How long a heartbeat is good for: a process that sleeps longer loses its leases."""

    ttl_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = 30.0
    claim_timeout_s: Seconds = 60.0


class PoolConfig(_Model):
    """A pool, as its file says."""

    devices: tuple[DeviceEntry, ...] = (DeviceEntry(discover="adb"),)
    hosts: dict[Name, HostConfig] = Field(default_factory=dict)
    adb_server: AdbServerConfig = AdbServerConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    quarantine: QuarantineConfig = QuarantineConfig()
    lease: LeaseConfig = LeaseConfig()

    @field_validator("devices")
    @classmethod
    def _some(cls, devices: tuple[DeviceEntry, ...]) -> tuple[DeviceEntry, ...]:
        if not devices:
            raise ValueError("name a device, or let some be discovered")
        if len(devices) > 10_000:
            raise ValueError("more than 10,000 entries")
        return devices


def name_of(spec: DeviceSpec) -> str:
    """What a device is called that was given no name."""
    return spec.identifier or spec.type


def _of_any(_: str) -> None:
    """Nothing is known of any virtual device."""


def load_config(path: Path, *, soc_of: Callable[[str], str | None] = _of_any) -> PoolConfig:
    """Read a pool's file.

    Args:
        soc_of: the SoC of the virtual device of that name, if there is one.

    Raises:
        PoolConfigError: it cannot be read or used; names the line and the key.
    """
    where = str(path)
    try:
        with path.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise PoolConfigError(where, None, "", "it is longer than 1 MiB")
        text = content.decode("utf-8")
    except OSError as error:
        raise PoolConfigError(where, None, "", error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise PoolConfigError(where, None, "", f"it is no UTF-8: {error.reason}") from None
    return parse_config(text, where, soc_of=soc_of)


def parse_config(
    text: str, where: str = "pool.yaml", *, soc_of: Callable[[str], str | None] = _of_any
) -> PoolConfig:
    """Read the text of a pool's file; see `load_config`.

    Raises:
        PoolConfigError: it cannot be used.
    """
    root = _node(text, where)
    try:
        value: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise PoolConfigError(where, None, "", str(error)) from None
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise PoolConfigError(where, 1, "", "it is no mapping of keys: see docs/pool.md")
    try:
        config = PoolConfig.model_validate(value)
    except ValidationError as error:
        places = [
            (*_place(root, found["loc"]), reason(found, _OF_TEXTS))
            for found in error.errors(include_url=False, include_input=False)
        ]
        line, key, first = places[0]
        others = [
            f"{f'line {at}, ' if at else ''}{where or _WHOLE}: {said}"
            for at, where, said in dict.fromkeys(places)
            if (at, where, said) != places[0]
        ]
        raise PoolConfigError(where, line, key or _WHOLE, together(first, others)) from None
    if twice := _given_twice(config.devices):
        number, said = twice
        line, key = _place(root, ("devices", number))
        raise PoolConfigError(where, line, key, said)
    for number, entry in enumerate(config.devices):
        made_with = None if entry.soc is None else soc_of(entry.identifier)
        if made_with is not None and made_with != entry.soc:
            line, key = _place(root, ("devices", number, "soc"))
            other = VirtualDeviceChangeError(entry.identifier, "SoC", made_with, str(entry.soc))
            raise PoolConfigError(where, line, key, str(other))
    return config


def _given_twice(entries: Sequence[DeviceEntry]) -> tuple[int, str] | None:
    """The first entry whose name or device another before it has, and which of the two."""
    names: set[str] = set()
    specs: set[DeviceSpec] = set()
    for number, entry in enumerate(entries):
        if (spec := entry.spec) is None:
            continue
        name = entry.name or name_of(spec)
        if spec in specs:
            return number, f"{spec} is given twice"
        if name in names:
            return number, f"two devices are named {name}: give one another `name`"
        names.add(name)
        specs.add(spec)
    return None


def _node(text: str, where: str) -> yaml.Node | None:
    """The tree of the file, which knows lines; aliases and merge keys are refused."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:  # deeper ones take PyYAML minutes
                raise PoolConfigError(where, None, "", "it is nested too deeply")
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1 if event.start_mark else None
                raise PoolConfigError(where, line, "", "aliases (`*name`) are not supported")
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_twice(node, where)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = None if mark is None else mark.line + 1
        raise PoolConfigError(where, line, "", error.problem or "it is no YAML") from None
    except yaml.YAMLError as error:
        raise PoolConfigError(where, None, "", str(error)) from None
    except RecursionError:
        raise PoolConfigError(where, None, "", "it is nested too deeply") from None
    return node


def _refuse_twice(node: yaml.Node | None, where: str) -> None:
    """A key given twice would silently lose one of its values."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                line = key.start_mark.line + 1
                raise PoolConfigError(where, line, name, "the key is given twice")
            seen.add(name)
            _refuse_twice(value, where)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_twice(value, where)


def _place(root: yaml.Node | None, location: tuple[int | str, ...]) -> tuple[int | None, str]:
    """Line and path of what pydantic complains of, as near as the tree leads."""
    node, line, path = root, None if root is None else root.start_mark.line + 1, ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]":
            path += f".{step}" if path else str(step)
        found: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == step:
                    found, line = value, key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            found = node.value[step] if step < len(node.value) else None
            line = line if found is None else found.start_mark.line + 1
        node = found
    return line, path
