"""Verdicts over stored runs: only what ran side by side is compared."""

from pathlib import Path

import pytest
from sqlalchemy import update

from harness.errors import CorruptRunError, MetricError, WrongUseError
from harness.results import schema
from harness.results.comparison import (
    check_metrics,
    compare_runs,
    find_comparisons,
)
from harness.results.metrics import (
    COMPARABLE_METRICS,
    LEADING_METRICS,
    METRICS,
    Direction,
    find_metric,
)
from harness.results.records import ComparisonRecord, Run
from harness.results.store import ResultsStore
from harness.results.verdicts import Verdict
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


def together(runs: list[Run]) -> list[Run]:
    return [run.model_copy(update={"group_id": runs[0].group_id}) for run in runs]


def on(run: Run, **changes: object) -> Run:
    return run.model_copy(update={"device": run.device.model_copy(update=changes)})


def test_the_worst_metric_decides() -> None:
    compared = compare_runs(sessions("ttft_s", 0.5, 0.6), metrics=("ttft_s",))
    assert compared.verdict is Verdict.REGRESSED


def test_the_verdict_is_the_one_that_was_given(tmp_path: Path) -> None:
    """A loss of 8 % that `compare --metric ttft_s --threshold 0.1` allowed is none in reports."""
    runs = together(sessions("ttft_s", 0.5, 0.54))
    terms = ComparisonRecord(group_id=runs[0].group_id, metrics=("ttft_s",), threshold=0.1)
    given = compare_runs(runs, metrics=terms.metrics, threshold=terms.threshold)
    assert given.verdict is Verdict.NO_DIFFERENCE
    assert compare_runs(runs, metrics=("ttft_s",)).verdict is Verdict.REGRESSED
    with ResultsStore.open(tmp_path / "r.db") as store:
        for run in runs:
            store.write_run(run)
        store.write_comparison(terms)  # and Ctrl-C
        (unfinished,) = find_comparisons(store.list_runs(), store.comparisons())
        store.write_comparison(given.record)
        (finished,) = find_comparisons(store.list_runs(), store.comparisons())
    assert [m.key for m, _ in unfinished.metrics] == ["ttft_s"]
    assert (unfinished.verdict, finished.verdict) == (given.verdict, given.verdict)
    assert (finished.metrics, finished.threshold) == (given.metrics, 0.1)


def test_a_stored_verdict_stays_what_it_was() -> None:
    """Even where this version would judge otherwise."""
    runs = together(sessions("ttft_s", 0.5, 0.6))
    record = compare_runs(runs, metrics=("ttft_s",)).record
    other = record.verdicts[0].model_copy(update={"verdict": "improved"})
    stored = {record.group_id: record.model_copy(update={"verdicts": (other,)})}
    (group,) = find_comparisons(runs, stored)
    assert group.verdict is Verdict.IMPROVED


def test_a_damaged_comparison_is_refused(tmp_path: Path) -> None:
    record = compare_runs(sessions("ttft_s", 0.5, 0.6), metrics=("ttft_s",)).record
    with ResultsStore.open(tmp_path / "r.db") as store:
        store.write_comparison(record)
        with store.database.writing() as connection:
            connection.execute(update(schema.comparisons).values(metrics=["nothing"]))
        with pytest.raises(CorruptRunError, match="nothing"):
            store.comparisons()


def test_emulator_and_hardware_are_never_compared() -> None:
    first, *others = sessions("decode_tokens_per_s", 20.0, 15.0)
    with pytest.raises(WrongUseError, match="emulator"):
        compare_runs([on(first, emulator=True), *others])


def test_the_emulator_is_judged_as_everything_else_is() -> None:
    """As by gate and alerts; each command labels it."""
    runs = [on(run, emulator=True) for run in together(sessions("ttft_s", 0.5, 0.9))]
    assert compare_runs(runs, metrics=("ttft_s",)).verdict is Verdict.REGRESSED


def test_a_pair_is_on_one_device() -> None:
    runs = [on(run, serial=f"phone {run.label}") for run in sessions("ttft_s", 0.5, 0.6)]
    ((_, found),) = compare_runs(runs, metrics=("ttft_s",)).metrics
    assert (found.verdict, found.pairs) == (Verdict.NO_VERDICT, 0)


def test_nothing_pushed_is_no_ratio_and_no_crash() -> None:
    runs = sessions("push_bytes", 0.0, 0.0)
    ((_, found),) = compare_runs(runs, metrics=("push_bytes",)).metrics
    assert (found.verdict, found.ratio, found.pairs) == (Verdict.NO_VERDICT, None, 6)
    assert "is 0" in found.reason


@pytest.mark.parametrize("key", sorted(set(METRICS) - set(COMPARABLE_METRICS)))
def test_what_the_runtime_does_not_decide_is_not_judged(key: str) -> None:
    with pytest.raises(WrongUseError) as caught:
        check_metrics([*LEADING_METRICS, key])
    assert str(caught.value).startswith(f"{key} is not a speed, ")
    assert str(caught.value).endswith(": compare " + ", ".join(COMPARABLE_METRICS))


def test_speeds_latencies_and_memory_are_judged() -> None:
    assert check_metrics([*COMPARABLE_METRICS, *COMPARABLE_METRICS]) == COMPARABLE_METRICS
    assert check_metrics(["prefill", "ttft"]) == ("prefill_tokens_per_s", "ttft_s")
    with pytest.raises(MetricError, match="unknown metric 'pe': known are "):
        check_metrics(["pe"])  # several begin so
    assert all(find_metric(key).direction is not Direction.NEITHER for key in COMPARABLE_METRICS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": {"soc": "SM8650"}}, r"soc \(SM8750 against SM8650\)"),
        ({"device": {"model": "another"}}, "device model"),
        ({"workload": {"runner": "genie-app"}}, "runner"),
        ({"workload": {"depth_tokens": 512}}, r"workload \(pp\S+ against pp\S+ @ d512\)"),
        ({"workload": {"sampler": {"greedy": False}}}, r"greedy \(True against False\)"),
        ({"provenance": {"library_versions": {"genie": "9.9"}}}, r"genie \(\S+ against 9\.9\)"),
        ({"container": {"target": "SM8650"}}, r"target SoC \(SM8750 against SM8650\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_comparable_is_never_compared_and_the_keys_are_named(
    change: dict[str, dict[str, object]], said: str
) -> None:
    runs = together(sessions("decode_tokens_per_s", 20.0, 15.0))
    ((part, values),) = change.items()
    other = getattr(runs[1], part).model_copy(update=values)
    runs[1] = runs[1].model_copy(update={part: other})
    with pytest.raises(WrongUseError, match=said) as caught:
        compare_runs(runs)
    assert "\n" not in str(caught.value)
    (stored,) = find_comparisons(runs)
    assert {found.verdict for _, found in stored.metrics} == {Verdict.NO_VERDICT}
    assert all("not comparable" in found.reason for _, found in stored.metrics)


def test_containers_and_tools_of_the_host_may_differ() -> None:
    runs = sessions("decode_tokens_per_s", 20.0, 15.0)
    container = runs[1].container.model_copy(update={"precision": "W8A16", "sha256": "b" * 64})
    versions = {**runs[1].provenance.library_versions, "numpy": "0.0"}
    source = runs[1].provenance.model_copy(update={"library_versions": versions})
    runs[1] = runs[1].model_copy(update={"container": container, "provenance": source})
    assert compare_runs(runs).verdict is Verdict.REGRESSED
