"""Requirements of a lease, and the members of a pool that meet them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from harness.errors import RequirementError
from harness.pool.status import MemberStatus


@dataclass(frozen=True, slots=True)
class Requirement:
    """Requirement that the devices of a lease must meet; `None` and empty fields mean any.

    Attributes:
        soc: e.g. `SM8750`.
        hexagon: Hexagon architecture, e.g. `v79`.
        name: name of one member of the pool.
        tags: the device must have all of them.
        min_free_bytes: free space under the work root of the device.
        count: number of devices, all or none.
    """

    soc: str | None = None
    hexagon: str | None = None
    type: str | None = None
    name: str | None = None
    tags: frozenset[str] = field(default_factory=frozenset)
    min_free_bytes: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("at least one device")

    def __str__(self) -> str:
        facts = [(key, getattr(self, key)) for key in ("soc", "hexagon", "type", "name")]
        words = [f"{key}={value}" for key, value in facts if value is not None]
        words += [f"tag={tag}" for tag in sorted(self.tags)]
        if self.min_free_bytes:
            words.append(f"free>={self.min_free_bytes}")
        if self.count > 1:
            words.append(f"count={self.count}")
        return " ".join(words) or "any device"


def candidates(requirement: Requirement, members: Sequence[MemberStatus]) -> list[MemberStatus]:
    """Return the members that meet a requirement, now or once they are free or back.

    Members with the fewest tags come first, so that a request for any device leaves the special
    ones to others.

    Raises:
        RequirementError: fewer than `requirement.count` could ever meet it; names the part at
            fault.
    """
    fits = list(members)
    for part, meets, describe in _parts(requirement):
        others, fits = fits, [member for member in fits if meets(member)]
        if len(fits) < requirement.count:
            raise RequirementError(
                str(requirement), _why(part, requirement, others, fits, describe)
            )
    return sorted(fits, key=lambda member: len(member.tags))


_Describe = Callable[[MemberStatus], str]


def _parts(
    wanted: Requirement,
) -> Iterable[tuple[str, Callable[[MemberStatus], bool], _Describe]]:
    if wanted.name is not None:
        yield f"the name {wanted.name}", lambda m: m.name == wanted.name, lambda m: m.name
    if wanted.type is not None:
        yield (
            f"the type {wanted.type}",
            lambda m: m.spec.type == wanted.type,
            lambda m: m.spec.type,
        )
    # A device that never answered may meet it: its facts are unknown.
    if wanted.soc is not None:
        yield (
            f"the SoC {wanted.soc}",
            lambda m: not _has_facts(m) or m.soc == wanted.soc,
            lambda m: m.soc or "unknown",
        )
    if wanted.hexagon is not None:
        yield (
            f"the Hexagon architecture {wanted.hexagon}",
            lambda m: not _has_facts(m) or m.hexagon == wanted.hexagon,
            lambda m: m.hexagon or "unknown",
        )
    for tag in sorted(wanted.tags):
        yield (
            f"the tag {tag}",
            lambda m, tag=tag: tag in m.tags,  # type: ignore[misc]
            lambda m: " ".join(sorted(m.tags)) or "no tags",
        )
    if wanted.min_free_bytes:
        yield (
            f"{wanted.min_free_bytes:,} free bytes",
            lambda m: m.free_bytes is None or m.free_bytes >= wanted.min_free_bytes,
            lambda m: f"{m.free_bytes or 0:,}",
        )
    yield f"a count of {wanted.count}", lambda _: True, lambda m: m.name


def _has_facts(member: MemberStatus) -> bool:
    return bool(member.soc or member.hexagon or member.free_bytes is not None)


def _why(
    part: str,
    requirement: Requirement,
    members: Sequence[MemberStatus],
    fits: Sequence[MemberStatus],
    describe: _Describe,
) -> str:
    if not members:
        return "the pool has no devices"
    if fits:
        names = ", ".join(member.name for member in fits)
        return f"{requirement.count} with {part} are wanted, there are {len(fits)} ({names})"
    others = ", ".join(f"{member.name}: {describe(member)}" for member in members[:8])
    more = f" and {len(members) - 8} more" if len(members) > 8 else ""
    return f"none has {part} ({others}{more})"
