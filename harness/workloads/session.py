"""One session of a benchmark on one device: conditions, warm-up, repetitions, check, all kept.

A session is the unit of sampling. It begins with a device prepared anew and a run folder of its
own, and every repetition is a process of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field

from harness.deploy.deployment import Deployment
from harness.devices.base import Device
from harness.errors import OutputCheckError
from harness.results.records import (
    Condition,
    ContainerInfo,
    DeviceInfo,
    Provenance,
    Run,
    TelemetrySeries,
    Workload,
    new_run_id,
)
from harness.results.stability import THROTTLING
from harness.results.store import ResultsStore, RunRecorder
from harness.results.warmup import FEWEST, Warmup, detect_warmup
from harness.runtimes.base import GenerationRequest, GenerationResult, Runtime
from harness.telemetry.conditions import Conditions, prepared
from harness.telemetry.gate import OnWait
from harness.telemetry.throttling import judge_throttling
from harness.workloads.bench_prompt import BenchPrompt
from harness.workloads.output_check import Expectation, judge

OnRepetition = Callable[[int, int, GenerationResult], None]
"""Called with the repetition's number from 0, the most that there can be, and its result."""
Records = tuple[ContainerInfo, DeviceInfo, Provenance]
WATCHED = ("prefill_tokens_per_s", "decode_tokens_per_s")
"""The metrics that are to be steady for warm-up to have ended."""


Conditioning = Callable[[Deployment], AbstractContextManager[Sequence[Condition]]]
"""Brings the device into its measuring conditions, tells what it took, undoes it at the end."""


def unconditioned(_deployment: Deployment) -> AbstractContextManager[Sequence[Condition]]:
    """Measure the device as it is."""
    return nullcontext(())


