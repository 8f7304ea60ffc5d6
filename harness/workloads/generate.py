"""The `generate` workload: one prompt, answered greedily."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from buildlib.container.container import GenAIContainer
from harness.results.records import OutputCheck
from harness.results.records import Workload as WorkloadRecord
from harness.runtimes.base import GenerationRequest, GenerationResult
from harness.runtimes.context_limit import ContextLimit
from harness.workloads.base import (
    UNRECORDED,
    NonEmpty,
    Recording,
    WorkloadModel,
    WorkloadResult,
    keeping_answers,
    require_passed,
    summarize,
)
from harness.workloads.session import Session

SHORTEST_PROMPT = 2
"""Tokens: bos and one more."""


class Generate(WorkloadModel):
    """One prompt, answered greedily.

    Attributes:
        expect: a text that the answer must contain.
    """

    kind: Literal["generate"] = "generate"
    prompt: NonEmpty
    max_tokens: Annotated[int, Field(ge=1)] = 32
    expect: NonEmpty | None = None

    length_key: ClassVar[str] = "max_tokens"

    def check(self, container: GenAIContainer) -> None:
        """See `Workload.check`; the prompt's own length is known only to the tokenizer."""
        ContextLimit.of(container).check(SHORTEST_PROMPT, self.max_tokens)

    def run(
        self, session: Session, recording: Recording = UNRECORDED
    ) -> WorkloadResult[GenerationResult]:
        """Answer the prompt in a process of its own on the device."""
        runtime = session.runtime
        record = WorkloadRecord(
            runner=runtime.runner,
            max_new_tokens=self.max_tokens,
            prompt=self.prompt,
            sampler={"greedy": True},
        )
        with (
            recording.start_if_stored(session, "generate", record) as recorder,
            keeping_answers(session, recorder) as answers,
        ):
            result = runtime.generate(GenerationRequest(self.max_tokens, prompt=self.prompt))
            answers.append(result)
            if recorder is not None:
                recorder.generated_text = result.text
            require_passed(self._check_answer(result.text), recorder, session.device.serial)
            if recorder is not None:
                recorder.add_values(result.metrics)
                recorder.add_telemetry(result.telemetry, repetition=0)
        run = recording.stored_run(recorder)
        return WorkloadResult(result, result.metrics, summarize(result.metrics, result.text), run)

    def _check_answer(self, text: str) -> OutputCheck:
        if self.expect is None:
            return OutputCheck()
        if self.expect in text:
            return OutputCheck(outcome="passed", reason=f"the answer holds {self.expect[:80]!r}")
        reason = f"the answer does not hold {self.expect[:80]!r}"
        return OutputCheck(outcome="failed", reason=reason)
