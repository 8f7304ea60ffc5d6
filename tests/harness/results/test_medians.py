"""What nights are worth that go together."""

import numpy as np
import pytest

from harness.results.statistics.medians import go_together


@pytest.mark.parametrize("count", [2, 3, 14, 30, 31, 120])
def test_nights_go_together_around_a_running_median(count: int) -> None:
    """By its definition, night by night."""
    logs = np.random.default_rng(count).normal(size=count).cumsum()
    levels = [np.median(logs[max(n - 15, 0) : n + 16]) for n in range(count)]
    away = logs - np.array(levels)
    bound = 3 * 1.4826 * np.median(np.abs(away))
    away = np.clip(away, -bound, bound)
    away -= away.mean()
    lags = range(1, min(6, count))
    expected = 1 + 2 * sum(away[lag:] @ away[:-lag] for lag in lags) / (away @ away)
    assert go_together(list(logs)) == pytest.approx(max(1.0, expected))
