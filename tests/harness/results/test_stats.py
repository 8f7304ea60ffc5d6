"""Numbers out of repetitions, and what is said against them."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.results.stats import remarks, summarise

VALUES = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12)


def test_one_session_is_described_by_its_repetitions() -> None:
    found = summarise([[17.0, 18.0, 19.0]])
    assert found is not None
    assert (found.n, found.sessions, found.mean, found.sd) == (3, 1, 18.0, 1.0)
    assert (found.median, found.minimum, found.maximum) == (18.0, 17.0, 19.0)


def test_several_sessions_are_the_unit() -> None:
    found = summarise([[10.0] * 9, [20.0], []])
    assert found is not None
    assert (found.n, found.sessions, found.mean, found.median) == (10, 2, 15.0, 10.0)
    assert found.sd == pytest.approx(statistics.stdev([10.0, 20.0]))


def test_nothing_gives_nothing() -> None:
    assert summarise([]) is None
    assert summarise([[], []]) is None
    assert remarks([[]]) == ("only warm-ups, no measured repetition",)


@pytest.mark.parametrize(
    ("sessions", "words"),
    [
        ([[5.0]], "one repetition only"),
        ([[5.0, 5.01]], "2 repetitions only"),
        ([[5.0, 6.0, 7.0]], "standard deviation is 17% of the mean"),
        ([[10.0, 10.1], [14.0, 14.1]], "standard deviation between sessions is 23%"),
        ([[1.0, 1.0, 1.0, 1.0, 1.0, 3.0]], "largest value is 125% above the mean"),
        ([[10.0] * 30 + [3.0]], "smallest value is 69% below the mean"),
        ([[8.0, 10.0, 10.1, 9.9]], "first repetition is 20% off the others"),
    ],
)
def test_what_cannot_be_trusted_is_said(sessions: list[list[float]], words: str) -> None:
    assert any(words in remark for remark in remarks(sessions))


@pytest.mark.parametrize("sessions", [[[5.0, 5.1, 4.9]], [[5.0, 5.1], [4.9, 5.0]]])
def test_what_is_steady_is_left_alone(sessions: list[list[float]]) -> None:
    assert remarks(sessions) == ()


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_means_lie_between_the_extremes(sessions: list[list[float]]) -> None:
    found = summarise(sessions)
    assert found is not None
    slack = 1e-9 * found.maximum
    assert found.minimum - slack <= found.mean <= found.maximum + slack
    assert found.n == sum(map(len, sessions))
    assert (found.sd is None) == (found.n == 1)
    assert all("\n" not in remark for remark in remarks(sessions))
