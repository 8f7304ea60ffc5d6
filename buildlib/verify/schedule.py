"""Which graph takes which tokens of a sample: the calls of one run."""

from collections.abc import Iterable
from dataclasses import dataclass

_TAIL = 24
"""Positions that each graph but the largest gets, when there are enough."""


@dataclass(frozen=True)
class Call:
    """One call of the AR-`ar` graph on `n_tokens` tokens after `n_past` others."""

    ar: int
    n_past: int
    n_tokens: int


Schedule = tuple[Call, ...]


def alone(ar: int, cl: int, n_tokens: int) -> Schedule:
    """One graph takes all tokens that fit, the last call padded if need be."""
    schedule = _Filling(cl, n_tokens)
    schedule.take(ar, n_tokens)
    return tuple(schedule.calls)


def together(ars: Iterable[int], cl: int, n_tokens: int) -> Schedule:
    """All graphs of a context length take turns, each going on from the caches of the others.

    The smallest takes the first tokens, from an empty context; the largest takes most; the others
    and the smallest again get some at the end, as in decoding after prefill.
    """
    smallest, *larger = sorted(ars)
    schedule = _Filling(cl, n_tokens)
    if larger:
        schedule.take(smallest, min(smallest, max(1, n_tokens // (2 * len(larger) + 2))))
        tail = min(_TAIL, schedule.left // (len(larger) + 1))
        for index, ar in enumerate(reversed(larger)):
            after = len(larger) - index
            schedule.take(ar, tail if index else max(1, schedule.left - after * tail))
    schedule.take(smallest, n_tokens)
    return tuple(schedule.calls)


class _Filling:
    """A schedule being made."""

    def __init__(self, cl: int, n_tokens: int) -> None:
        self.calls: list[Call] = []
        self._cl = cl
        self._n_tokens = n_tokens
        self._done = 0

    @property
    def left(self) -> int:
        return self._n_tokens - self._done

    def take(self, ar: int, n_tokens: int) -> None:
        """Up to `n_tokens`, as long as a call of the graph fits into the context."""
        end = min(self._done + n_tokens, self._n_tokens)
        while self._done < end and self._done + ar <= self._cl:
            taken = min(ar, end - self._done)
            self.calls.append(Call(ar, self._done, taken))
            self._done += taken
