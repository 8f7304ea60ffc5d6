"""A session on a real virtual device: warm-up, check, conditions, telemetry, all of it kept."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from harness.deploy.deployment import Deployment
from harness.devices.adb.device import AdbDevice
from harness.errors import OutputCheckError
from harness.results.records import Condition, TelemetrySeries
from harness.results.store import ResultsStore
from harness.runtimes.base import GenerationRequest, GenerationResult
from harness.workloads.bench import BenchPlan, Spread, run_sessions
from harness.workloads.expectations import Wanted, expecting
from harness.workloads.session import SessionPlan, run_session
from harness.workloads.target import Target, target_on

Change = Callable[[int, GenerationResult], GenerationResult]


@pytest.fixture(scope="module")
def target(virtual_device: AdbDevice, tiny_bundle: Path) -> Iterator[Target]:
    with target_on(virtual_device, GenAIContainer.load(tiny_bundle)) as found:
        found.runtime.prepare()
        yield found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResultsStore]:
    with ResultsStore.open(tmp_path / "results.db") as opened:
        yield opened


@pytest.fixture(scope="module")
def answer(target: Target) -> GenerationResult:
    """What the device really answers to the benchmark's query."""
    plan = plan_for(target)
    return target.runtime.generate(
        GenerationRequest(plan.new_tokens, token_ids=plan.prompt.token_ids)
    )


def plan_for(target: Target, **changes: object) -> SessionPlan:
    plan = BenchPlan(prompt_tokens=16, new_tokens=4).session_of(target.container)
    return replace(plan, **changes)  # type: ignore[arg-type]


class Scripted:
    """The device's runtime, whose later answers are the first one with other speeds.

    The device, its deployment and its answer are real; only speeds that cannot be had on request
    (steady ones, drifting ones) are put in.
    """

    def __init__(self, target: Target, answer: GenerationResult, speeds: Sequence[float]) -> None:
        self._runtime = target.runtime
        self._answer = answer
        self._speeds = iter(speeds)
        self.runner = target.runtime.runner
        self.perplexity_runner = target.runtime.perplexity_runner
        self.positions = target.runtime.positions
        self.prepare = target.runtime.prepare
        self.versions = target.runtime.versions
        self.check_room = target.runtime.check_room
        self.windows = target.runtime.windows
        self.score = target.runtime.score
        self.clean = target.runtime.clean

    def generate(self, request: GenerationRequest) -> GenerationResult:
        del request
        speed = next(self._speeds)
        metrics = {"prefill_tokens_per_s": speed, "decode_tokens_per_s": speed / 10}
        return replace(self._answer, metrics={**self._answer.metrics, **metrics})


@pytest.mark.parametrize(
    ("speeds", "warmups", "detected"),
    [
        ([100, 101, 100], [], True),
        ([50, 100, 101, 100], [50], True),
        ([50, 80, 100, 101, 100], [50, 80], True),
        ([10, 20, 40, 80, 160, 320], [10, 20, 40], False),
    ],
)
def test_warmup_is_as_long_as_it_takes(
    target: Target,
    store: ResultsStore,
    answer: GenerationResult,
    speeds: list[float],
    warmups: list[float],
    *,
    detected: bool,
) -> None:
    runtime = Scripted(target, answer, speeds)
    run = run_session(runtime, plan_for(target), target.records(), store)
    assert run.values("prefill_tokens_per_s") == tuple(speeds[len(warmups) :])
    assert run.values("prefill_tokens_per_s", warmup=True) == tuple(warmups)
    assert (run.warmup_detected, run.workload.warmup) == (detected, len(warmups))


def test_a_given_warmup_is_kept_to(
    target: Target, store: ResultsStore, answer: GenerationResult
) -> None:
    runtime = Scripted(target, answer, [10, 20, 40])
    plan = plan_for(target, warmup=2, repetitions=1)
    run = run_session(runtime, plan, target.records(), store)
    assert run.values("prefill_tokens_per_s") == (40,)
    assert (run.warmup_detected, run.workload.warmup) == (None, 2)


