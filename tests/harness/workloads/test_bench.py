"""The numbers of a benchmark, and the options that stand for conditions and devices."""

from pathlib import Path

import pytest

from harness.cli.bench_options import QualityOptions, bench_workload, conditioning
from harness.cli.device_lease import device_source
from harness.errors import HarnessError, WrongUseError
from harness.workloads.bench import Bench


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_tokens", 1),
        ("new_tokens", 0),
        ("repetitions", 0),
        ("warmup", -1),
        ("most_warmups", -1),
    ],
)
def test_numbers_that_make_no_sense_are_named(name: str, value: int) -> None:
    with pytest.raises(WrongUseError, match=f"{name}: must be at least") as caught:
        Bench.of(**{name: value})
    assert "\n" not in str(caught.value)


def test_a_session_is_never_longer_than_it_says() -> None:
    assert Bench(repetitions=3).most_repetitions == 6
    assert Bench(repetitions=3, warmup=1).most_repetitions == 4
    assert Bench(repetitions=3, most_warmups=0).most_repetitions == 3


def test_no_gate_is_no_condition_and_goes_with_none() -> None:
    assert conditioning(max_temp=None, charge=None, no_gate=True) is None
    assert conditioning(max_temp=None, charge=None, no_gate=False) is not None
    for asked in ({"max_temp": 35.0, "charge": None}, {"max_temp": None, "charge": "20-80"}):
        with pytest.raises(WrongUseError, match="--no-gate"):
            conditioning(**asked, no_gate=True)


@pytest.mark.parametrize("charge", ["", "20", "80-20", "20-101", "20-20", "a-b", "20-80; reboot"])
def test_a_window_of_charge_is_two_percentages(charge: str) -> None:
    with pytest.raises(WrongUseError, match="window of charge"):
        conditioning(max_temp=None, charge=charge, no_gate=False)


def test_a_temperature_that_no_device_has_is_refused() -> None:
    with pytest.raises(HarnessError, match="max_temp_c"):
        conditioning(max_temp=500.0, charge=None, no_gate=False)


def test_reference_tokens_come_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    path.write_text("[5, 6]")
    bench = bench_workload(64, 16, 3, None, 3, path, QualityOptions("20", None, None, None))
    assert (bench.reference_tokens, bench.max_perplexity) == (str(path), 20.0)
    assert bench.warmup == "auto"
    path.write_text("[5, x]")
    with pytest.raises(WrongUseError, match="not a token id"):
        bench_workload(64, 16, 3, None, 3, path, QualityOptions(None, None, None, None))


def test_named_devices_take_turns() -> None:
    """`local` is a device that needs neither an adb server nor a phone."""
    with device_source(["local"], None, command="bench", wait_s=5) as source:
        for number in range(2):
            with source(number, "SM8750") as device:
                assert device.type == "local"
