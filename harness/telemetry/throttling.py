"""Verdict on throttling during a run, with its reasons."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.results.records import TelemetrySeries
from harness.telemetry.protocol import kind_of

HOT_DIE_C = 70.0
HOT_SURFACE_C = 42.0
"""Temperatures at which phones begin to slow down: of a die, and of the surface."""
_SURFACES = ("skin", "shell", "quiet", "xo", "batt", "usb")

CAPPED_SHARE = 0.92
"""Of the clock at the start: a step of a governor is smaller, a step of a thermal cap is larger."""
_START_S = 3.0
_WINDOW_S = 2.0
_LEAST_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class Throttling:
    """The verdict.

    Attributes:
        throttled: `None` when nothing that was sampled can tell.
        reasons: in words.
    """

    throttled: bool | None
    reasons: tuple[str, ...]


def judge_throttling(series: Sequence[TelemetrySeries]) -> Throttling:
    """Judge the series of one run.

    Heat shows in two ways: the kernel lowers its limit (`cpu_cap_hz`), or the clocks themselves no
    longer reach their maximum of the start while something is hot. Low clocks alone prove nothing:
    a CPU that waits for the NPU is slow too.
    """
    reasons = [reason for one in series if (reason := _lowered_cap(one))]
    hot = _hot_times(series)
    reasons += [reason for one in series if (reason := _capped_while_hot(one, hot))]
    if reasons:
        return Throttling(throttled=True, reasons=tuple(reasons))
    kinds = {kind_of(one.channel) for one in series if len(_known(one)) >= _LEAST_SAMPLES}
    if "cpu_cap_hz" not in kinds and not {"cpu_hz", "temp_c"} <= kinds:
        return Throttling(None, ("there are neither limits of clocks nor clocks and temperatures",))
    return Throttling(
        throttled=False, reasons=("no clock was capped, and nothing says it was hot",)
    )


def _known(series: TelemetrySeries) -> list[tuple[float, float]]:
    pairs = zip(series.t_s, series.values, strict=True)
    return [(moment, value) for moment, value in pairs if value is not None]


def _lowered_cap(series: TelemetrySeries) -> str | None:
    """Return a cap of the kernel that fell below its value at the start."""
    samples = _known(series)
    if kind_of(series.channel) != "cpu_cap_hz" or not samples:
        return None
    start = samples[0][1]
    lowest_at, lowest = min(samples, key=lambda pair: pair[1])
    if lowest > CAPPED_SHARE * start:
        return None
    return (
        f"{series.channel} fell from {start / 1e6:.0f} to {lowest / 1e6:.0f} MHz "
        f"at {lowest_at:.1f} s"
    )


def _hot_times(series: Sequence[TelemetrySeries]) -> list[tuple[float, str, float]]:
    """Return times at which each zone was hot."""
    times = []
    for one in series:
        if kind_of(one.channel) != "temp_c":
            continue
        zone = one.channel.partition(":")[2]
        surface = any(word in zone for word in _SURFACES)
        limit = HOT_SURFACE_C if surface else HOT_DIE_C
        times += [(moment, zone, value) for moment, value in _known(one) if value >= limit]
    return sorted(times)


def _capped_while_hot(
    series: TelemetrySeries, hot: Sequence[tuple[float, str, float]]
) -> str | None:
    """Find clocks that over whole hot windows never reach their maximum of the start."""
    samples = _known(series)
    if kind_of(series.channel) not in {"cpu_hz", "ddr_hz", "gpu_hz"} or not hot or not samples:
        return None
    begin = samples[0][0]
    start = max(value for moment, value in samples if moment <= begin + _START_S)
    first_hot, zone, celsius = hot[0]
    since = max(first_hot, begin + _START_S)
    window = [(moment, value) for moment, value in samples if since <= moment <= hot[-1][0] + 1.0]
    if len(window) < _LEAST_SAMPLES or window[-1][0] - window[0][0] < _WINDOW_S:
        return None
    # Of the hot time, the last part: a cap comes after the heat.
    tail = [value for moment, value in window if moment >= window[-1][0] - _WINDOW_S]
    best = max(tail)
    if len(tail) < _LEAST_SAMPLES or best > CAPPED_SHARE * start:
        return None
    return (
        f"{series.channel} reached {start / 1e6:.0f} MHz at the start and no more than "
        f"{best / 1e6:.0f} MHz at {window[-1][0]:.1f} s, with {zone} at {celsius:.0f} C "
        f"since {first_hot:.1f} s"
    )
