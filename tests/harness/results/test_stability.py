"""Grades follow the spread between sessions, and say what they rest on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.results.metrics import summarise
from harness.results.stability import grade

speeds = st.floats(0.001, 1e6)
sessions = st.lists(st.lists(speeds, min_size=1, max_size=6), min_size=3, max_size=8)


def test_calm_sessions_get_an_a() -> None:
    found = grade([[100, 101], [100, 100.5], [99.8, 100]])
    assert found.grade == "A"
    assert found.score is not None
    assert found.score > 90
    assert any("sessions vary by 0." in reason for reason in found.reasons)


def test_many_repetitions_of_one_session_are_one_sample() -> None:
    found = grade([[100.0] * 50])
    assert (found.grade, found.score) == ("?", None)
    assert found.reasons == ("1 session of at least 3: spread between sessions is unknown",)
    assert grade([]).grade == "?"
    assert grade([[100.0], [], [100.0], []]).grade == "?"


def test_spread_between_sessions_counts_and_not_the_calm_within() -> None:
    """As in pytorch/executorch#8603: each session is calm, and no two agree."""
    found = grade([[60.0] * 5, [100.0] * 5, [140.0] * 5])
    assert found.grade == "F"


def test_ten_percent_between_sessions_score_nothing_for_it() -> None:
    """The two pools of pytorch/executorch#10982 come out on different sides."""
    steady, shaky = grade([[95.2], [100], [104.8]]), grade([[72.5], [100], [127.5]])
    assert steady.score is not None
    assert shaky.score is not None
    assert shaky.score < 25 < steady.score


@pytest.mark.parametrize("doubt", ["throttled", "ungated", "unsettled"])
def test_a_doubt_lowers_the_grade_and_is_named(doubt: str) -> None:
    calm = [[100.0, 100.0]] * 3
    found = grade(calm, **{doubt: 2})  # type: ignore[arg-type]
    assert found.grade == "B"
    assert found.score == grade(calm).score
    assert found.reasons[-1].startswith("2 of 3 sessions")
    assert found.reasons[-1].endswith("one grade lower")
    assert grade(calm, throttled=1, ungated=1, unsettled=1).grade == "D"


@given(sessions)
def test_a_score_is_within_its_bounds(values: list[list[float]]) -> None:
    found = grade(values)
    assert found.score is not None
    assert 0 <= found.score <= 100
    assert found.grade in "ABCDF"
    assert all(reason.isprintable() for reason in found.reasons)


@given(sessions, st.permutations(range(3)))
def test_the_order_of_sessions_does_not_matter(values: list[list[float]], order: list[int]) -> None:
    shuffled = [values[place] for place in order] + values[3:]
    assert grade(shuffled).score == pytest.approx(grade(values).score)


@given(st.lists(speeds, min_size=3, max_size=8), st.floats(1, 50), st.floats(1, 50))
def test_more_spread_never_scores_more(values: list[float], one: float, other: float) -> None:
    middle = sorted(values)[len(values) // 2]
    low, high = sorted((one, other))

    def spread(factor: float) -> float:
        score = grade([[middle + (value - middle) / factor] for value in values]).score
        assert score is not None
        return score

    assert spread(high) >= spread(low) - 1e-6


def test_zeros_are_graded_and_nonsense_is_not() -> None:
    assert grade([[0.0], [0.0], [0.0]]).grade == "A"
    assert grade([[0.0], [0.0], [5.0]]).grade == "F"
    for value in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="graded"):
            grade([[1.0], [1.0], [value]])


def test_what_devices_differ_by_is_no_instability() -> None:
    """Two phones 5 % apart, of 0.4 % each: as calm as one of them."""
    calm = [[50.0 + wobble] for wobble in (0.2, -0.2, 0.1, -0.1, 0.2, -0.2)]
    both = [*calm, *([1.05 * value] for (value,) in calm)]
    devices = ["P1"] * 6 + ["P2"] * 6
    apart, one = summarise(both, devices), summarise(calm)
    assert apart is not None
    assert one is not None
    assert apart.sd == pytest.approx(one.sd, rel=0.1)
    assert apart.mean == pytest.approx(51.25)
    assert grade(both, devices).grade == "A" != grade(both).grade
    few = [[50.0], [52.5], [50.2]]
    assert grade(few, ["P1", "P2", "P3"]) == grade(few)
