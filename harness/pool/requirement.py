"""Requirements of a lease, and the members of a pool that meet them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from harness.errors import RequirementError
from harness.pool.status import MemberStatus


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
    type: str | None = None
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


def candidates(requirement: Requirement, members: Sequence[MemberStatus]) -> list[MemberStatus]:
    """The members that would do once they are free, or once they are back.

    Those with little that would also serve others come first: a request for any device takes
    the one with the fewest tags.

    Raises:
        RequirementError: fewer than `requirement.count` could ever do; says which part is not met.
    """
    left = list(members)
    for part, meets, what in _parts(requirement):
        fits = [member for member in left if meets(member)]
        if len(fits) < requirement.count:
            raise RequirementError(str(requirement), _why(part, requirement, left, fits, what))
        left = fits
    return sorted(left, key=lambda member: len(member.tags))


_Meets = Callable[[MemberStatus], bool]
_What = Callable[[MemberStatus], str]


def _parts(wanted: Requirement) -> Iterable[tuple[str, _Meets, _What]]:
    if wanted.name is not None:
        yield f"the name {wanted.name}", lambda m: m.name == wanted.name, lambda m: m.name
    if wanted.type is not None:
        yield f"the type {wanted.type}", lambda m: m.spec.type == wanted.type, _type
    # What a device that was never there is, nobody knows: it may do.
    if wanted.soc is not None:
        soc = wanted.soc
        yield f"the SoC {soc}", lambda m: not _known(m) or m.soc == soc, _soc
    if wanted.hexagon is not None:
        arch = wanted.hexagon
        yield (
            f"the Hexagon architecture {arch}",
            lambda m: not _known(m) or m.hexagon == arch,
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


def _type(member: MemberStatus) -> str:
    return member.spec.type


def _soc(member: MemberStatus) -> str:
    return member.soc or "unknown"


def _known(member: MemberStatus) -> bool:
    return bool(member.soc or member.hexagon or member.free_bytes is not None)


def _why(
    part: str,
    requirement: Requirement,
    left: Sequence[MemberStatus],
    fits: Sequence[MemberStatus],
    what: _What,
) -> str:
    if not left:
        return "the pool has no devices"
    if fits:
        names = ", ".join(member.name for member in fits)
        return f"{requirement.count} with {part} are wanted, there are {len(fits)} ({names})"
    there = ", ".join(f"{member.name}: {what(member)}" for member in left[:8])
    more = f" and {len(left) - 8} more" if len(left) > 8 else ""
    return f"none has {part} ({there}{more})"
