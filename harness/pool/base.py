"""The words of the pool: what may be asked for, and in what state a device can be."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from harness.devices.spec import DeviceSpec, DeviceType

Tell = Callable[[str], None]
"""Is told in words what is done, and how it went."""


def silent(_: str) -> None:
    """Nobody is told."""


class MemberState(StrEnum):
    """The state of a device in a pool; each has a reason, and an exit that the ledger knows."""

    READY = "ready"
    LEASED = "leased"
    DRAINING = "draining"
    """No new leases, by a person's wish; ends with `undrain`."""
    RECOVERING = "recovering"
    """It failed; the steps of recovery are being tried."""
    QUARANTINED = "quarantined"
    """Its evidence says that results from it cannot be trusted; ends with a probation run."""
    PROBATION = "probation"
    """A run decides whether it is ready again."""
    ABSENT = "absent"
    """It is not there; it is looked for again."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a lease is asked for; what is `None` or empty may be anything.

    Attributes:
        soc: e.g. `SM8750`.
        hexagon: Hexagon architecture, e.g. `v79`.
        name: one member of the pool, by its name.
        tags: all of which it must have.
        min_free_bytes: under its work root.
        count: that many devices, all or none.
    """

    soc: str | None = None
    hexagon: str | None = None
    type: DeviceType | None = None
    name: str | None = None
    tags: frozenset[str] = field(default_factory=frozenset)
    min_free_bytes: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("at least one device")

    def __str__(self) -> str:
        words = [
            f"{key}={value}"
            for key, value in (
                ("soc", self.soc),
                ("hexagon", self.hexagon),
                ("type", self.type),
                ("name", self.name),
            )
            if value is not None
        ]
        words += [f"tag={tag}" for tag in sorted(self.tags)]
        if self.min_free_bytes:
            words.append(f"free>={self.min_free_bytes}")
        if self.count > 1:
            words.append(f"count={self.count}")
        return " ".join(words) or "any device"


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A device of the pool as it is now.

    Attributes:
        name: by which the pool knows it; unique there.
        reason: why it is in this state, for people.
        since: seconds since 1970 at which it came into this state.
        holder: who holds its lease, for people; empty for nobody.
        token: fencing token of that lease.
        failures: what counts against it: the heaviest of each lease, newest last, for people.
        weight: what they come to; `limit` brings quarantine.
        seen: what speaks against `state`, without having asked the device: nobody has looked at
            it yet, or its virtual device does not run; empty: nothing.
    """

    name: str
    spec: DeviceSpec
    tags: frozenset[str]
    state: MemberState
    reason: str
    since: float
    holder: str = ""
    token: int | None = None
    soc: str = ""
    hexagon: str = ""
    free_bytes: int | None = None
    failures: tuple[str, ...] = ()
    weight: float = 0.0
    limit: float = 0.0
    seen: str = ""
