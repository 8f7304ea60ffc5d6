"""Configuration of a pool in `pool.yaml`: its schema, and reading it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from buildlib.targets import soc_named, suggest_socs
from harness.devices.spec import DeviceSpec, check_type_name
from harness.errors import WrongUseError
from harness.pool.failure_policy import backoff
from harness.yaml_files import YamlFile, read_yaml

_PLACEHOLDER = re.compile(r"\{\w+\}")

PLACEHOLDERS = ("name", "serial", "key")
"""Placeholders of a `power_cycle` command."""


def _as_text(account: object) -> object:
    """Take a number without quotation marks, too."""
    return str(account) if type(account) is int else account


Name = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._:@%\[\]-]{0,127}$", strict=True)
]
Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$", strict=True)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=r"^[^\x00]*$")]
Account = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"), BeforeValidator(_as_text)
]
"""A user of this host, by name or number."""
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
StepName = Literal["reconnect", "adb_server", "reboot", "power_cycle"]
NoticeKind = Literal["quarantined", "absent", "plan_finished"]

STEPS: tuple[StepName, ...] = ("reconnect", "adb_server", "reboot", "power_cycle")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _fillable(words: tuple[str, ...] | None) -> tuple[str, ...] | None:
    names = [f"{{{name}}}" for name in PLACEHOLDERS]
    for word in words or ():
        if wrong := next((p for p in _PLACEHOLDER.findall(word) if p not in names), None):
            raise ValueError(f"there is no {wrong}, but {', '.join(names)}")
    return words


class DeviceEntry(_Model):
    """One device, or a discovery of devices.

    Attributes:
        discover: `adb`: all devices of the adb server (`host`'s, if given); `virtual`: all
            virtual devices of this user.
        exclude: identifiers that discovery leaves out.
        soc: SoC with which a virtual device is made if none has its name.
    """

    name: Name | None = None
    type: Annotated[str, AfterValidator(check_type_name)] | None = None
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
        if soc is None:
            return None
        if (entry := soc_named(soc)) is None:
            raise ValueError(f"there is no SoC {soc!r}: {suggest_socs(soc)}")
        return entry.name

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.discover is None) == (self.type is None):
            raise ValueError("give either `type` (and `identifier`) or `discover`")
        if self.discover is None and (self.host or self.exclude):
            raise ValueError("`host` and `exclude` go with `discover`")
        if self.discover == "virtual" and self.host:
            raise ValueError("virtual devices are on this host")
        if self.host:
            check_type_name("linux")
        if self.discover == "virtual":
            check_type_name("virtual")
        if self.discover and (self.name or self.identifier or self.soc):
            raise ValueError("devices that are found have names, identifiers and SoCs of their own")
        if self.soc and self.type != "virtual":
            raise ValueError("`soc` is for virtual devices; others say it themselves")
        if self.type is not None:
            try:
                DeviceSpec(self.type, self.identifier)
            except WrongUseError as error:
                raise ValueError(str(error)) from None
        return self

    @property
    def spec(self) -> DeviceSpec | None:
        """The device; `None` for a discovery."""
        return None if self.type is None else DeviceSpec(self.type, self.identifier)


class HostConfig(_Model):
    """A host with devices, reached through SSH.

    Attributes:
        adb_port: of its adb server; by default that of `~/.ssh/config`, by
            `SetEnv ANDROID_ADB_SERVER_PORT=...`, else 5037.
        adb_server_ours: whether that server may be restarted.
    """

    adb_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    adb_server_ours: bool = False


class AdbServerConfig(_Model):
    """The adb server of this host.

    Attributes:
        ours: whether it may be restarted, as nobody else's devices hang on it.
        trusted_users: names or numbers of accounts with a server that is used beside this user's
            and root's. It sees all that goes to its devices, and can answer in their place.
    """

    ours: bool = False
    trusted_users: tuple[Account, ...] = ()


class _Backoff(_Model):
    """Time to wait after a failure, doubled each time up to `max_backoff_s`."""

    backoff_s: Seconds
    max_backoff_s: Seconds

    def backoff(self, failures: int) -> float:
        """Return the seconds to wait after that many failures."""
        return backoff(self.backoff_s, self.max_backoff_s, failures)


class RecoveryConfig(_Backoff):
    """Recovery of devices that failed: its steps in order, and its back-off.

    Attributes:
        power_cycle: program and arguments, run without a shell; `{name}`, `{serial}` and `{key}`
            in them become the device's.
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


class QuarantineConfig(_Backoff):
    """Limit of the weight of failures that brings quarantine, and the time to a probation run.

    That is doubled by each run that fails, and each return.
    """

    limit: Annotated[float, Field(gt=0, le=1000)] = 3.0
    backoff_s: Seconds = 60.0
    max_backoff_s: Seconds = 3600.0


class ReceiverConfig(_Model):
    """A command that takes notifications.

    Attributes:
        command: program and arguments, run without a shell; the notification is on its stdin.
    """

    command: Annotated[tuple[Word, ...], Field(min_length=1)]
    timeout_s: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = 10.0


class NotificationConfig(ReceiverConfig):
    """One receiver of a pool's notifications, and the kinds of events that it is told of."""

    events: frozenset[NoticeKind] = frozenset({"quarantined", "absent", "plan_finished"})


class LeaseConfig(_Model):
    """Limits of leases, and the priority of the requests that use the file.

    Attributes:
        ttl_s: how long a heartbeat is valid: a process that sleeps longer loses its leases.
    """

    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    ttl_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = 30.0
    claim_timeout_s: Seconds = 60.0


class PoolConfig(_Model):
    """Content of a `pool.yaml`.

    Attributes:
        ledger: a SQLite file, or the URL of a database in PostgreSQL that several hosts share.
    """

    devices: tuple[DeviceEntry, ...] = (DeviceEntry(discover="adb"),)
    hosts: dict[Name, HostConfig] = Field(default_factory=dict)
    ledger: Word | None = None
    adb_server: AdbServerConfig = AdbServerConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    quarantine: QuarantineConfig = QuarantineConfig()
    lease: LeaseConfig = LeaseConfig()
    notifications: Annotated[tuple[NotificationConfig, ...], Field(max_length=20)] = ()

    @field_validator("devices")
    @classmethod
    def _some(cls, devices: tuple[DeviceEntry, ...]) -> tuple[DeviceEntry, ...]:
        if not devices:
            raise ValueError("name a device, or let some be discovered")
        if len(devices) > 10_000:
            raise ValueError("more than 10,000 entries")
        return devices


def default_name(spec: DeviceSpec) -> str:
    """Return the name of a device that was given none."""
    return spec.identifier or spec.type


SocOf = Callable[[DeviceSpec], str | None]
"""Gives the SoC of a device that exists, if it is known."""


def load_config(path: Path, *, soc_of: SocOf = lambda _: None) -> PoolConfig:
    """Read a `pool.yaml`; errors name the line and the key."""
    return parse_config(read_yaml(path), str(path), soc_of=soc_of)


def parse_config(
    text: str, where: str = "pool.yaml", *, soc_of: SocOf = lambda _: None
) -> PoolConfig:
    """Read the text of a `pool.yaml`; see `load_config`."""
    file = YamlFile(where, text, PoolConfig)
    config = file.content
    names: set[str] = set()
    specs: set[DeviceSpec] = set()
    for number, entry in enumerate(config.devices):
        if (spec := entry.spec) is None:
            continue
        name = entry.name or default_name(spec)
        if spec in specs:
            raise file.error(("devices", number), f"{spec} is given twice")
        if name in names:
            reason = f"two devices are named {name}: give one another `name`"
            raise file.error(("devices", number), reason)
        names.add(name)
        specs.add(spec)
        soc = soc_of(spec) if entry.soc else None
        if soc is not None and soc != entry.soc:
            name = entry.identifier
            reason = (
                f"virtual device {name} exists with SoC {soc}, not {entry.soc}: choose another "
                f"name, or `qnnfarm device rm {name}` first"
            )
            raise file.error(("devices", number, "soc"), reason)
    return config
