"""The `bench` workload: one prompt repeated in a session, with warm-up and an output check."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from harness.errors import RuntimeOutputError, WrongUseError
from harness.results.derived import find_charge_fault, find_tails
from harness.results.identity import SHORTEST_PROMPT
from harness.results.metrics import LEADING_METRICS
from harness.results.perplexity import PerplexityBound
from harness.results.records import OutputCheck, Run, TelemetrySeries, WorkloadRecord
from harness.results.run_recorder import RunRecorder
from harness.results.stability import THROTTLING
from harness.results.store import ResultsStore
from harness.results.warmup import MIN_STEADY, Warmup, detect_warmup
from harness.runtimes.base import (
    Capability,
    Generates,
    GenerationRequest,
    GenerationResult,
    MeasuresSpeed,
    Model,
    Need,
    Runtime,
    Scores,
    SpeedRequest,
    require,
)
from harness.runtimes.dialog_settings import SETTING_KEYS, DialogSettings
from harness.telemetry.throttling import judge_throttling
from harness.workloads.base import (
    UNRECORDED,
    DialogWorkload,
    NonEmpty,
    Recording,
    WorkloadResult,
    check_length,
    require_passed,
    stored_result,
)
from harness.workloads.bench_prompt import BenchPrompt, cut_prompt
from harness.workloads.output_check import (
    Expectation,
    ReferenceText,
    ReferenceTokens,
    check_text,
    read_tokens,
)
from harness.workloads.perplexity import MaxPerplexity
from harness.workloads.quality import (
    DEFAULT_WINDOWS,
    ContainerQuality,
    QualityCheck,
    stored_quality,
)
from harness.workloads.session import Session

_PREFILL = "prefill_tokens_per_s"
_LEAST_AT_A_DEPTH = 3
"""Tokens of a prompt after a depth: at most two of Genie's own, and one."""
_QUALITY_KEYS = frozenset({"perplexity_text", "perplexity_windows", "reference"})


