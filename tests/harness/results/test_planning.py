"""Sessions that a plan asks for, against series that really go on with so many."""

import numpy as np
import pytest

from harness.results.statistics import planning
from harness.results.statistics.changes import History, judge_all
from harness.results.statistics.planning import SESSIONS, plan_sessions

LOSS = 0.03


def series(seed: int, sessions: int, *, noise: float, loss: float = 0.0) -> History:
    """40 nights, and three with the loss."""
    random = np.random.default_rng(seed)
    places = np.repeat(np.arange(43 if loss else 40), sessions)
    logs = random.normal(np.log(50), noise, len(places)) + np.log1p(-loss) * (places >= 40)
    return History(np.exp(logs).tolist(), places.tolist(), ["P1"] * len(places))


def part_told(sessions: int, noise: float) -> float:
    copies = [series(seed, sessions, noise=noise, loss=LOSS) for seed in range(100, 120)]
    return float(
        np.mean(
            [any(c.is_loss and c.found >= 40 for c in one.changes) for one in judge_all(copies)]
        )
    )


def test_as_many_sessions_as_planned_show_the_loss() -> None:
    plans = [plan_sessions(series(seed, 2, noise=0.015), LOSS) or 99 for seed in range(3)]
    planned = sorted(plans)[1]
    assert planned in SESSIONS
    assert part_told(planned, 0.015) >= 0.7
    fewer = SESSIONS[max(0, SESSIONS.index(planned) - 2)]
    assert part_told(fewer, 0.015) < 5 / 6


@pytest.mark.parametrize(
    ("noise", "nights", "sessions"), [(0.004, 40, 1), (0.2, 40, None), (0.004, 7, None)]
)
def test_a_calm_series_needs_one_and_none_is_enough_for_a_wild_or_a_young_one(
    monkeypatch: pytest.MonkeyPatch, noise: float, nights: int, sessions: int | None
) -> None:
    monkeypatch.setattr(planning, "SESSIONS", (1, 2))
    whole = series(1, 1, noise=noise)
    short = History(whole.values[:nights], whole.nights[:nights], whole.devices[:nights])
    assert plan_sessions(short, LOSS) == sessions
