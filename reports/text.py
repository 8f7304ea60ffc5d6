"""Text from anywhere, made fit for a page that people read."""

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType

from harness.results.records import Condition, ContainerInfo, JsonScalar, Positions

POSITIONS: Mapping[Positions, str] = MappingProxyType(
    {
        "first_cl_minus_ar": "first CL \N{MINUS SIGN} AR of each window",
        "all": "all of each window",
    }
)
"""Which positions of a window a perplexity scores, in words."""
LONGEST_TEXT = 20_000
"""Characters of one text that a report shows; the store keeps the rest."""


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, or its start with the number of characters that were cut."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}\n[… {len(text) - longest:,} more characters are in the database]"


def moment(value: datetime) -> str:
    """A moment to the minute, in UTC."""
    return f"{value.day} {value:%b %Y, %H:%M} UTC"


def short_time(value: datetime) -> str:
    """A moment where there is little room."""
    return f"{value.day} {value:%b %H:%M}"


def day(value: datetime) -> str:
    """The day of a moment."""
    return f"{value.day} {value:%B %Y}"


def percent(value: float) -> str:
    """A signed difference, to a tenth of a percent or two digits below one."""
    decimals = 1 if abs(value) >= 0.1 else 2
    return f"{value * 100:+.{decimals}f}%".replace("-", "\N{MINUS SIGN}")


def graphs(container: ContainerInfo) -> str:
    """Bits and shapes of a container's graphs: `W4A16, AR 1, 32, CL 192`."""
    shapes = f"AR {', '.join(map(str, container.ars))}, CL {container.cl}"
    return f"{container.precision}, {shapes}" if container.precision else shapes


def condition(record: Condition) -> str:
    """A condition of a run in words: `met after 12 s, 41.0 to 34.8: cool enough`."""
    told = str(record.get("outcome") or "")
    waited = record.get("waited_s")
    if isinstance(waited, int | float) and waited >= 0.05:
        told += f" after {waited:.1f} s"
    before, after = record.get("before"), record.get("after")
    if before is not None or after is not None:
        told += (
            f", {_scalar(before)} to {_scalar(after)}" if before != after else f", {_scalar(after)}"
        )
    reason = record.get("reason")
    return f"{told}: {reason}" if reason else told


def _scalar(value: JsonScalar) -> str:
    if value is None:
        return "unknown"
    return f"{value:g}" if isinstance(value, float) else str(value)


def positions(scored: Positions) -> str:
    """The scored positions in words."""
    return POSITIONS[scored]


def listing(names: tuple[str, ...]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