class Bench(DialogWorkload):
    """Repetitions of one prompt, as `qnnfarm bench` does them; parameters as in llama-bench.

    Sampling is greedy unless it is set; if a repetition answers differently, the run fails, but for
    samplers with a random seed.

    Attributes:
        prompt_tokens: with the tokens that Genie puts before them: bos, or two of its own at a
            depth.
        depth_tokens: tokens in the context before the prompt, bos included, llama-bench's `-d`: a
            first query of the same dialog fills it, and is no part of the figures. None for none.
        repetitions: measured ones; exactly this many are stored as such.
        warmup: number of repetitions before the measured ones, kept but left out of every mean;
            `auto`: until the values are steady, at most `most_warmups`.
        reference_tokens: a file of the token ids that a right output begins with.
        max_perplexity: above it the speed does not count: a number, or a tolerance relative to the
            model in float, as `5%`. It is taken from the results store if the same is stored there,
            else measured first.
        perplexity_text: a file that it is measured over; None for a built-in passage.
        perplexity_windows: of the context length, from the text's start; None for one.
        reference: the checkpoint that the host scores in float for a relative bound.
    """

    kind: Literal["bench"] = "bench"
    prompt_tokens: Annotated[int, Field(ge=2)] = 64
    depth_tokens: Annotated[int, Field(ge=2)] | None = None
    new_tokens: Annotated[int, Field(ge=1)] = 16
    repetitions: Annotated[int, Field(ge=1, le=10_000)] = 3
    warmup: Annotated[int, Field(ge=0, le=10_000)] | Literal["auto"] = "auto"
    most_warmups: Annotated[int, Field(ge=0, le=10_000)] = 3
    reference_tokens: NonEmpty | None = None
    max_perplexity: MaxPerplexity | None = None
    perplexity_text: NonEmpty | None = None
    perplexity_windows: Annotated[int, Field(ge=1, le=100_000)] | None = None
    reference: NonEmpty | None = None

    length_key: ClassVar[str] = "prompt_tokens"
    input_keys: ClassVar[tuple[str, ...]] = ("reference_tokens", "perplexity_text", "genie_config")
    later_keys: ClassVar[frozenset[str]] = _QUALITY_KEYS.union(SETTING_KEYS, {"depth_tokens"})
    under_conditions: ClassVar[bool] = True

    @property
    def measures_prompt(self) -> bool:
        """True if its prompt is longer than the shortest one, which has no meaningful speed."""
        return self.prompt_tokens > SHORTEST_PROMPT

    @property
    def warmup_limit(self) -> int:
        """Most repetitions before the measured ones."""
        return self.most_warmups if self.warmup == "auto" else self.warmup

    @property
    def most_repetitions(self) -> int:
        """Most repetitions, warm-ups and measured ones together."""
        return self.warmup_limit + self.repetitions

    @model_validator(mode="after")
    def _measured_for_a_bound(self) -> Self:
        fields = sorted(key for key in _QUALITY_KEYS if getattr(self, key) is not None)
        if self.max_perplexity is None and fields:
            raise ValueError(f"`{fields[0]}` belongs to `max_perplexity`, which is missing")
        return self

    @model_validator(mode="after")
    def _long_enough_at_a_depth(self) -> Self:
        if self.depth_tokens is not None and self.prompt_tokens < _LEAST_AT_A_DEPTH:
            raise ValueError(
                f"`prompt_tokens`: after a depth, Genie takes {_LEAST_AT_A_DEPTH} or more"
            )
        return self

    @property
    def needs(self) -> tuple[Need, ...]:
        """See `Workload.needs`."""
        text = Generates if self.reference_tokens is not None else (Generates, MeasuresSpeed)
        return (text,) if self.max_perplexity is None else (text, Scores)

    def _capability_of(self, runtime: type[Runtime]) -> Capability:
        """Return how a runtime is measured: by itself, unless there is a text to check."""
        by_itself = self.reference_tokens is None and issubclass(runtime, MeasuresSpeed)
        return MeasuresSpeed if by_itself else Generates

    def check(self, model: Model) -> None:
        """See `Workload.check`."""
        super().check(model)
        self.check_dialog(
            model, self.prompt_tokens, self.new_tokens, depth_tokens=self.depth_tokens or 0
        )

    def run(self, session: Session, recording: Recording = UNRECORDED) -> WorkloadResult[Run]:
        """Run one session, and store every repetition as it comes."""
        settings = self.resolved(session.resolve)
        require(session.model.runtime, self.needs)
        session.model.check_dialog(
            settings, self.prompt_tokens, self.new_tokens, depth_tokens=self.depth_tokens or 0
        )
        runtime, prompt = session.runtime, None
        capability = self._capability_of(session.model.runtime)
        if capability is Generates:
            answering = session.require(Generates)
            prompt = self._cut_prompt(session.model.tokenizer, answering, settings)
        quality = self.judge_container(session, recording.store)
        expectations = tuple(self._expectations(session, recording, quality))
        record = WorkloadRecord(
            runner=runtime.runner(capability),
            prompt_tokens=self.prompt_tokens,
            depth_tokens=self.depth_tokens,
            max_new_tokens=self.new_tokens,
            repetitions=self.repetitions,
            warmup=0 if prompt is None else self.warmup_limit,
            sampler=self.record(),
            prompt=None if prompt is None else prompt.text,
        )
        with recording.start(session, "bench", record) as recorder, ExitStack() as stack:
            if quality is not None and (prompt is None or quality.outcome == "failed"):
                require_passed(quality, recorder, session.device.serial)
            deployment = runtime.prepare()
            recorder.add_values(
                {
                    "push_s": deployment.elapsed_s,
                    "push_bytes": deployment.pushed_bytes,
                    "reused_bytes": deployment.reused_bytes,
                }
            )
            if session.options.prepare is not None:
                conditions = session.options.prepare(session.device, deployment)
                recorder.add_conditions(stack.enter_context(conditions))
            if prompt is None:
                bench = self.model_copy(update={"warmup": 0})  # the runtime has its own
                _repeat(bench, session, recorder, self._measure(session), None)
            else:
                results = self._generate(session, prompt, settings)
                _repeat(self, session, recorder, results, expectations)
        return stored_result(recording.store.get_run(recorder.run.id))

    def _measure(self, session: Session) -> Iterator[GenerationResult]:
        """Yield the repetitions of a runtime that measures itself."""
        warmup = None if self.warmup == "auto" else self.warmup
        depth = self.depth_tokens or 0
        request = SpeedRequest(self.prompt_tokens, self.new_tokens, depth, self.repetitions, warmup)
        yield from session.require(MeasuresSpeed).measure_speed(request)

    def _generate(
        self, session: Session, prompt: BenchPrompt, settings: DialogSettings
    ) -> Iterator[GenerationResult]:
        """Yield answers to the prompt, each of a process of its own."""
        runtime = session.require(Generates)
        depth = self._own_depth(runtime, settings)
        request = GenerationRequest(
            self.new_tokens,
            token_ids=prompt.token_ids[depth:],
            fill_token_ids=prompt.token_ids[:depth],
            settings=settings,
        )
        while True:
            yield runtime.generate(request)

    def judge_container(self, session: Session, store: ResultsStore) -> OutputCheck | None:
        """Judge the container before anything runs; None if there is nothing to judge it by.

        A stored perplexity beside its references counts without being asked for.
        """
        if self.max_perplexity is None:
            return stored_quality(
                store, session.container_info, session.device_info, session.model.runtime.name
            )
        text = self.perplexity_text
        quality = QualityCheck(
            PerplexityBound.parse(self.max_perplexity),
            None if text is None else Path(text),
            self.perplexity_windows or DEFAULT_WINDOWS,
            self.reference,
        )
        return quality.judge(session, store)

    def _cut_prompt(
        self, tokenizer: Path, runtime: Generates, settings: DialogSettings
    ) -> BenchPrompt:
        """Cut the tokens of the depth and of the prompt, without those that the runtime adds."""
        depth = self._own_depth(runtime, settings)
        own_tokens = runtime.added_tokens(settings, after_fill=depth > 0)
        if self.prompt_tokens <= own_tokens:
            reason = f"the runtime adds {own_tokens} tokens to it: give {own_tokens + 1} or more"
            raise WrongUseError(f"prompt_tokens {self.prompt_tokens}: {reason}")
        return cut_prompt(tokenizer, depth + self.prompt_tokens - own_tokens)

    def _own_depth(self, runtime: Generates, settings: DialogSettings) -> int:
        """Return tokens of the depth, without those that the runtime adds."""
        depth = self.depth_tokens
        return 0 if depth is None else depth - runtime.added_tokens(settings)

    def _expectations(
        self, session: Session, recording: Recording, quality: OutputCheck | None
    ) -> Iterator[Expectation]:
        """Yield the expectations of the output."""
        if self.reference_tokens is not None:
            token_ids = read_tokens(session.resolve(self.reference_tokens))[: self.new_tokens]
            yield ReferenceTokens.of(token_ids, session.model.tokenizer, self.reference_tokens)
        if quality is not None:
            yield ContainerQuality(quality)
        first = recording.first
        if first is not None and first.generated_text is not None:
            yield ReferenceText(first.generated_text, first.check)


