"""Queries in logs where several lines tell of each."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field


@dataclass(slots=True)
class LogQuery:
    """A query, of which several lines of a log tell.

    Attributes:
        line: on which it begins.
        process: what the log tells of the process that ran it.
        began_s: when the process began, by a clock that counts from 1970; 0 if nothing tells.
        told: names of the figures that its lines had.
        source: the text that tells of it.
    """

    line: int
    process: Mapping[str, str]
    began_s: float = 0.0
    told: set[str] = field(default_factory=set)
    figures: dict[str, float] = field(default_factory=dict)
    source: str = ""


def query_of(
    queries: list[LogQuery],
    line: int,
    process: Mapping[str, str],
    prompt: object,
    told: AbstractSet[str],
) -> LogQuery:
    """Return the query of a line's figures: the next where the last has them, or other tokens."""
    last = queries[-1] if queries else None
    if (
        last is None
        or last.process != process
        or last.told & told
        or (prompt is not None and last.figures.get("prompt_tokens", prompt) != prompt)
    ):
        last = LogQuery(line, process)
        queries.append(last)
    last.told |= told
    return last


def count_of(query: LogQuery, metric: str) -> int | None:
    """Return a number of tokens; None where it is not told, or 0."""
    return int(query.figures.get(metric, 0)) or None
