"""Traces: all outputs of a model over a sample, one part in memory at a time.

Tokens are given, not chosen by the model, so the calls of a part need the calls of the parts before
it and its own caches, and nothing of the parts after it. Part 1 runs over the whole sample, is
closed, and hands its hidden states to part 2: the memory of one part, the outputs of all. A
`Schedule` says which graph takes which tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.graph import interface
from buildlib.numerics.feeds import CachedCalls, CallInputs
from buildlib.numerics.runners import PartRunner

_TAIL = 24
"""Positions that each graph but the largest gets, when there are enough."""
OpenPart = Callable[[], Mapping[int, PartRunner]]
"""Loads one part of a model, at each AR of a context length. The caller closes the runners."""


@dataclass(frozen=True)
class Call:
    """One call of the AR-`ar` graph on `n_tokens` tokens after `n_past` others."""

    ar: int
    n_past: int
    n_tokens: int


Schedule = tuple[Call, ...]


def single_graph_schedule(ar: int, cl: int, n_tokens: int) -> Schedule:
    """Let one graph take all tokens that fit; the last call may be padded."""
    schedule = _ScheduleBuilder(cl, n_tokens)
    schedule.take(ar, n_tokens)
    return tuple(schedule.calls)


def alternating_schedule(ars: Iterable[int], cl: int, n_tokens: int) -> Schedule:
    """Let all graphs of a context length take turns, each going on from the caches of the others.

    The smallest takes the first tokens, from an empty context; the largest takes most; the others
    and the smallest again get some at the end, as in decoding after prefill.
    """
    smallest, *larger = sorted(ars)
    schedule = _ScheduleBuilder(cl, n_tokens)
    if larger:
        schedule.take(smallest, min(smallest, max(1, n_tokens // (2 * len(larger) + 2))))
        tail = min(_TAIL, schedule.left // (len(larger) + 1))
        for index, ar in enumerate(reversed(larger)):
            after = len(larger) - index
            schedule.take(ar, tail if index else max(1, schedule.left - after * tail))
    schedule.take(smallest, n_tokens)
    return tuple(schedule.calls)


class _ScheduleBuilder:
    """Appends calls until the tokens or the context are used up."""

    def __init__(self, cl: int, n_tokens: int) -> None:
        self.calls: list[Call] = []
        self._cl = cl
        self._n_tokens = n_tokens
        self._done = 0

    @property
    def left(self) -> int:
        return self._n_tokens - self._done

    def take(self, ar: int, n_tokens: int) -> None:
        """Add calls for up to `n_tokens`, while a call of the graph fits into the context."""
        end = min(self._done + n_tokens, self._n_tokens)
        while self._done < end and self._done + ar <= self._cl:
            count = min(ar, end - self._done)
            self.calls.append(Call(ar, self._done, count))
            self._done += count


@dataclass(frozen=True)
class Trace:
    """Outputs of a model for `n` positions, as real numbers.

    Attributes:
        logits: [n, vocab].
        caches: new keys and values by name of the output, [n, ...]: one row a position.
        schedule: the calls that computed the positions.
    """

    logits: npt.NDArray[np.float32]
    caches: Mapping[str, npt.NDArray[np.float32]]
    schedule: Schedule

    def positions_of(self, ar: int) -> npt.NDArray[np.intp]:
        """Return the positions that the AR-`ar` graph computed."""
        ars = np.repeat([call.ar for call in self.schedule], [c.n_tokens for c in self.schedule])
        return np.flatnonzero(ars == ar)


def trace_model(
    parts: Sequence[OpenPart],
    inputs: CallInputs,
    cl: int,
    schedule: Schedule,
    tokens: Sequence[int],
) -> Trace:
    """Run a model over the first tokens of a sample, as far as the schedule goes."""
    carried: list[dict[str, npt.NDArray[Any]]] = [{} for _ in schedule]
    logits: list[npt.NDArray[np.float32]] = []
    caches: dict[str, list[npt.NDArray[np.float32]]] = {}
    for open_part in parts:
        with ExitStack() as stack:
            runners = open_part()
            for runner in runners.values():
                stack.callback(runner.close)
            calls = CachedCalls({ar: [one] for ar, one in runners.items()}, inputs, cl)
            for number, call in enumerate(schedule):
                chunk = tokens[call.n_past : call.n_past + call.n_tokens]
                [(runner, outputs)] = calls.call(call.ar, chunk, carried[number])
                carried[number] = {}
                for name, array in outputs.items():
                    dequantize = runner.ports.outputs[name].dequantize
                    if interface.is_kv(name):
                        rows = np.moveaxis(array, interface.token_axis(name), 0)
                        caches.setdefault(name, []).append(dequantize(rows[: call.n_tokens]))
                    elif name == interface.LOGITS:
                        logits.append(dequantize(array[0, : call.n_tokens]))
                    else:
                        carried[number][name] = array
    all_caches = {name: np.concatenate(rows) for name, rows in caches.items()}
    return Trace(np.concatenate(logits), all_caches, schedule)