def _repeat(
    bench: Bench,
    session: Session,
    recorder: RunRecorder,
    results: Iterator[GenerationResult],
    expectations: Sequence[Expectation] | None,
) -> None:
    """Store repetitions as they come; of those without a text, there are no expectations."""
    steadiness, throttled, firsts = _Steadiness(bench), False, list[float]()
    for number, result in enumerate(results):
        is_warmup = bench.warmup == "auto" or number < bench.warmup
        repetition = number if bench.warmup == "auto" or is_warmup else number - bench.warmup
        recorder.profiles.append(result.profile)
        recorder.traces.append(result.trace)
        if expectations is not None:
            _check_prompt(bench, session, result)
            _check_output(recorder, expectations, result, repeats=bench.is_reproducible)
        recorder.add_values(
            result.metrics,
            repetition=repetition,
            is_warmup=is_warmup,
            clocked=result.clocked,
        )
        recorder.add_telemetry(result.telemetry, repetition=repetition, is_warmup=is_warmup)
        firsts += [result.metrics["ttft_s"]] if "ttft_s" in result.metrics else []
        fault = find_charge_fault(result.telemetry) if number == 0 else ""
        if fault:
            recorder.add_conditions([{"name": "energy", "outcome": "unavailable", "reason": fault}])
        if not throttled:
            throttled = _record_throttling(recorder, number, result.telemetry)
        steadiness.add(result.metrics)
        if session.options.on_repetition is not None:
            session.options.on_repetition(number, bench.most_repetitions, result)
        if steadiness.is_enough:
            break
    steadiness.settle(recorder)
    recorder.add_values(find_tails("ttft", firsts[-bench.repetitions :]))


