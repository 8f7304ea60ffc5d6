"""Texts and values formatted for readers."""

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType

from harness.results.identity import container_shape
from harness.results.records import Condition, ContainerInfo, JsonScalar, Positions

POSITIONS: Mapping[Positions, str] = MappingProxyType(
    {
        "first_cl_minus_ar": "first CL \N{MINUS SIGN} AR of each window",
        "draft_first_cl_minus_ar": "draft model: first CL \N{MINUS SIGN} AR of each window",
        "no_bos_first_cl_minus_ar": "first CL \N{MINUS SIGN} AR after the first of each window",
        "draft_no_bos_first_cl_minus_ar": (
            "draft model: first CL \N{MINUS SIGN} AR after the first of each window"
        ),
        "second_half": "second half of each window",
        "decode_steps": "decode steps in the second half of each window",
        "all": "all of each window",
    }
)
"""The scored positions of a window, in words."""
LONGEST_TEXT = 20_000
"""Most characters of one text in a report; the store keeps the rest."""


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    """Cut a long text, and append the number of characters that were cut."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}\n[… {len(text) - longest:,} more characters are in the database]"


def moment(value: datetime) -> str:
    """Format a time to the minute: `2026-11-20 09:30 UTC`."""
    return f"{short_time(value)} UTC"


def short_time(value: datetime) -> str:
    """Format a time to the minute, in UTC, where the words beside it say so."""
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M}"


def day(value: datetime) -> str:
    """Format the day of a time: `2026-11-20`."""
    return f"{value:%Y-%m-%d}"


def graphs(container: ContainerInfo) -> str:
    """Describe a container's graphs: `W4A16, AR 1, 32, CL 192`."""
    shape = container_shape(container)
    return f"{container.precision}, {shape}" if container.precision else shape


def condition(record: Condition) -> str:
    """Describe a condition of a run: `met after 12 s, 41.0 to 34.8: cool enough`."""
    words = str(record.get("outcome") or "")
    waited_s = record.get("waited_s")
    if isinstance(waited_s, int | float) and waited_s >= 0.05:
        words += f" after {waited_s:.1f} s"
    before, after = record.get("before"), record.get("after")
    if before is not None or after is not None:
        words += (
            f", {_scalar(before)} to {_scalar(after)}" if before != after else f", {_scalar(after)}"
        )
    reason = record.get("reason")
    return f"{words}: {reason}" if reason else words


def _scalar(value: JsonScalar) -> str:
    if value is None:
        return "unknown"
    return f"{value:g}" if isinstance(value, float) else str(value)


def listing(names: tuple[str, ...]) -> str:
    """Join names: `a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
