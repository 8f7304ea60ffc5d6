"""The numbers of a benchmark, and the options that stand for conditions and devices."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli.bench_options import BenchOptions
from harness.cli.device_lease import device_source
from harness.errors import HarnessError, WrongUseError
from harness.results.derived import DISCHARGING
from harness.results.records import TelemetrySeries
from harness.results.store import ResultsStore
from harness.runtimes.base import GenerationResult
from harness.workloads.bench import Bench, _repeat
from tests.harness.results.places import make_run


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


def test_no_gate_is_no_condition() -> None:
    assert BenchOptions(no_gate=True).conditioning() is None
    assert BenchOptions().conditioning() is not None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_temp": 35.0, "no_gate": True}, "--no-gate"),
        ({"charge": "20-80", "no_gate": True}, "--no-gate"),
        ({"max_temp": 500.0}, "max_temp_c"),
        *(
            ({"charge": charge}, "window of charge")
            for charge in ("", "20", "80-20", "20-101", "20-20", "a-b", "20-80; reboot")
        ),
    ],
)
def test_conditions_that_no_device_meets_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(HarnessError, match=told):
        BenchOptions(**options).conditioning()


def test_reference_tokens_come_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    path.write_text("[5, 6]")
    bench = BenchOptions(reference_tokens=path, max_perplexity="20").workload(64, 16)
    assert (bench.reference_tokens, bench.max_perplexity) == (str(path), 20.0)
    assert bench.warmup == "auto"
    path.write_text("[5, x]")
    with pytest.raises(WrongUseError, match="not a token id"):
        BenchOptions(reference_tokens=path).workload(64, 16)


def test_named_devices_take_turns() -> None:
    """`local` is a device that needs neither an adb server nor a phone."""
    with device_source(["local"], None, command="bench", wait_s=5) as source:
        for number in range(2):
            with source(number, "SM8750") as device:
                assert device.type == "local"


def test_a_session_has_tails_of_its_ttft_and_says_why_it_has_no_energy(tmp_path: Path) -> None:
    """Of 24 repetitions, four are warm-ups; the charger that was on is told once."""
    gauge = [TelemetrySeries(f"battery_{unit}", unit.upper(), (0.0,), (1.0,)) for unit in "av"]
    series = (*gauge, TelemetrySeries(DISCHARGING, "", (0.0,), (0.0,)))
    answers = (
        GenerationResult("", {"ttft_s": 1.0 if n < 4 else n / 1000}, series) for n in range(24)
    )
    session: Any = SimpleNamespace(options=SimpleNamespace(on_repetition=None))
    bench = Bench(repetitions=20, warmup=4)
    with ResultsStore.open(tmp_path / "results.db") as store:
        run = make_run(status="running", measurements=())
        with store.recording(run) as recorder:
            _repeat(bench, session, recorder, answers, None)
        kept = store.get_run(run.id)
    assert (kept.values("ttft_p50_s"), kept.values("ttft_p95_s")) == ((0.013,), (0.022,))
    assert kept.values("ttft_p99_s") == ()
    (condition,) = (one for one in kept.conditions if one["name"] == "energy")
    assert condition["outcome"] == "unavailable"
    assert "a charger was on" in str(condition["reason"])