def _check_prompt(bench: Bench, session: Session, result: GenerationResult) -> None:
    """Refuse figures of another prompt than the one that is measured at a depth."""
    count = result.metrics.get("prompt_tokens")
    if bench.depth_tokens is not None and count != bench.prompt_tokens:
        reason = f"a prompt of {count} tokens was taken for one of {bench.prompt_tokens}"
        raise RuntimeOutputError(session.device.serial, reason)


@dataclass(slots=True)
class _Steadiness:
    """Decides after each repetition whether there are enough, and how many were warm-ups."""

    bench: Bench
    values: dict[str, list[float]] = field(default_factory=dict)
    count: int = 0

    def add(self, metrics: Mapping[str, float]) -> None:
        self.count += 1
        for key in LEADING_METRICS:
            if key in metrics and (key != _PREFILL or self.bench.measures_prompt):
                self.values.setdefault(key, []).append(metrics[key])

    @property
    def is_enough(self) -> bool:
        if self.count >= self.bench.most_repetitions:
            return True
        return self.count >= self.bench.repetitions and self._warmup() is not None

    def _warmup(self) -> int | None:
        """Return repetitions before all metrics are steady, if enough steady ones came after."""
        warmups = [self._detect(values) for values in self.values.values()]
        if self.bench.warmup != "auto" or not all(warmup.reached for warmup in warmups):
            return None
        count = max((warmup.count for warmup in warmups), default=0)
        return count if count <= self.count - self.bench.repetitions else None

    def _detect(self, values: Sequence[float]) -> Warmup:
        if len(values) < self.count:  # a repetition without a second token has no decode rate
            return Warmup(0, reached=True, reason="it is not always there")
        return detect_warmup(values, fewest=MIN_STEADY)

    def settle(self, recorder: RunRecorder) -> None:
        if self.bench.warmup == "auto":
            detected = self._warmup() is not None
            recorder.settle_warmup(self.count - self.bench.repetitions, detected=detected)


def _record_throttling(
    recorder: RunRecorder, number: int, series: Sequence[TelemetrySeries]
) -> bool:
    throttling = judge_throttling(series)
    if throttling.throttled:
        reason = f"repetition {number + 1}: {'; '.join(throttling.reasons[:4])}"
        recorder.add_conditions([{"name": THROTTLING, "outcome": "seen", "reason": reason}])
    return bool(throttling.throttled)


def _check_output(
    recorder: RunRecorder,
    expectations: Sequence[Expectation],
    result: GenerationResult,
    *,
    repeats: bool,
) -> None:
    """Fail the run on a wrong output before its speed is stored."""
    text, check = result.text, check_length(result)
    if check.outcome == "failed":
        recorder.generated_text = text
    elif recorder.generated_text is None:
        recorder.generated_text = text
        check = check_text(expectations, text)
    elif recorder.generated_text == text or not repeats:
        return
    else:
        reason = "the same query gave two different texts"
        check = OutputCheck(outcome="failed", reason=reason)
    require_passed(check, recorder, recorder.run.device.serial)
