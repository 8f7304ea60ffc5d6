"""Warm-up is found where it is, and not seen where it does not end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.results.warmup import detect_warmup

speeds = st.floats(1, 1e6)
jitter = st.floats(-0.01, 0.01)


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ([100, 100, 100], 0),
        ([100, 101, 99, 100, 100.5], 0),
        ([25, 99, 101, 100], 1),
        ([400, 99, 101, 100], 1),  # a burst of a cold phone is warm-up as well
        ([10, 60, 99, 101, 100, 98], 2),
        ([100, 101, 99, 100, 55, 54, 55], 4),  # throttled half-way, and steady after it
    ],
)
def test_its_end_is_found(values: list[float], count: int) -> None:
    found = detect_warmup(values)
    assert (found.count, found.reached) == (count, True)
    assert found.reason.startswith("steady from")


@pytest.mark.parametrize(
    "values",
    [
        [],
        [100],
        [100, 100],
        [10, 20, 40, 80, 160, 320],
        [100, 90, 80, 70, 60, 50, 40],
        [10, 100, 10, 100, 10],
        [100, 100, 100, 200],
    ],
)
def test_an_end_that_is_not_there_is_not_seen(values: list[float]) -> None:
    found = detect_warmup(values)
    assert not found.reached
    assert found.reason.startswith("not reached")
    assert found.count == max(0, len(values) - 3)


@given(speeds, st.lists(jitter, min_size=3, max_size=30))
def test_an_almost_constant_series_has_no_warmup(speed: float, moves: list[float]) -> None:
    assert detect_warmup([speed * (1 + move) for move in moves]).count == 0


@given(speeds, st.lists(jitter, min_size=3, max_size=20), st.floats(0.05, 0.7))
def test_a_slow_first_value_is_warmup(speed: float, moves: list[float], slow: float) -> None:
    values = [speed * slow, *(speed * (1 + move) for move in moves)]
    found = detect_warmup(values)
    assert (found.count, found.reached) == (1, True)


@given(st.lists(speeds, max_size=20))
def test_units_do_not_matter(values: list[float]) -> None:
    """A power of two, so that rounding is the same on both sides."""
    one, other = detect_warmup(values), detect_warmup([value * 2.0**5 for value in values])
    assert (one.count, one.reached) == (other.count, other.reached)
    assert 0 <= one.count <= max(0, len(values) - 3) + (3 if one.reached else 0)


@given(st.lists(speeds, min_size=3, max_size=20))
def test_what_follows_the_warmup_is_steady_by_itself(values: list[float]) -> None:
    found = detect_warmup(values)
    if found.reached:
        assert detect_warmup(values[found.count :]).count == 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        detect_warmup([1.0, math.nan, 1.0])
    with pytest.raises(ValueError, match="two"):
        detect_warmup([1.0], fewest=1)
