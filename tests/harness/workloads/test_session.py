"""A session on a real virtual device: warm-up, check, conditions, telemetry, all of it kept."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from harness.deploy.deployment import Deployment
from harness.devices.device import Device
from harness.errors import OutputCheckError
from harness.results.records import Condition, Run, TelemetrySeries
from harness.results.store import LazyResultsStore, ResultsStore
from harness.runtimes.base import Generates, GenerationRequest, GenerationResult, Runtime, Scores
from harness.runtimes.registry import open_model
from harness.telemetry.sampler import DEFAULT_HZ
from harness.workloads.base import Recording
from harness.workloads.bench import Bench
from harness.workloads.bench_prompt import cut_prompt
from harness.workloads.bench_series import BenchSeries
from harness.workloads.session import Session, SessionOptions

BENCH = Bench(prompt_tokens=16, new_tokens=4)


@pytest.fixture(scope="module")
def session(virtual_device: Device, small_bundle: Path) -> Iterator[Session]:
    with Session(virtual_device, open_model(small_bundle)) as opened:
        opened.runtime.prepare()
        yield opened


@pytest.fixture(scope="module")
def answer(session: Session) -> GenerationResult:
    """What the device really answers to the benchmark's query."""
    prompt = cut_prompt(session.model.tokenizer, BENCH.prompt_tokens - 1)
    request = GenerationRequest(BENCH.new_tokens, token_ids=prompt.token_ids)
    return session.require(Generates).generate(request)


def run_bench(
    session: Session,
    store: ResultsStore,
    bench: Bench = BENCH,
    *,
    runtime: Runtime | None = None,
    options: SessionOptions | None = None,
) -> Run:
    """Run a benchmark in the session, or in one that differs in runtime or options."""
    other = Session(session.device, session.model, options, runtime=runtime or session.runtime)
    return bench.run(other, Recording(lambda: store)).output


class Scripted:
    """The device's runtime, whose later answers are the first one with other speeds.

    The device, its deployment and its answer are real; only speeds that cannot be had on request
    (steady ones, drifting ones) are put in.
    """

    name: ClassVar[str] = "scripted"

    def __init__(self, session: Session, answer: GenerationResult, speeds: Sequence[float]) -> None:
        self._answer = answer
        self._speeds = iter(speeds)
        self.added_tokens = session.require(Generates).added_tokens
        self.runner = session.runtime.runner
        self.positions = session.require(Scores).positions
        self.prepare = session.runtime.prepare
        self.versions = session.runtime.versions
        self.score = session.require(Scores).score
        self.sha256_of = session.runtime.sha256_of
        self.read_log = session.runtime.read_log
        self.clean = session.runtime.clean

    def generate(self, request: GenerationRequest) -> GenerationResult:
        del request
        speed = next(self._speeds)
        metrics = {"prefill_tokens_per_s": speed, "decode_tokens_per_s": speed / 10}
        return replace(self._answer, metrics={**self._answer.metrics, **metrics})


@pytest.mark.parametrize(
    ("speeds", "warmups", "detected", "changes"),
    [
        ([100, 101, 100], [], True, {}),
        ([50, 100, 101, 100], [50], True, {}),
        ([50, 80, 100, 101, 100], [50, 80], True, {}),
        ([10, 20, 40, 80, 160, 320], [10, 20, 40], False, {}),
        ([10, 20, 40], [10, 20], None, {"warmup": 2, "repetitions": 1}),
    ],
)
def test_warmup_is_as_long_as_it_takes_or_as_it_is_given(
    session: Session,
    store: ResultsStore,
    answer: GenerationResult,
    speeds: list[float],
    warmups: list[float],
    detected: bool | None,
    changes: dict[str, object],
) -> None:
    runtime = Scripted(session, answer, speeds)
    run = run_bench(session, store, BENCH.model_copy(update=changes), runtime=runtime)
    assert run.values("prefill_tokens_per_s") == tuple(speeds[len(warmups) :])
    assert run.values("prefill_tokens_per_s", warmup=True) == tuple(warmups)
    assert (run.warmup_detected, run.workload.warmup) == (detected, len(warmups))


def test_conditions_and_telemetry_are_kept_with_the_run(
    session: Session, store: ResultsStore, answer: GenerationResult
) -> None:
    seen: list[str] = []

    @contextmanager
    def prepare(_device: object, deployment: Deployment) -> Iterator[Sequence[Condition]]:
        seen.append(deployment.run_dir)
        yield [{"name": "thermal_gate", "outcome": "met", "waited_s": 1.5, "reason": "31 < 35"}]
        seen.append("restored")

    times = tuple(n / 10 for n in range(30))
    clock = tuple(2e9 if n < 15 else 1e9 for n in range(30))
    series = TelemetrySeries("cpu_cap_hz:7", "Hz", times, clock)
    answer = replace(answer, telemetry=(series,))
    runtime = Scripted(session, answer, [100] * 3)
    run = run_bench(session, store, runtime=runtime, options=SessionOptions(prepare=prepare))
    assert seen[1:] == ["restored"]
    assert run.conditions[0]["waited_s"] == 1.5
    assert run.conditions[1] == {
        "name": "throttling",
        "outcome": "seen",
        "reason": "repetition 1: cpu_cap_hz:7 fell from 2000 to 1000 MHz at 1.5 s",
    }
    kept = store.telemetry(run.id)
    assert [(one.repetition, one.is_warmup) for one in kept] == [(0, False), (1, False), (2, False)]


