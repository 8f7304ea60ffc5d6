"""Verdicts over stored runs: only what ran side by side is compared."""

import pytest

from harness.errors import WrongUseError
from harness.results.comparison import (
    COMPARABLE_METRICS,
    DEFAULT_METRICS,
    Verdict,
    check_metrics,
    compare_runs,
)
from harness.results.metrics import METRICS, Direction, find_metric
from harness.results.records import Run
from tests.reports.conftest import Sample

_PHONE = Sample("SM8750", emulator=False)


def sessions(metric: str, a: float, b: float, pairs: int = 6) -> list[Run]:
    """Sessions that took turns, each with a warm-up and two repetitions."""
    return [
        _PHONE.run(
            2 * number + (side == "B"), "bench", {metric: [value * (1 + number / 1000)] * 3},
            session=number, label=side,
        )
        for number in range(pairs)
        for side, value in (("A", a), ("B", b))
    ]  # fmt: skip


def on(run: Run, **changes: object) -> Run:
    return run.model_copy(update={"device": run.device.model_copy(update=changes)})


def test_the_worst_metric_decides() -> None:
    compared = compare_runs(sessions("ttft_s", 0.5, 0.6), metrics=("ttft_s",))
    assert compared.verdict is Verdict.REGRESSED


def test_emulator_and_hardware_are_never_compared() -> None:
    first, *others = sessions("decode_tokens_per_s", 20.0, 15.0)
    with pytest.raises(WrongUseError, match="emulator"):
        compare_runs([on(first, emulator=True), *others])


def test_a_pair_is_on_one_device() -> None:
    runs = [on(run, serial=f"phone {run.label}") for run in sessions("ttft_s", 0.5, 0.6)]
    ((_, found),) = compare_runs(runs, metrics=("ttft_s",)).metrics
    assert (found.verdict, found.pairs) == (Verdict.NOT_ENOUGH_DATA, 0)


def test_nothing_pushed_is_no_ratio_and_no_crash() -> None:
    runs = sessions("push_bytes", 0.0, 0.0)
    ((_, found),) = compare_runs(runs, metrics=("push_bytes",)).metrics
    assert (found.verdict, found.ratio, found.pairs) == (Verdict.NOT_ENOUGH_DATA, None, 6)
    assert "is 0" in found.reason


@pytest.mark.parametrize("key", sorted(set(METRICS) - set(COMPARABLE_METRICS)))
def test_what_the_runtime_does_not_decide_is_not_judged(key: str) -> None:
    with pytest.raises(WrongUseError) as caught:
        check_metrics([*DEFAULT_METRICS, key])
    assert str(caught.value).startswith(f"{key} is not a speed, ")
    assert str(caught.value).endswith(": compare " + ", ".join(COMPARABLE_METRICS))


def test_speeds_latencies_and_memory_are_judged() -> None:
    assert check_metrics([*COMPARABLE_METRICS, *COMPARABLE_METRICS]) == COMPARABLE_METRICS
    assert all(find_metric(key).direction is not Direction.NEITHER for key in COMPARABLE_METRICS)
