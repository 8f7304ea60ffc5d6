"""Plan of a series: how many sessions a night would show a loss in time, by simulation.

Copies of the series with so many sessions every night have to say of themselves that they would
show the loss (`SeriesJudgement.smallest_loss`); the series itself says so for the number that it
has. Their noise is its own: runs of nights keep the deviations that nights in a row had, as far as
these are more than those of their sessions, and each session has one that a session had within its
night. Where nights have one session each, what those of a night would share is not known, and the
plan takes it for nothing.
"""

import numpy as np

from harness.results.statistics.changes import (
    MIN_NIGHTS,
    Floats,
    History,
    Ints,
    judge_all,
)

SESSIONS = (1, 2, 3, 4, 6, 8, 12)
"""Sessions a night that are tried."""
_COPIES, _NIGHTS = 15, 68
_RUN = 4
"""Nights in a row that are taken together."""


def plan_sessions(history: History, loss: float, *, seed: int = 0) -> int | None:
    """Return the fewest sessions a night that show a loss within `VISIBLE_IN` nights.

    None if all of `SESSIONS` are too few, or the history is too short to be judged.

    Args:
        history: of one level: since its last change.
        loss: as a part of the value.
    """
    logs, places = np.log(history.values), np.array(history.nights)
    nights, counts = np.unique(places, return_counts=True)
    if len(nights) < MIN_NIGHTS:
        return None
    names = np.array(history.devices)
    for name in set(history.devices):
        logs[names == name] -= np.median(logs[names == name])
    between = np.array([logs[places == night].mean() for night in nights])
    within = logs - np.repeat(between, counts)
    shared, own = _split(between - between.mean(), within, counts)
    random = np.random.default_rng(seed)
    lost = loss if history.higher_is_better else loss / (1 + loss)
    now, (judged,) = round(len(logs) / len(nights)), judge_all([history])
    shows = judged.smallest_loss is not None and judged.smallest_loss <= lost
    for sessions in SESSIONS:
        if sessions == now and shows:
            return sessions
        if sessions <= now and not shows:
            continue
        copies = [_simulate(history, sessions, shared, own, random) for _ in range(_COPIES)]
        if np.median([one.smallest_loss or 1.0 for one in judge_all(copies)]) <= lost:
            return sessions
    return None


def _split(between: Floats, within: Floats, counts: Ints) -> tuple[Floats, Floats]:
    """Return the deviations that sessions of a night share, and those that they do not.

    What nights vary beyond their sessions is shared.
    """
    freedom = len(within) - len(between)
    if freedom < len(between) / 2:
        return np.zeros_like(between), between
    variance, own = float(np.var(between)), float(np.sum(within**2)) / freedom
    own_part = own * float(np.mean(1 / counts)) / variance if variance else 1.0
    part = max(0.0, 1 - own_part)
    return between * np.sqrt(part), within * np.sqrt(len(within) / freedom)


def _simulate(
    history: History, sessions: int, shared: Floats, own: Floats, random: np.random.Generator
) -> History:
    """Return a history of the same noise."""
    begins = random.integers(0, len(shared), _NIGHTS // _RUN)
    of_night = np.concatenate([np.roll(shared, -begin)[:_RUN] for begin in begins])
    logs = np.repeat(of_night, sessions) + random.choice(own, _NIGHTS * sessions)
    devices = list(dict.fromkeys(history.devices))
    return History(
        values=np.exp(logs).tolist(),
        nights=np.repeat(np.arange(_NIGHTS), sessions).tolist(),
        devices=[devices[n % len(devices)] for n in range(_NIGHTS * sessions)],
        higher_is_better=history.higher_is_better,
        smallest=history.smallest,
    )
