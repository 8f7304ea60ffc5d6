"""The devices of a pool, as its configuration names them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from harness.devices.spec import DeviceSpec
from harness.errors import DeviceSpecError, PoolConfigError
from harness.pool.config import DeviceEntry, PoolConfig


@dataclass(frozen=True, slots=True)
class Member:
    """A device of a pool, whether it is there or not.

    Attributes:
        name: unique in the pool.
        soc: of a virtual device that may be made.
        power_cycle: its own command, where it has one.
    """

    name: str
    spec: DeviceSpec
    tags: frozenset[str] = field(default_factory=frozenset)
    soc: str | None = None
    power_cycle: tuple[str, ...] | None = None


Discover = Callable[[DeviceEntry], Sequence[DeviceSpec]]


def members_of(config: PoolConfig, discover: Discover, where: str) -> list[Member]:
    """All devices of a pool, in the order of its file; what is named there is not found again.

    Raises:
        PoolConfigError: two devices would have one name, or are the same.
    """
    named = [_named(entry) for entry in config.devices if entry.discover is None]
    taken = {member.spec for member in named}
    members: list[Member] = []
    for entry in config.devices:
        if entry.discover is None:
            members.append(named.pop(0))
            continue
        for spec in discover(entry):
            if spec in taken or spec.identifier in entry.exclude or spec.serial in entry.exclude:
                continue
            taken.add(spec)
            members.append(Member(_name(spec), spec, entry.tags, power_cycle=entry.power_cycle))
    _refuse_twice(members, where)
    return members


def members_from(specs: Iterable[DeviceSpec]) -> list[Member]:
    """A pool of just these devices.

    Raises:
        DeviceSpecError: one is given twice.
    """
    members: list[Member] = []
    for spec in specs:
        if any(member.spec == spec for member in members):
            raise DeviceSpecError(str(spec), "it is given twice")
        members.append(Member(_name(spec), spec))
    return members


def _named(entry: DeviceEntry) -> Member:
    assert entry.type is not None  # noqa: S101 - the model made sure
    spec = DeviceSpec(entry.type, entry.identifier)
    return Member(entry.name or _name(spec), spec, entry.tags, entry.soc, entry.power_cycle)


def _name(spec: DeviceSpec) -> str:
    return spec.identifier or spec.type


def _refuse_twice(members: Sequence[Member], where: str) -> None:
    names: set[str] = set()
    specs: set[DeviceSpec] = set()
    for member in members:
        if member.name in names:
            reason = f"two devices are named {member.name}: give one another `name`"
            raise PoolConfigError(where, None, "devices", reason)
        if member.spec in specs:
            raise PoolConfigError(where, None, "devices", f"{member.spec} is given twice")
        names.add(member.name)
        specs.add(member.spec)
