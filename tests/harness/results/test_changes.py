"""Changes of level are found in time, and noise is not taken for one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from harness.results.statistics.changes import Change, History, _median, detect, judge_all

SESSIONS = 2


def noisy(
    levels: Sequence[float], *, seed: int = 0, noise: float = 0.02, sessions: int = SESSIONS
) -> list[list[float]]:
    """Values of each night about its level."""
    random = np.random.default_rng(seed)
    return [[level * float(np.exp(random.normal(0, noise))) for _ in range(sessions)]
            for level in levels]  # fmt: skip


def history(nights: list[list[float]], *, higher_is_better: bool = True) -> History:
    return History(
        values=[value for night in nights for value in night],
        nights=[number for number, night in enumerate(nights) for _ in night],
        devices=["phone" for night in nights for _ in night],
        higher_is_better=higher_is_better,
    )


def detect_all(several: list[History]) -> list[tuple[Change, ...]]:
    return [one.changes for one in judge_all(several)]


def test_noise_is_no_change() -> None:
    steady = [history(noisy([50.0] * 120, seed=seed)) for seed in range(8)]
    assert sum(len(changes) for changes in detect_all(steady)) <= 1


def test_a_loss_of_5_percent_is_told_within_three_nights() -> None:
    (change,) = detect(history(noisy([50.0] * 60 + [47.5] * 10)))
    assert change.found <= 62
    assert abs(change.night - 60) <= 1
    assert change.is_loss
    assert change.ratio == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize("low", [45.0, 15.0])
def test_a_night_is_judged_by_the_past_alone(low: float) -> None:
    whole = noisy([50.0] * 40 + [low] * 20 + [51.0] * 20, seed=3)
    told = detect(history(whole))
    ends = (30, 59, 65, *(change.found + nights for change in told for nights in (1, 2)))
    assert detect_all([history(whole[:end]) for end in ends]) == [
        tuple(c for c in told if c.found < end) for end in ends
    ]


@pytest.mark.parametrize(("noise", "sessions"), [(0.02, 1), (0.06, 2)])
def test_a_series_says_which_losses_it_shows_in_three_nights(noise: float, sessions: int) -> None:
    whole = [noisy([50.0] * 63, seed=seed, noise=noise, sessions=sessions) for seed in range(40)]
    steady = judge_all([history(nights[:60]) for nights in whole])
    promised = [one.smallest_loss or 1.0 for one in steady]
    lost = [
        history(nights[:60] + [[v * (1 - loss) for v in night] for night in nights[60:]])
        for nights, loss in zip(whole, promised, strict=True)
    ]
    told = [any(c.is_loss and c.found >= 60 for c in found) for found in detect_all(lost)]
    assert 30 <= sum(told) <= 40


def test_a_second_mode_hides_no_loss_that_is_unlike_it() -> None:
    """One session of seven is 10 % slower: 3 % is told soon, and so it is said."""

    def skewed(seed: int, *, lost: float = 0.0) -> History:
        random = np.random.default_rng(seed)
        logs = np.log(50) + random.normal(0, 0.005, (63 if lost else 60, 2))
        logs += np.log(0.9) * (random.random(logs.shape) < 0.15)
        logs[60:] += np.log1p(-lost)
        return history(np.exp(logs).tolist())

    told = detect_all([skewed(seed, lost=0.03) for seed in range(20)])
    assert sum(any(c.is_loss and c.found >= 60 for c in found) for found in told) >= 17
    said = [one.smallest_loss or 1.0 for one in judge_all([skewed(seed) for seed in range(20)])]
    assert np.median(said) < 0.045


def _with_slow_sessions(random: np.random.Generator, nights: int) -> npt.NDArray[np.float64]:
    """Logarithms of nights in which a quarter of sessions is slower by some 10 %."""
    shape = (nights, SESSIONS)
    slow = random.exponential(0.1, shape) * (random.random(shape) < 0.25)
    values: npt.NDArray[np.float64] = np.log(50) + random.normal(0, 0.005, shape) - slow
    return values


def test_a_series_tells_the_loss_that_it_says_on_its_own_next_nights() -> None:
    """What it says holds for each series, also where they differ as much as these."""
    pasts = [_with_slow_sessions(np.random.default_rng(seed), 60) for seed in range(20)]
    said = [
        one.smallest_loss or 1.0
        for one in judge_all([history(np.exp(past).tolist()) for past in pasts])
    ]
    futures = [
        np.concatenate(
            [past, _with_slow_sessions(np.random.default_rng(seed), 3) + np.log1p(-loss)]
        )
        for seed, (past, loss) in enumerate(zip(pasts * 3, said * 3, strict=True), 100)
    ]
    told = [
        any(one.is_loss and one.found >= 60 for one in changes)
        for changes in detect_all([history(np.exp(nights).tolist()) for nights in futures])
    ]
    assert max(said) > 4 * min(said)
    assert sum(told) / len(told) > 0.65  # five of six, but for chance


def test_noisier_series_promise_less() -> None:
    quiet, noisier, loud = judge_all(
        [history(noisy([50.0] * 60, noise=noise)) for noise in (0.005, 0.03, 0.1)]
    )
    assert quiet.smallest_loss == pytest.approx(0.025, abs=1e-3)
    assert 0.04 < (noisier.smallest_loss or 0) < 0.12
    assert 0.15 < (loud.smallest_loss or 0) < 0.5


def test_short_series_promise_nothing() -> None:
    assert [one.smallest_loss for one in judge_all([history([]), history(noisy([5.0] * 7))])] == [
        None,
        None,
    ]


def test_a_recovery_is_a_gain() -> None:
    loss, gain = detect(history(noisy([50.0] * 30 + [42.0] * 20 + [50.0] * 20)))
    assert (loss.is_loss, gain.is_loss) == (True, False)
    assert loss.ratio == pytest.approx(0.84, abs=0.03)
    assert (loss.night, gain.night) == (30, 50)


def test_where_lower_is_better_a_rise_is_the_loss() -> None:
    times = noisy([0.2] * 30 + [0.25] * 6)
    (change,) = detect(history(times, higher_is_better=False))
    assert change.is_loss
    assert change.ratio == pytest.approx(1.25, abs=0.05)


@given(
    arrays(np.float64, (4, 7), elements=st.floats(-9, 9) | st.just(np.nan)).filter(
        lambda values: not np.isnan(values).all(axis=1).any()
    )
)
def test_medians_are_those_of_numpy(values: npt.NDArray[np.float64]) -> None:
    np.testing.assert_allclose(_median(values), np.nanmedian(values, axis=1))


def test_one_bad_night_is_no_change() -> None:
    nights = noisy([50.0] * 40)
    nights[30] = [35.0, 35.5]
    assert detect(history(nights)) == ()


def test_an_outlier_on_the_first_night_teaches_no_level() -> None:
    nights = noisy([0.86 * 50.0] + [50.0] * 29, noise=0.003, sessions=1)
    assert detect(history(nights)) == ()


@pytest.mark.parametrize(
    ("bad", "part", "step"),
    [(1, 0.85, 20), (3, 0.85, 20), (3, 0.85, 12), (6, 0.93, 20), (6, 0.85, 20)],
)
def test_bad_first_nights_hide_no_loss(bad: int, part: float, step: int) -> None:
    levels = [part * 50.0] * bad + [50.0] * (step - bad) + [45.0] * 10
    several = [history(noisy(levels, seed=seed)) for seed in range(12)]
    told = [[change for change in found if change.is_loss] for found in detect_all(several)]
    in_time = [any(step <= c.found <= step + 2 and c.night >= step - 1 for c in f) for f in told]
    assert sum(in_time) >= 9


def test_a_second_loss_soon_after_the_first_is_told_on_its_second_night() -> None:
    levels = [50.0] * 40 + [45.0] * 2 + [27.0] * 8
    several = [history(noisy(levels, seed=seed)) for seed in range(12)]
    places = [[(c.night, c.found) for c in found] for found in detect_all(several)]
    assert sum((42, 43) in found for found in places) >= 11


def test_a_loss_that_does_not_last_is_refuted() -> None:
    whole = noisy([50.0] * 40 + [46.0] * 3 + [50.0] * 20, seed=3)
    (change,) = detect(history(whole))
    assert (change.night, change.is_loss) == (40, True)
    assert change.refuted is not None
    assert 43 <= change.refuted <= 50
    (before,) = detect(history(whole[: change.refuted]))
    assert before == replace(change, refuted=None)


def test_nights_that_go_together_make_few_losses() -> None:
    """Noise of whole nights, each correlated with the last by 0.8."""
    several = []
    for seed in range(12):
        random = np.random.default_rng(seed)
        level, levels = 0.0, []
        for _ in range(100):
            level = 0.8 * level + 0.6 * 0.017 * random.standard_normal()
            levels.append(50 * float(np.exp(level)))
        several.append(history(noisy(levels, seed=seed, noise=0.01)))
    assert sum(c.is_loss for found in detect_all(several) for c in found) <= 8


def test_a_great_loss_of_a_noisy_series_is_told_soon() -> None:
    """Of noise of 20 %, a tenth of the value is no outlier."""
    nights = noisy([50.0] * 19 + [5.0] * 11, noise=0.2, sessions=1)
    (change,) = detect(history(nights))
    assert (change.night, change.is_loss) == (19, True)
    assert change.found <= 22


def test_the_offset_of_a_new_device_is_no_change() -> None:
    nights = noisy([50.0] * 60, sessions=1, seed=2)
    values = [night[0] for night in nights]
    devices = ["old"] * 30 + ["new", "old"] * 15
    for number, device in enumerate(devices):
        values[number] *= 0.92 if device == "new" else 1.0
    assert detect(History(values, range(60), devices)) == ()


def test_another_phone_in_the_place_of_the_first_is_no_change() -> None:
    several = [
        replace(history(nights), devices=["old"] * 80 + ["new"] * 60)
        for gap, seed in product((0.85, 0.92, 1.08), range(8))
        for nights in [noisy([50.0] * 40 + [50.0 * gap] * 30, seed=seed)]
    ]
    assert sum(map(len, detect_all(several))) <= 1


def test_a_step_is_found_across_devices() -> None:
    nights = noisy([50.0] * 60 + [46.0] * 8, sessions=1, seed=1)
    devices = ["a", "b", "c", "b"] * 17
    offsets = {"a": 1.0, "b": 0.93, "c": 1.06}
    values = [night[0] * offsets[device] for night, device in zip(nights, devices, strict=True)]
    (change,) = detect(History(values, range(68), devices))
    assert 59 <= change.night <= 61
    assert change.devices == ()


@pytest.mark.parametrize(("size", "sick"), [(0.8, ["P2"]), (0.6, ["P2"]), (0.8, ["P0", "P1"])])
def test_a_loss_of_some_devices_is_told_of_them(size: float, sick: list[str]) -> None:
    several = []
    for seed in range(8):
        nights = noisy([50.0] * 50, sessions=3, seed=seed)
        for night, device in product(nights[40:], sick):
            night[int(device[1])] *= size
        one = history(nights)
        several.append(replace(one, devices=[f"P{slot}" for _ in nights for slot in range(3)]))
    for found in detect_all(several):
        (change,) = found
        assert (change.night, change.found) == (40, 41)
        assert sorted(change.devices) == sick
        assert change.ratio == pytest.approx(size, abs=0.06)


def test_a_loss_of_one_device_that_does_not_last_is_refuted() -> None:
    nights = noisy([50.0] * 60, sessions=3, seed=4)
    for night in nights[40:43]:
        night[1] *= 0.9
    one = replace(history(nights), devices=["a", "b", "c"] * 60)
    (change,) = detect(one)
    assert change.devices == ("b",)
    assert change.refuted is not None


def test_values_without_noise_are_watched_for_small_changes() -> None:
    values = [15.7031] * 30 + [15.9022] * 2
    (change,) = detect(
        History(values, range(32), ["x"] * 32, higher_is_better=False, smallest=0.005)
    )
    assert (change.night, change.found, change.is_loss) == (30, 31, True)
    assert change.ratio == pytest.approx(15.9 / 15.7, abs=1e-3)


def in_spells(seed: int, *, told: bool) -> History:
    """Runs of some four hot sessions are 5 % slower, every twenty; 8 % is lost from night 80 on."""
    random = np.random.default_rng(seed)
    hot, one = np.zeros(92), int(random.integers(3, 18))
    while one < 80:
        hot[one : one + (lasts := int(random.integers(3, 6)))] = 1
        one += lasts + int(random.integers(12, 20))
    hot[80:] = 0
    logs = np.log(50) + random.normal(0, 0.01, 92) + np.log(0.95) * hot
    logs[80:] += np.log(0.92)
    heat = 33 + random.normal(0, 1.5, 92) + 9 * hot
    return History(np.exp(logs).tolist(), range(92), ["x"] * 92, heat=heat.tolist() if told else ())


@pytest.mark.parametrize(("told", "most", "least"), [(True, 2, 19), (False, 24, 16)])
def test_hot_sessions_are_no_loss_once_heat_or_its_spells_are_known(
    told: bool, most: int, least: int
) -> None:
    found = detect_all([in_spells(seed, told=told) for seed in range(20)])
    losses = [[c for c in changes if c.is_loss] for changes in found]
    assert sum(c.found < 80 for changes in losses for c in changes) <= most
    assert sum(any(c.found >= 80 for c in changes) for changes in losses) >= least


def test_a_unit_that_readings_are_rounded_to_is_no_change() -> None:
    def rounded(seed: int, *, lost: float = 0.0) -> History:
        random = np.random.default_rng(seed)
        slow = random.uniform(24.6, 25.6) * (1 + np.linspace(0, 0.015, 90))
        values = slow * np.exp(random.normal(0, 0.01, 90)) * (1 - lost * (np.arange(90) >= 80))
        return History(np.rint(values).tolist(), range(90), ["x"] * 90)

    assert sum(map(len, detect_all([rounded(seed) for seed in range(40)]))) <= 2
    assert sum(map(bool, detect_all([rounded(seed, lost=0.1) for seed in range(20)]))) >= 19


def test_series_of_any_length_are_judged_together_as_alone() -> None:
    several = [
        history(noisy([50.0] * 25 + [40.0] * 10)),
        history([]),
        history(noisy([50.0] * 5)),
        history(noisy([9.0] * 50 + [8.0] * 5, sessions=3)),
    ]
    assert detect_all(several) == [detect(one) for one in several]


def test_nights_keep_their_numbers() -> None:
    nights = noisy([50.0] * 30 + [40.0] * 5)
    numbers = [7 * number + 3 for number in range(35)]
    values = [sum(night) / len(night) for night in nights]
    (change,) = detect(History(values, numbers, ["x"] * 35))
    assert (change.night, change.found) == (numbers[30], numbers[31])


@pytest.mark.parametrize(
    ("values", "nights", "reason"),
    [
        ([1.0, 0.0], [0, 1], "above 0"),
        ([1.0, float("nan")], [0, 1], "above 0"),
        ([1.0, 2.0], [1, 0], "ascend"),
        ([1.0, 2.0], [1], "length"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    values: list[float], nights: list[int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        detect(History(values, nights, ["x"] * len(values)))
