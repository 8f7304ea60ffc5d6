"""The devices of a pool, as its configuration names them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from harness.devices.spec import DeviceSpec
from harness.errors import DeviceSpecError, PoolConfigError
from harness.pool.config import DeviceEntry, PoolConfig, name_of


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
        PoolConfigError: one that is found has the name of another.
    """
    taken = {entry.spec for entry in config.devices}
    names = {entry.name or name_of(entry.spec) for entry in config.devices if entry.spec}
    members: list[Member] = []
    for number, entry in enumerate(config.devices):
        if entry.spec is not None:
            name = entry.name or name_of(entry.spec)
            members.append(Member(name, entry.spec, entry.tags, entry.soc, entry.power_cycle))
            continue
        for spec in discover(entry):
            if spec in taken or spec.identifier in entry.exclude or spec.serial in entry.exclude:
                continue
            name = name_of(spec)
            if name in names:
                reason = f"it finds {spec}, and another device is named {name}: give that another"
                raise PoolConfigError(where, None, f"devices[{number}]", reason)
            taken.add(spec)
            names.add(name)
            members.append(Member(name, spec, entry.tags, power_cycle=entry.power_cycle))
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
        members.append(Member(name_of(spec), spec))
    return members