@contextmanager
def measured_under(
    conditions: Conditions,
    device: Device,
    deployment: Deployment,
    *,
    on_wait: OnWait | None = None,
) -> Iterator[Sequence[Condition]]:
    """Prepare a device by our scripts on it; with the first two arguments bound, a `Conditioning`.

    Raises:
        ConditionsNotMetError: see `prepared`.
    """
    with prepared(device, deployment.scripts_dir, conditions, on_wait=on_wait) as records:
        yield tuple(asdict(record) for record in records)


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a session does.

    Attributes:
        prompt_tokens: with the bos that Genie puts before them.
        repetitions: measured ones; exactly so many are kept as such.
        warmup: a fixed number of repetitions before them; None: until they are steady.
        most_warmups: the most repetitions before the measured ones, where that is detected.
        expectations: what the output is checked against.
        around: puts the device into its measuring conditions for the whole session.
    """

    prompt: BenchPrompt
    prompt_tokens: int
    new_tokens: int
    repetitions: int
    warmup: int | None = None
    most_warmups: int = 3
    expectations: tuple[Expectation, ...] = ()
    around: Conditioning = unconditioned

    @property
    def most_repetitions(self) -> int:
        """Warm-ups and measured repetitions together, at most."""
        before = self.most_warmups if self.warmup is None else self.warmup
        return before + self.repetitions


@dataclass(slots=True)
class _Steadiness:
    """Decides after each repetition whether there are enough, and how many were warm-ups."""

    plan: SessionPlan
    values: dict[str, list[float]] = field(default_factory=dict)
    count: int = 0

    def add(self, metrics: Mapping[str, float]) -> None:
        self.count += 1
        for key in WATCHED:
            if key in metrics:
                self.values.setdefault(key, []).append(metrics[key])

    @property
    def enough(self) -> bool:
        if self.count >= self.plan.most_repetitions:
            return True
        return self.count >= self.plan.repetitions and self._warmup() is not None

    def _warmup(self) -> int | None:
        """Repetitions before all watched metrics are steady, if enough steady ones came after."""
        found = [self._detect(values) for values in self.values.values()]
        if self.plan.warmup is not None or not all(warmup.reached for warmup in found):
            return None
        count = max((warmup.count for warmup in found), default=0)
        return count if count <= self.count - self.plan.repetitions else None

    def _detect(self, values: Sequence[float]) -> Warmup:
        if len(values) < self.count:  # a repetition without a second token has no decode rate
            return Warmup(0, reached=True, reason="it is not always there")
        return detect_warmup(values, fewest=FEWEST)

    def settle(self, recorder: RunRecorder) -> None:
        if self.plan.warmup is None:
            detected = self._warmup() is not None
            recorder.settle_warmup(self.count - self.plan.repetitions, detected=detected)


def run_session(
    runtime: Runtime,
    plan: SessionPlan,
    records: Records,
    store: ResultsStore,
    *,
    group_id: str | None = None,
    session: int = 0,
    label: str = "",
    on_repetition: OnRepetition | None = None,
) -> Run:
    """Run one session and keep every repetition as it comes; gives the run as the store has it.

    Sampling is greedy: a repetition that answers differently means that what was measured is not
    one thing, and the run fails.

    Raises:
        OutputCheckError: the output is not what was expected; the run is in the store as failed.
        HarnessError: what went wrong on the device; the run is in the store as failed, with that
            error.
    """
    container, device, provenance = records
    run = Run(
        kind="bench",
        group_id=group_id or new_run_id(),
        session=session,
        label=label,
        container=container,
        device=device,
        provenance=provenance,
        workload=Workload(
            runner=runtime.runner,
            prompt_tokens=plan.prompt_tokens,
            max_new_tokens=plan.new_tokens,
            repetitions=plan.repetitions,
            warmup=plan.most_warmups if plan.warmup is None else plan.warmup,
            sampler={"greedy": True},
            prompt=plan.prompt.text,
        ),
    )
    with store.recording(run) as recorder, ExitStack() as prepared:
        deployment = _record_deployment(recorder, runtime)
        recorder.add_conditions(prepared.enter_context(plan.around(deployment)))
        _repeat(runtime, plan, recorder, on_repetition)
    return store.get_run(run.id)


def _repeat(
    runtime: Runtime,
    plan: SessionPlan,
    recorder: RunRecorder,
    on_repetition: OnRepetition | None,
) -> None:
    request = GenerationRequest(plan.new_tokens, token_ids=plan.prompt.token_ids)
    device = recorder.run.device.serial
    steadiness, throttled = _Steadiness(plan), False
    while not steadiness.enough:
        number = steadiness.count
        is_warmup = plan.warmup is None or number < plan.warmup
        repetition = number if is_warmup else number - (plan.warmup or 0)
        result = runtime.generate(request)
        _check(recorder, plan, result, device)
        recorder.add_values(result.metrics, repetition=repetition, is_warmup=is_warmup)
        recorder.add_telemetry(result.telemetry, repetition=repetition, is_warmup=is_warmup)
        if not throttled:
            throttled = _record_throttling(recorder, number, result.telemetry)
        steadiness.add(result.metrics)
        if on_repetition is not None:
            on_repetition(number, plan.most_repetitions, result)
    steadiness.settle(recorder)


def _record_deployment(recorder: RunRecorder, runtime: Runtime) -> Deployment:
    deployment = runtime.prepare()
    recorder.add_library_versions(runtime.versions())
    recorder.add_values(
        {
            "push_s": deployment.elapsed_s,
            "push_bytes": deployment.pushed_bytes,
            "reused_bytes": deployment.reused_bytes,
        }
    )
    return deployment


def _record_throttling(
    recorder: RunRecorder, number: int, series: Sequence[TelemetrySeries]
) -> bool:
    found = judge_throttling(series)
    if found.throttled:
        reason = f"repetition {number + 1}: {'; '.join(found.reasons[:4])}"
        recorder.add_conditions([{"name": THROTTLING, "outcome": "seen", "reason": reason}])
    return bool(found.throttled)


def _check(recorder: RunRecorder, plan: SessionPlan, result: GenerationResult, device: str) -> None:
    """Fail the run on a wrong output before its speed is stored."""
    if recorder.generated_text is not None:
        if recorder.generated_text != result.text:
            _fail(recorder, device, "the same greedy query gave two different texts")
        return
    recorder.generated_text = result.text
    check = judge(plan.expectations, result.text)
    if check.outcome == "failed":
        _fail(recorder, device, check.reason)
    recorder.set_check(check.outcome, check.reason)


def _fail(recorder: RunRecorder, device: str, reason: str) -> None:
    recorder.set_check("failed", reason)
    raise OutputCheckError(device, reason)
