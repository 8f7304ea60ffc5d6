from collections.abc import Callable

import pytest

from harness.results.records import TelemetrySeries
from harness.telemetry.readings import temperatures_of_service
from harness.telemetry.throttling import judge_throttling


def series(
    channel: str, value: Callable[[float], float | None], until: float = 30
) -> TelemetrySeries:
    times = tuple(tick / 10 for tick in range(int(until * 10)))
    unit = "degC" if channel.startswith("temp") else "Hz"
    return TelemetrySeries(channel, unit, times, tuple(value(t) for t in times))


def heating(t: float) -> float:
    return 40 + 2 * t


def test_clocks_that_fall_while_it_is_hot_are_throttling() -> None:
    clock = series("cpu_hz:7", lambda t: 3.0e9 if t < 20 else 1.8e9)
    verdict = judge_throttling([clock, series("temp_c:cpu-0", heating)])
    assert verdict.throttled is True
    assert "cpu_hz:7 reached 3000 MHz at the start and no more than 1800 MHz" in verdict.reasons[0]
    assert "cpu-0 at 70 C" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("clock", "zone", "celsius", "throttled"),
    [
        # A governor lowers the clock of a cool device.
        (lambda t: 3.0e9 if t < 5 else 0.6e9, "cpu-0", lambda _: 45.0, False),
        # The clock still reaches its top when it is hot.
        (lambda t: 3.0e9 if int(t * 10) % 4 == 0 else 0.6e9, "cpu-0", lambda _: 80.0, False),
        # A warm surface counts as hot earlier than a die.
        (lambda t: 3.0e9 if t < 10 else 1.5e9, "skin-therm", lambda _: 44.0, True),
        (lambda t: 3.0e9 if t < 10 else 1.5e9, "cpu-0", lambda _: 44.0, False),
        # Heat that passed does not explain a later idle clock.
        (lambda t: 3.0e9 if t < 10 else 0.6e9, "cpu-0", lambda t: 75.0 if t < 6 else 50.0, False),
    ],
)
def test_low_clocks_are_throttling_only_while_it_is_hot(
    clock: Callable[[float], float], zone: str, celsius: Callable[[float], float], throttled: bool
) -> None:
    both = [series("cpu_hz:7", clock), series(f"temp_c:{zone}", celsius)]
    assert judge_throttling(both).throttled is throttled


def test_a_lowered_cap_is_proof_by_itself() -> None:
    cap = series("cpu_cap_hz:0", lambda t: 3.5e9 if t < 12 else 2.0e9)
    verdict = judge_throttling([cap])
    assert verdict.throttled is True
    assert verdict.reasons == ("cpu_cap_hz:0 fell from 3500 to 2000 MHz at 12.0 s",)


@pytest.mark.parametrize("only", ["cpu_hz:0", "temp_c:cpu", "rss_bytes"])
def test_one_without_the_other_tells_nothing(only: str) -> None:
    one = series(only, lambda _: 1.0e9 if only != "temp_c:cpu" else 90.0)
    assert judge_throttling([one]).throttled is None
    assert judge_throttling([]).throttled is None


def test_what_the_thermal_service_prints_is_read_strictly() -> None:
    output = (
        "IsStatusOverride: false\nThermal Status: 2\nCached temperatures:\n"
        "\tTemperature{mValue=50.0, mType=0, mName=cpu0, mStatus=0}\nHAL Ready: true\n"
        "Current temperatures from HAL:\n"
        "\tTemperature{mValue=61.5, mType=0, mName=cpu0, mStatus=2}\n"
        "\tTemperature{mValue=31.2, mType=3, mName=skin, mStatus=0}\n"
        "\tTemperature{mValue=87.0, mType=6, mName=vbat, mStatus=0}\n"
        "\tTemperature{mValue=0.0, mType=1, mName=gpu, mStatus=0}\n"
        "\tTemperature{mValue=NaN, mType=1, mName=gpu2, mStatus=0}\n"
        "\tTemperature{mValue=999, mType=1, mName=gpu3, mStatus=0}\n"
    )
    assert temperatures_of_service(output) == {"cpu0": 61.5, "skin": 31.2}
    assert temperatures_of_service("Can't find service: thermalservice") == {}
