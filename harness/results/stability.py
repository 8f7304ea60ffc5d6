"""Stability grade of a cell: how far its numbers can be trusted, with reasons.

The unit of sampling is the session. Repetitions of one session share a process start, a temperature
and a place on the scheduler, and their spread is tiny beside the spread between sessions
(pytorch/executorch#8603), so that many repetitions of one session say little.

The score follows pytorch/executorch#10982: 50 parts for the coefficient of variation, 25 for
largest over smallest, 25 for the tail of the repetitions; a coefficient of variation of 10 % scores
nothing. The other two score nothing from 1.5 on, pyperf's limit for a suspicious extreme.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.results.metrics import align_devices, session_means
from harness.results.records import Condition, Run
from harness.words import pluralize

Grade = Literal["A", "B", "C", "D", "F", "?"]

MIN_SESSIONS = 3
CV_LIMIT = 0.10
RATIO_LIMIT = 1.5
TAIL = 0.99
GATE, THROTTLING = "thermal_gate", "throttling"
"""Names of the conditions that bear on a grade."""
_LETTERS: tuple[Grade, ...] = ("A", "B", "C", "D", "F")
_LEAST_SCORES = (90.0, 75.0, 60.0, 40.0)


@dataclass(frozen=True, slots=True)
class Stability:
    """The grade of a cell.

    Attributes:
        grade: `A` to `D`, `F`; `?` with too few sessions.
        score: 0 to 100, before doubts lower the grade; None for `?`.
        reasons: the measures behind the grade, and the doubts that lowered it, in words.
    """

    grade: Grade
    score: float | None
    reasons: tuple[str, ...]


def grade(
    sessions: Sequence[Sequence[float]],
    devices: Sequence[str] = (),
    *,
    throttled: int = 0,
    ungated: int = 0,
    unsettled: int = 0,
) -> Stability:
    """Grade one metric of one cell.

    Args:
        sessions: measured repetitions of each session, warm-ups left out.
        devices: of each session; what these differ by is no instability.
        throttled: sessions in which the device throttled.
        ungated: sessions that did not wait for a temperature, or gave up waiting.
        unsettled: sessions whose warm-up did not end.
    """
    with_values = [values for values in sessions if values]
    everything = [value for values in with_values for value in values]
    if not all(math.isfinite(value) and value >= 0 for value in everything):
        raise ValueError("only finite values of at least 0 can be graded")
    if len(with_values) < MIN_SESSIONS:
        reason = (
            f"{pluralize(len(with_values), 'session')} of at least {MIN_SESSIONS}: "
            "spread between sessions is unknown"
        )
        return Stability("?", None, (reason,))
    devices = [one for one, values in zip(devices, sessions, strict=False) if values]
    score, reasons = _score(*align_devices(with_values, devices))
    letter = sum(score < least for least in _LEAST_SCORES)
    doubts = (
        (throttled, "throttled"),
        (ungated, "not gated by temperature"),
        (unsettled, "not steady after warm-up"),
    )
    for number, words in doubts:
        if number:
            letter += 1
            sessions_in_words = pluralize(len(with_values), "session")
            reasons.append(f"{number} of {sessions_in_words} {words}: one grade lower")
    return Stability(_LETTERS[min(letter, len(_LETTERS) - 1)], score, tuple(reasons))


def grade_runs(runs: Sequence[Run], metric: str) -> Stability:
    """Grade one metric over runs that are the sessions of one cell."""
    sessions = [run for run in runs if run.values(metric)]
    return grade(
        [run.values(metric) for run in sessions],
        [run.device.serial for run in sessions],
        throttled=sum(was_throttled(run) for run in sessions),
        ungated=sum(not was_gated(run) for run in sessions),
        unsettled=sum(run.warmup_detected is False for run in sessions),
    )


def was_gated(run: Run) -> bool:
    """Return whether the device met its temperature gate before the run."""
    return any(c.get("name") == GATE and c.get("outcome") == "met" for c in run.conditions)


def start_temperature(conditions: Iterable[Condition]) -> float | None:
    """Return the degrees Celsius of the hottest zone as a run began; None if nobody looked."""
    celsius = (c.get("after") for c in conditions if c.get("name") == GATE)
    return next((float(c) for c in celsius if isinstance(c, int | float)), None)


def was_throttled(run: Run) -> bool:
    """Return whether the device throttled during the run."""
    return any(c.get("name") == THROTTLING and c.get("outcome") == "seen" for c in run.conditions)


def _score(sessions: Sequence[Sequence[float]], freedom: int) -> tuple[float, list[str]]:
    means = session_means(sessions)
    mean, everything = statistics.fmean(means), [value for one in sessions for value in one]
    deviation = statistics.pstdev(means) * math.sqrt(len(means) / freedom)
    cv = deviation / mean if mean else 0.0
    extremes = _ratio(max(means), min(means))
    tail = _tail(everything)
    score = (
        50 * _part(cv / CV_LIMIT)
        + 25 * _part((extremes - 1) / (RATIO_LIMIT - 1))
        + 25 * _part((tail - 1) / (RATIO_LIMIT - 1))
    )
    return score, [
        f"sessions vary by {cv:.1%} (coefficient of variation of {len(means)} sessions)",
        f"best session over worst {extremes:.2f}, tail of repetitions over median {tail:.2f}",
    ]


def _part(distance: float) -> float:
    return max(0.0, 1.0 - distance)


def _tail(values: Sequence[float]) -> float:
    """Return the farther of p99/p50 and p50/p1: the bad tail of a rate is the low one."""
    low, middle, high = map(float, np.quantile(values, (1 - TAIL, 0.5, TAIL)))
    return max(_ratio(high, middle), _ratio(middle, low))


def _ratio(large: float, small: float) -> float:
    if small:
        return large / small
    return math.inf if large else 1.0