def reference_file(folder: Path, token_ids: Sequence[int]) -> SessionOptions:
    (folder / "reference.txt").write_text(" ".join(map(str, token_ids)))
    return SessionOptions(folder=folder)


def test_fast_garbage_is_a_failure(
    session: Session, store: ResultsStore, answer: GenerationResult, tmp_path: Path
) -> None:
    """The reference tokens are others than this model generates, from the second on."""
    assert answer.token_ids is not None
    options = reference_file(tmp_path, (answer.token_ids[0], 299, 299, 299))
    bench = BENCH.model_copy(update={"reference_tokens": "reference.txt"})
    with pytest.raises(OutputCheckError) as caught:
        run_bench(session, store, bench, options=options)
    (run,) = store.list_runs()
    assert run.status == "failed"
    assert run.check.outcome == "failed"
    assert run.values("prefill_tokens_per_s") == ()
    assert run.values("prefill_tokens_per_s", warmup=True) == ()
    assert run.error == str(caught.value)
    assert "differs from reference.txt at token" in run.error


def test_the_right_tokens_pass(
    session: Session, store: ResultsStore, answer: GenerationResult, tmp_path: Path
) -> None:
    assert answer.token_ids is not None
    options = reference_file(tmp_path, answer.token_ids)
    bench = BENCH.model_copy(
        update={"reference_tokens": "reference.txt", "repetitions": 1, "warmup": 0}
    )
    run = run_bench(session, store, bench, options=options)
    assert (run.check.outcome, run.check.reason) == ("passed", "the tokens of reference.txt")


def test_a_perplexity_bound_is_measured_once_and_then_taken_from_the_store(
    session: Session, store: ResultsStore, answer: GenerationResult
) -> None:
    runtime = Scripted(session, answer, [100] * 4)
    good = BENCH.model_copy(update={"max_perplexity": 1e6})
    run = run_bench(session, store, good, runtime=runtime)
    assert run.check.outcome == "passed"
    assert [run.kind for run in store.list_runs()] == ["perplexity", "bench"]
    bad = BENCH.model_copy(update={"max_perplexity": 1.01})
    with pytest.raises(OutputCheckError, match=r"above the bound of 1\.01"):
        run_bench(session, store, bad, runtime=runtime)
    assert len([run for run in store.list_runs() if run.kind == "perplexity"]) == 1


def test_sessions_are_prepared_anew_and_agree(
    virtual_device: Device, small_bundle: Path, store: ResultsStore
) -> None:
    folders: list[str] = []
    numbers: list[int] = []

    @contextmanager
    def devices(number: int, soc: str, _container: str = "") -> Iterator[Device]:
        assert soc == "SM8750"
        numbers.append(number)
        yield virtual_device

    @contextmanager
    def prepare(_device: object, deployment: Deployment) -> Iterator[Sequence[Condition]]:
        folders.append(deployment.run_dir)
        yield ()

    bench = Bench(prompt_tokens=8, new_tokens=2, repetitions=1, warmup=0)
    options = SessionOptions(telemetry_hz=DEFAULT_HZ, prepare=prepare)
    store_of_series = LazyResultsStore(store.location)
    series = BenchSeries(devices, store_of_series, options, labels={"team": "camera"})
    longer = bench.model_copy(update={"prompt_tokens": 12})
    model = open_model(small_bundle)
    measured = list(series.run([(model, bench), (model, longer)], sessions=2))
    assert numbers == [0, 0, 1, 1]
    assert [index for index, _ in measured] == [0, 1, 0, 1]  # they take turns
    assert [run.workload.prompt_tokens for _, run in measured] == [8, 12, 8, 12]
    assert len({run.group_id for _, run in measured}) == 2
    assert {tuple(run.labels.items()) for _, run in measured} == {(("team", "camera"),)}
    runs = [run for index, run in measured if index == 0]
    assert len(set(folders)) == 4
    assert [(run.session, run.group_id) for run in runs] == [
        (0, runs[0].group_id),
        (1, runs[0].group_id),
    ]
    assert runs[1].check.outcome == "none"
    assert "whose output nothing checked" in runs[1].check.reason
    for run in runs:
        channels = {one.channel for each in store.telemetry(run.id) for one in each.series}
        assert "rss_bytes" in channels
    for folder in folders:
        assert virtual_device.shell(["ls", folder], check=False).exit_status != 0
