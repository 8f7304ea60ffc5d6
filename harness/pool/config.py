"""`pool.yaml`: which devices a pool has, and what may be done to them."""

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

from harness.devices.spec import DeviceSpec, DeviceType
from harness.errors import DeviceSpecError, PoolConfigError

_MOST_BYTES = 1 << 20
_DEEPEST = 20
_WHOLE = "the pool"

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
    """When evidence is enough, and how long the probation runs lie apart at first."""

    limit: Annotated[float, Field(gt=0, le=1000)] = 3.0
    window: Annotated[int, Field(ge=1, le=1000)] = 10
    backoff_s: Seconds = 60.0
    max_backoff_s: Seconds = 3600.0

    def backoff(self, attempts: int) -> float:
        """Seconds to wait after that many failures."""
        return min(self.backoff_s * 2.0 ** min(attempts, 30), self.max_backoff_s)


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
        names = [entry.name for entry in devices if entry.name]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two devices are named {twice}")
        return devices


def load_config(path: Path) -> PoolConfig:
    """Read a pool's file.

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
    return parse_config(text, where)


def parse_config(text: str, where: str = "pool.yaml") -> PoolConfig:
    """Read the text of a pool's file.

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
        return PoolConfig.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        line, key = _place(root, first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise PoolConfigError(where, line, key or _WHOLE, reason) from None


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
