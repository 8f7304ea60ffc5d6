"""A against B on a real virtual device: in turns, on one device a pair, under one group."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from harness.devices.device import Device
from harness.errors import MetricError, OutputCheckError, WrongUseError
from harness.results.comparison import check_metrics, check_pairs
from harness.results.metrics import COMPARABLE_METRICS, Measurement
from harness.results.store import LazyResultsStore, RunFilter
from harness.results.verdicts import Verdict
from harness.runtimes.genie.runtime import GenieModel
from harness.runtimes.registry import open_model
from harness.workloads.bench import Bench
from harness.workloads.bench_series import BenchSeries
from harness.workloads.session import Session
from tests.harness.results.places import make_run


def test_sides_take_turns_on_the_same_device(
    virtual_device: Device, small_bundle: Path, tmp_path: Path
) -> None:
    held: list[int] = []

    @contextmanager
    def devices(number: int, _soc: str, _container: str = "") -> Iterator[Device]:
        held.append(number)
        yield virtual_device

    model = open_model(small_bundle)
    bench = Bench(prompt_tokens=4, new_tokens=2, repetitions=1, warmup=0)
    with LazyResultsStore(str(tmp_path / "results.db")) as store:
        series = BenchSeries(devices, store)
        with pytest.raises(WrongUseError, match="at least 1"):
            series.compare(bench, model, model, sessions=0)
        assert store.existing is None
        compared = series.compare(
            bench, model, model, sessions=2, metrics=("init_s",), threshold=0.5
        )
        runs = compared.runs
        assert store.existing is not None
        stored = store.existing.list_runs(RunFilter(group_ids=[runs[0].group_id]))
        (kept,) = store.existing.comparisons().values()
    assert kept.verdicts == compared.record.verdicts
    assert (kept.group_id, kept.metrics, kept.threshold) == (runs[0].group_id, ("init_s",), 0.5)
    assert held == [0, 1]
    assert [(run.session, run.label) for run in runs] == [(0, "A"), (0, "B"), (1, "B"), (1, "A")]
    assert {run.id for run in stored} == {run.id for run in runs}
    assert (compared.verdict, compared.threshold) == (Verdict.NO_VERDICT, 0.5)
    for _, found in compared.metrics:
        assert found.pairs == 2
        assert found.ratio is not None


def test_a_side_that_its_perplexity_fails_is_refused_before_the_other_runs(
    virtual_device: Device, small_bundle: Path, tmp_path: Path
) -> None:
    a = GenAIContainer.load(small_bundle)
    b = copy.copy(a)
    other = a.metadata.model_copy(update={"container_sha256": "b" * 64})
    object.__setattr__(b, "metadata", other)

    @contextmanager
    def devices(_number: int, _soc: str, _container: str = "") -> Iterator[Device]:
        yield virtual_device

    bench = Bench(prompt_tokens=4, new_tokens=2, repetitions=1, warmup=0)
    with LazyResultsStore(str(tmp_path / "results.db")) as store:
        known = make_run(
            kind="perplexity",
            status="done",
            container=GenieModel(b).info,
            device=Session(virtual_device).device_info,
            measurements=[
                Measurement(metric="perplexity", value=20.0),
                Measurement(metric="perplexity_float", value=10.0),
            ],
        )
        store.open().write_run(known)
        with pytest.raises(OutputCheckError, match=r"\+100.0% .* --max-perplexity 100% accepts it"):
            BenchSeries(devices, store).compare(bench, GenieModel(a), GenieModel(b), sessions=2)
        (run,) = store.open().list_runs(RunFilter(kind="bench"))
    assert (run.label, run.status, run.check.outcome) == ("B", "failed", "failed")


def test_only_what_has_a_better_side_can_be_judged() -> None:
    assert check_metrics(["ttft_s", "ttft_s"]) == ("ttft_s",)
    with pytest.raises(WrongUseError, match="is not a speed"):
        check_metrics(["prompt_tokens"])
    with pytest.raises(MetricError, match="'foo': known are " + ", ".join(COMPARABLE_METRICS)):
        check_metrics(["foo"])


@pytest.mark.parametrize(("metrics", "needed"), [(1, 5), (2, 6), (5, 7)])
def test_as_many_pairs_as_chance_asks_for(metrics: int, needed: int) -> None:
    check_pairs(needed, metrics)
    with pytest.raises(WrongUseError, match=f"needs at least {needed} pairs"):
        check_pairs(needed - 1, metrics)
