"""Metrics that no runtime tells: energy per token, and tails of times, from a run's own records.

**Energy** is that of the whole phone, from the current and voltage of its battery, and only while
the battery discharges: on a charger, its current is what the charger leaves over. The error of a
phase has two parts. That of its mean power is the standard deviation of the gauge's readings over
the root of their number; equal ones in a row are one reading, but one a second at least, as gauges
renew theirs so often. That of its place is half the range over all places where the phase can lie:
a runner's clock tells when the query began, and without one it lies anywhere in the time that
loading, prefill and decode leave of the process.

**Tails** are percentiles by nearest rank, of as many values as make one of them lie beyond.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from buildlib.targets import soc_named
from harness.results.records import ContainerInfo, TelemetrySeries

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DISCHARGING: Final = "battery_discharging"
"""Channel with 1 where the device says that its battery discharges, else 0."""
LEAST_READINGS = 3
MOST_ERROR = 0.25
"""Of an energy; one that is less certain is none."""
_PLACE_ERROR_S = 0.05  # of a clock: two of the kernel's ticks, and the start of a process
_PLACES = 9
_PERCENTILES = (("p50", 0.5, 20), ("p95", 0.95, 20), ("p99", 0.99, 100))


def find_power(series: Sequence[TelemetrySeries]) -> TelemetrySeries | None:
    """Return the battery's power in W, if current and voltage were sampled together.

    Makers disagree on the sign of a current, so only its size counts.
    """
    channels = {one.channel: one for one in series}
    current, voltage = channels.get("battery_a"), channels.get("battery_v")
    if current is None or voltage is None or current.t_s != voltage.t_s:
        return None
    power = tuple(
        None if a is None or v is None else abs(a * v)
        for a, v in zip(current.values, voltage.values, strict=True)
    )
    return TelemetrySeries("battery_w", "W", current.t_s, power)


def find_charge_fault(series: Sequence[TelemetrySeries]) -> str:
    """Say why the battery's power is not the phone's; empty if it is, or was not sampled."""
    if find_power(series) is None:
        return ""
    states = next((one.values for one in series if one.channel == DISCHARGING), ())
    if not states or None in states:
        return "the device does not tell whether its battery discharges"
    return "" if all(states) else "a charger was on: its share of the power is not known"


def measure_energy(
    metrics: Mapping[str, float], series: Sequence[TelemetrySeries], began_s: float | None = None
) -> dict[str, float]:
    """Return the energy of each prompt token and of each token after the first, with its error.

    Args:
        metrics: of one query, the last of its process.
        series: of its process.
        began_s: when the query began, in seconds since the process did; None if nothing tells.
    """
    power, prefill_s = find_power(series), metrics.get("ttft_s", 0.0)
    if power is None or find_charge_fault(series):
        return {}
    known = [(t, w) for t, w in zip(power.t_s, power.values, strict=True) if w is not None]
    if len(known) < LEAST_READINGS or not prefill_s:
        return {}
    import numpy as np

    t, watts = np.array(known).T
    after = metrics.get("generated_tokens", 0.0) - 1
    decode_s = after / metrics.get("decode_tokens_per_s", math.inf)
    if began_s is None:
        loaded = metrics.get("init_s", 0.0)
        latest = max(loaded, t[-1] - prefill_s - decode_s)
        begins = np.linspace(loaded, latest, _PLACES)
    else:
        begins = np.linspace(began_s - _PLACE_ERROR_S, began_s + _PLACE_ERROR_S, _PLACES)
    phases = {
        "prefill": (begins, prefill_s, metrics.get("prompt_tokens", 0.0)),
        "decode": (begins + prefill_s, decode_s, after),
    }
    result = {}
    for name, (starts, seconds, tokens) in phases.items():
        joules, error = _integrate(t, watts, starts, seconds)
        if tokens > 0 and joules > 0 and error <= MOST_ERROR * joules:
            result[f"{name}_energy_j_per_token"] = joules / tokens
            result[f"{name}_energy_j_per_token_error"] = error / tokens
    return result


def _integrate(
    t: "npt.NDArray[np.float64]", watts: "npt.NDArray[np.float64]",
    starts: "npt.NDArray[np.float64]", seconds: float,
) -> tuple[float, float]:  # fmt: skip
    """Return the energy of a phase in J with its error, by the trapezoidal rule; 0 for none."""
    import numpy as np

    middle = float(starts.mean())
    inside = watts[(t >= middle) & (t <= middle + seconds)]
    readings = max(1 + int(np.count_nonzero(np.diff(inside))), int(seconds))
    step = float(np.median(np.diff(t)))
    is_sampled = t[0] - step <= middle <= t[-1] + step - seconds
    if not is_sampled or min(len(inside), readings) < LEAST_READINGS:
        return 0.0, 0.0
    # Before the first sample and after the last, the power is theirs.
    t = np.concatenate(([t[0] - step], t, [t[-1] + step]))
    watts = np.concatenate((watts[:1], watts, watts[-1:]))
    until = np.insert(np.cumsum(np.diff(t) * (watts[1:] + watts[:-1]) / 2), 0, 0.0)
    joules = np.interp(starts + seconds, t, until) - np.interp(starts, t, until)
    of_power = float(np.std(inside, ddof=1)) / math.sqrt(readings) * seconds
    return float(joules.mean()), math.hypot(of_power, float(np.ptp(joules)) / 2)


def find_bandwidth_share(decode_per_s: float, container: ContainerInfo, soc: str) -> float | None:
    """Return the part of the SoC's peak memory bandwidth at which decoding reads the container.

    Each step reads all weights once, so this is how near a decode rate is to its roofline. It
    takes the whole container for them: the embedding table, of which a step reads a row, too, and
    neither activations nor KV cache. None where the size or the bandwidth is not known.

    Args:
        decode_per_s: decode steps in a second: tokens/s over the tokens accepted per step.
    """
    found = soc_named(soc)
    if found is None or found.memory_gb_s is None or not container.size_bytes:
        return None
    return decode_per_s * container.size_bytes / (found.memory_gb_s * 1e9)


def find_tails(name: str, times_s: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of times that there are enough of: `NAME_p50_s`, `NAME_p95_s`, ..."""
    ranked = sorted(times_s)
    return {
        f"{name}_{word}_s": ranked[math.ceil(part * len(ranked)) - 1]
        for word, part, least in _PERCENTILES
        if len(ranked) >= least
    }