def test_conditions_and_telemetry_are_kept_with_the_run(
    target: Target, store: ResultsStore, answer: GenerationResult
) -> None:
    seen: list[str] = []

    @contextmanager
    def around(deployment: Deployment) -> Iterator[Sequence[Condition]]:
        seen.append(deployment.run_dir)
        yield [{"name": "thermal_gate", "outcome": "met", "waited_s": 1.5, "reason": "31 < 35"}]
        seen.append("restored")

    times = tuple(n / 10 for n in range(30))
    clock = tuple(2e9 if n < 15 else 1e9 for n in range(30))
    series = TelemetrySeries("cpu_cap_hz:7", "Hz", times, clock)
    answer = replace(answer, telemetry=(series,))
    runtime = Scripted(target, answer, [100] * 3)
    plan = plan_for(target, around=around)
    run = run_session(runtime, plan, target.records(), store)
    assert seen[1:] == ["restored"]
    assert run.conditions[0]["waited_s"] == 1.5
    assert run.conditions[1] == {
        "name": "throttling",
        "outcome": "seen",
        "reason": "repetition 1: cpu_cap_hz:7 fell from 2000 to 1000 MHz at 1.5 s",
    }
    kept = store.telemetry(run.id)
    assert [(one.repetition, one.is_warmup) for one in kept] == [(0, False), (1, False), (2, False)]


def failing(target: Target, store: ResultsStore, plan: SessionPlan) -> tuple[str, str]:
    with pytest.raises(OutputCheckError) as caught:
        run_session(target.runtime, plan, target.records(), store)
    (run,) = store.list_runs()
    assert run.status == "failed"
    assert run.check.outcome == "failed"
    assert run.values("prefill_tokens_per_s") == ()
    assert run.values("prefill_tokens_per_s", warmup=True) == ()
    return run.error or "", str(caught.value)


def test_fast_garbage_is_a_failure(target: Target, store: ResultsStore) -> None:
    """The reference tokens are others than this model generates, from the second on."""
    wanted = Wanted((17, 300, 300, 300), "reference.txt")
    expectations = expecting(wanted, 4, store)(target)
    error, shown = failing(target, store, plan_for(target, expectations=expectations))
    assert error == shown
    assert "differs from reference.txt at token" in error


def test_the_right_tokens_pass(
    target: Target, store: ResultsStore, answer: GenerationResult
) -> None:
    from harness.runtimes.tokenizer import encode, load_tokenizer

    ids = encode(load_tokenizer(target.tokenizer), answer.text)
    expectations = expecting(Wanted(ids, "reference.txt"), 4, store)(target)
    plan = plan_for(target, repetitions=1, warmup=0, expectations=expectations)
    run = run_session(target.runtime, plan, target.records(), store)
    assert (run.check.outcome, run.check.reason) == ("passed", "the tokens of reference.txt")


def test_a_perplexity_bound_is_measured_once_and_then_taken_from_the_store(
    target: Target, store: ResultsStore, answer: GenerationResult
) -> None:
    good = expecting(Wanted(max_perplexity=1e6), 4, store)(target)
    assert [run.kind for run in store.list_runs()] == ["perplexity"]
    runtime = Scripted(target, answer, [100] * 4)
    plan = plan_for(target, expectations=good)
    run = run_session(runtime, plan, target.records(), store)
    assert run.check.outcome == "passed"
    bad = expecting(Wanted(max_perplexity=1.01), 4, store)(target)
    assert len([run for run in store.list_runs() if run.kind == "perplexity"]) == 1
    with pytest.raises(OutputCheckError, match=r"above the bound of 1\.01"):
        run_session(runtime, replace(plan, expectations=bad), target.records(), store)


def test_sessions_are_prepared_anew_and_agree(
    virtual_device: AdbDevice, tiny_bundle: Path, store: ResultsStore
) -> None:
    folders: list[str] = []
    asked: list[int] = []

    @contextmanager
    def devices(number: int) -> Iterator[AdbDevice]:
        asked.append(number)
        yield virtual_device

    @contextmanager
    def around(_device: object, deployment: Deployment) -> Iterator[Sequence[Condition]]:
        folders.append(deployment.run_dir)
        yield ()

    container = GenAIContainer.load(tiny_bundle)
    plan = BenchPlan(prompt_tokens=8, new_tokens=2, repetitions=1, warmup=0).session_of(container)
    spread = Spread(devices=devices, store=store, around=around)
    runs = run_sessions(spread, container, plan, sessions=2)
    assert asked == [0, 1]
    assert len(set(folders)) == 2
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
