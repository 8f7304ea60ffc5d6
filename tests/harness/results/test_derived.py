"""Energy per token and tails of times, against powers and times that are known."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from harness.results.derived import DISCHARGING, find_charge_fault, find_tails, measure_energy
from harness.results.records import TelemetrySeries

START_S, INIT_S, TTFT_S, DECODE_S, END_S = 0.4, 1.0, 3.0, 6.0, 0.5
QUERY = {
    "init_s": INIT_S, "ttft_s": TTFT_S, "prompt_tokens": 1500.0,
    "generated_tokens": 121.0, "decode_tokens_per_s": 120 / DECODE_S,
}  # fmt: skip
BEGAN_S = START_S + INIT_S
TRUTH = {"prefill": 8.0 * TTFT_S / 1500, "decode": 5.0 * DECODE_S / 120}


def power_w(t: float) -> float:
    """Of a phone: loading 3 W, prefill 8 W, decode 5 W, else 2 W."""
    ends = np.cumsum([START_S, INIT_S, TTFT_S, DECODE_S])
    return (2.0, 3.0, 8.0, 5.0, 2.0)[int(np.searchsorted(ends, t, side="right"))]


def gauge(
    power: Callable[[float], float] = power_w, *, noise: float = 0.05, seed: int = 0,
    every_s: float = 0.25, states: tuple[float | None, ...] = (1.0, 1.0),
) -> tuple[TelemetrySeries, ...]:  # fmt: skip
    """Samples at 10 Hz of a gauge that renews its reading a few times a second."""
    random = np.random.default_rng(seed)
    total = START_S + INIT_S + TTFT_S + DECODE_S + END_S
    times = tuple(np.arange(0.0, total, 0.1).round(2).tolist())
    phase = random.uniform(0, every_s)
    renewed = [math.floor((t + phase) / every_s) * every_s - phase for t in times]
    readings = {t: power(t) * (1 + random.normal(0, noise)) for t in dict.fromkeys(renewed)}
    amperes = tuple(-readings[t] / 4.0 for t in renewed)
    return (
        TelemetrySeries("battery_a", "A", times, amperes),
        TelemetrySeries("battery_v", "V", times, (4.0,) * len(times)),
        TelemetrySeries(DISCHARGING, "", (0.0, total), states),
    )


@pytest.mark.parametrize("began_s", [BEGAN_S, None])
def test_an_energy_and_its_error_hold_the_truth(began_s: float | None) -> None:
    """Of 200 runs, within twice the error as often as two standard errors are."""
    found = [measure_energy(QUERY, gauge(seed=seed), began_s) for seed in range(200)]
    for name, truth in TRUTH.items():
        key = f"{name}_energy_j_per_token"
        values = np.array([one[key] for one in found])
        errors = np.array([one[f"{key}_error"] for one in found])
        assert values.mean() == pytest.approx(truth, rel=0.05)
        assert np.mean(np.abs(values - truth) <= 2 * errors) >= 0.95
        assert errors.mean() < 0.1 * truth


def test_a_steady_power_leaves_no_error() -> None:
    found = measure_energy(QUERY, gauge(lambda _: 5.0, noise=0.0), BEGAN_S)
    assert found["decode_energy_j_per_token"] == pytest.approx(5.0 * DECODE_S / 120)
    assert found["decode_energy_j_per_token_error"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("states", "fault"),
    [
        ((0.0, 0.0), "a charger was on"),
        ((1.0, 0.0), "a charger was on"),
        ((1.0, None), "does not tell whether its battery discharges"),
    ],
)
def test_a_battery_on_a_charger_tells_nothing(states: tuple[float | None, ...], fault: str) -> None:
    series = gauge(states=states)
    assert fault in find_charge_fault(series)
    assert measure_energy(QUERY, series, BEGAN_S) == {}
    without_state = series[:2]
    assert "does not tell" in find_charge_fault(without_state)
    assert measure_energy(QUERY, without_state, BEGAN_S) == {}
    assert find_charge_fault(()) == find_charge_fault(series[:1]) == ""


def test_what_a_gauge_cannot_see_is_no_figure() -> None:
    short = {**QUERY, "ttft_s": 0.2}
    assert set(measure_energy(short, gauge(), BEGAN_S)) == {
        "decode_energy_j_per_token", "decode_energy_j_per_token_error",
    }  # fmt: skip
    assert measure_energy(QUERY, gauge(noise=3.0, every_s=1.0), BEGAN_S) == {}  # over a quarter off
    assert measure_energy(QUERY, gauge(), BEGAN_S + 60) == {}  # after the last sample
    assert measure_energy({**QUERY, "generated_tokens": 1.0}, gauge(), BEGAN_S).keys() == {
        "prefill_energy_j_per_token", "prefill_energy_j_per_token_error",
    }  # fmt: skip
    assert measure_energy({}, gauge(), BEGAN_S) == {}


def test_percentiles_are_of_enough_times() -> None:
    times = [n / 1000 for n in range(1, 101)]
    assert find_tails("itl", times) == {"itl_p50_s": 0.050, "itl_p95_s": 0.095, "itl_p99_s": 0.099}
    assert find_tails("itl", times[:20]) == {"itl_p50_s": 0.010, "itl_p95_s": 0.019}
    assert find_tails("ttft", times[:19]) == {}
