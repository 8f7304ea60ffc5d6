"""Verdicts over stored runs: only what ran side by side is compared."""

import pytest

from harness.errors import WrongUseError
from harness.results.comparison import GATED, JUDGED, Verdict, check_gated, judge_runs
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
    compared = judge_runs(sessions("ttft_s", 0.5, 0.6), gated=("ttft_s",))
    assert compared.verdict is Verdict.REGRESSED


def test_emulator_and_hardware_are_never_compared() -> None:
    first, *others = sessions("decode_tokens_per_s", 20.0, 15.0)
    with pytest.raises(WrongUseError, match="emulator"):
        judge_runs([on(first, emulator=True), *others])


def test_a_pair_is_on_one_device() -> None:
    runs = [on(run, serial=f"phone {run.label}") for run in sessions("ttft_s", 0.5, 0.6)]
    ((_, found),) = judge_runs(runs, gated=("ttft_s",)).metrics
    assert (found.verdict, found.pairs) == (Verdict.NOT_ENOUGH_DATA, 0)


def test_nothing_pushed_is_no_ratio_and_no_crash() -> None:
    runs = sessions("push_bytes", 0.0, 0.0)
    ((_, found),) = judge_runs(runs, gated=("push_bytes",)).metrics
    assert (found.verdict, found.ratio, found.pairs) == (Verdict.NOT_ENOUGH_DATA, None, 6)
    assert "is 0" in found.reason


@pytest.mark.parametrize("key", sorted(set(METRICS) - set(JUDGED)))
def test_what_the_runtime_does_not_decide_is_not_judged(key: str) -> None:
    with pytest.raises(WrongUseError) as caught:
        check_gated([*GATED, key])
    assert str(caught.value).startswith(f"{key} is neither ")
    assert str(caught.value).endswith(": judge by " + ", ".join(JUDGED))


def test_speeds_latencies_and_memory_are_judged() -> None:
    assert check_gated([*JUDGED, *JUDGED]) == JUDGED
    assert all(find_metric(key).direction is not Direction.NEITHER for key in JUDGED)
