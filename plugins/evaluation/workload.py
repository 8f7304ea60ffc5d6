"""The `evaluate` workload: a task file on a device, beside the model in float."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from harness.errors import PromptTooLongError, RuntimeOutputError, WrongUseError
from harness.results.records import ContainerInfo, JsonScalar, OutputCheck, WorkloadRecord
from harness.results.run_recorder import RunRecorder
from harness.runtimes.base import (
    Capability,
    Conversation,
    ConversationRequest,
    Converses,
    DecodesSteps,
    Framing,
    Model,
    Need,
    StepWindow,
    TakesChats,
)
from harness.runtimes.container_model import has_bos
from harness.runtimes.tokenizer import ContextLimit, encode, load_tokenizer
from harness.workloads.base import (
    UNRECORDED,
    ChatFields,
    NonEmpty,
    Recording,
    Workload,
    WorkloadResult,
    require_passed,
    summarize,
)
from harness.workloads.chat import Chat
from harness.workloads.reference import engine_versions, float_config, open_float
from harness.workloads.session import Session
from plugins.evaluation.choices import encode_question
from plugins.evaluation.scores import AnswerChecks, ChoiceScores, score_answers, score_choices
from plugins.evaluation.tasks import Choices, Instructed, Task, read_task

if TYPE_CHECKING:
    from buildlib.numerics.divergence import Logits
    from buildlib.numerics.transformers import ReferenceEngine
    from plugins.evaluation.choices import EncodedQuestion

DEFAULT_TOKENS = 256
"""Tokens of an answer that is checked for instructions."""
_STEPS_AT_ONCE, _PROMPTS_AT_ONCE = 128, 8
"""Of one process on the device: logits of 128 steps are 78 MB at 152,000 tokens."""
ITEMS = "items.jsonl"
"""Artifact with the scores of each row."""
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Evaluation:
    """Scores of a task.

    Attributes:
        values: by metric.
        items: of each row, as JSON values.
    """

    task: Task
    values: dict[str, float]
    items: "tuple[Mapping[str, object], ...]"


class Evaluate(Workload, ChatFields):
    """A task file: questions with choices, or prompts with instructions that can be checked.

    Attributes:
        task: JSON lines; see `plugins.evaluation.tasks`.
        limit: only the first rows.
        few_shot: a task file; its questions and answers stand before each question.
        max_tokens: of each answer that is checked for instructions, 256 if not set.
        reference: the checkpoint that the host scores in float on the same questions.
        reference_with: engine of the reference: our own float model (None), or transformers.
        min: the accuracy (of prompts: that of `prompts_strict`) below which the run fails.
    """

    kind: Literal["evaluate"] = "evaluate"
    task: NonEmpty
    limit: Annotated[int, Field(ge=1)] | None = None
    few_shot: NonEmpty | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    reference: NonEmpty | None = None
    reference_with: Literal["onnx", "transformers"] | None = None
    min: Annotated[float, Field(ge=0, le=1)] | None = None

    length_key: ClassVar[str] = "max_tokens"
    input_keys: ClassVar[tuple[str, ...]] = ("task", "few_shot")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.reference_with is not None and self.reference is None:
            raise ValueError("`reference_with` computes the reference: give `reference`")
        return self

    @property
    def needs(self) -> tuple[Need, ...]:
        """See `Workload.needs`; questions need logits of steps, prompts conversations."""
        either: Need = (DecodesSteps, Converses)
        return (either, TakesChats) if self.chat else (either,)

    def check(self, model: Model) -> None:
        """See `Workload.check`; the engine of the reference must be installed, too."""
        super().check(model)
        if self.chat:
            self.open_chat(model.path)
        if self.reference_with == "transformers":
            from buildlib.numerics.transformers import require_installed

            require_installed(Path(str(self.reference)))

    def run(
        self, session: Session, recording: Recording = UNRECORDED
    ) -> WorkloadResult[Evaluation]:
        """Score the file, on the host in float first."""
        task = read_task(session.resolve(self.task), self.limit)
        chat = self.open_chat(session.model.path) if self.chat else None
        if all(isinstance(row, Choices) for row in task.rows):
            return self._score(session, recording, task, chat)
        return self._follow(session, recording, task, chat)

    def _score(
        self, session: Session, recording: Recording, task: Task, chat: Chat | None
    ) -> WorkloadResult[Evaluation]:
        questions = self._questions(session, task, chat)
        device = session.require(DecodesSteps)
        reference: list[ChoiceScores] = []
        if self.reference is not None:
            reference = float_choices(
                self.reference, session.model.info, questions, self._engine, session.options.folder
            )
        record = self._record(session, DecodesSteps, task, chat)
        with recording.start_if_stored(session, "evaluate", record) as recorder:
            rows: list[ChoiceScores] = []
            for batch in _batches(questions, _steps, _STEPS_AT_ONCE):
                windows = [window for question in batch for window in question.windows]
                answer = device.decode_steps(windows)
                if recorder is not None:
                    recorder.traces.append(answer.trace)
                logits = iter(answer.windows)
                try:
                    rows += [one.scores([next(logits) for _ in one.windows]) for one in batch]
                except ValueError as error:
                    raise RuntimeOutputError(session.device.serial, str(error)) from error
                _tell(session, len(rows), len(questions))
            items = tuple(
                {
                    "answer": row.answer,
                    "log_likelihoods": list(row.log_likelihoods),
                    **({"float": list(reference[n].log_likelihoods)} if reference else {}),
                }
                for n, row in enumerate(rows)
            )
            evaluation = Evaluation(task, score_choices(rows, reference), items)
            self._keep(session, recorder, evaluation, "accuracy")
        return _result(evaluation, recording, recorder)

    def _questions(
        self, session: Session, task: Task, chat: Chat | None
    ) -> "list[EncodedQuestion]":
        """Encode the questions, each of which must fit into the context."""
        tokenizer = load_tokenizer(session.model.tokenizer)
        rows = [row for row in task.rows if isinstance(row, Choices)]
        examples = self._examples(session)
        prompts = [row.after(examples) for row in rows]
        if chat is not None:
            prompts = chat.texts(prompts, self.system)
        is_chat, limit = chat is not None, ContextLimit.of(session.container)
        begin = int(not is_chat and has_bos(session.container))
        questions = []
        for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True), start=1):
            with _naming(task, number):
                answers = row.answers
                question = encode_question(tokenizer, prompt, answers, row.answer, chat=is_chat)
                longest = max(map(len, question.choices))
                limit.check(begin + len(question.prompt), longest)
            questions.append(question)
        return questions

    def _examples(self, session: Session) -> list[Choices]:
        if self.few_shot is None:
            return []
        rows = read_task(session.resolve(self.few_shot)).rows
        examples = [row for row in rows if isinstance(row, Choices)]
        if not examples:
            raise WrongUseError(f"{self.few_shot} holds no questions with choices")
        return examples

    def _follow(
        self, session: Session, recording: Recording, task: Task, chat: Chat | None
    ) -> WorkloadResult[Evaluation]:
        if self.few_shot is not None or self.reference is not None:
            raise WrongUseError(
                f"{task.name} holds prompts: few_shot and reference are for questions with choices"
            )
        rows = [row for row in task.rows if isinstance(row, Instructed)]
        texts = [row.prompt for row in rows]
        tokenizer = load_tokenizer(session.model.tokenizer)
        turns = [(text,) for text in texts]
        whole, framing = [tuple(encode(tokenizer, text)) for text in texts], None
        if chat is not None:
            whole = list(chat.prompts(texts, self.system))
            framing = Framing(chat.turns(texts[:1], self.system).end_token)
        tokens = self.max_tokens or DEFAULT_TOKENS
        limit = ContextLimit.of(session.container)
        for number, ids in enumerate(whole, start=1):
            with _naming(task, number):
                limit.check((chat is None) + len(ids), tokens)
        conversations = [
            Conversation(turn if chat is None else (ids,))
            for turn, ids in zip(turns, whole, strict=True)
        ]
        device = session.require(Converses)
        record = self._record(session, Converses, task, chat, tokens)
        with recording.start_if_stored(session, "evaluate", record) as recorder:
            answers: list[str] = []
            for batch in _batches(conversations, lambda _: 1, _PROMPTS_AT_ONCE):
                request = ConversationRequest(tuple(batch), tokens, framing=framing)
                result = device.converse(request)
                if recorder is not None:
                    recorder.profiles.append(result.profile)
                    recorder.traces.append(result.trace)
                answers += [answer for (answer,) in result.answers]
                _tell(session, len(answers), len(rows))
            checks = [_check_answer(row, text) for row, text in zip(rows, answers, strict=True)]
            items = tuple(
                {"answer": text, "strict": list(check.strict), "loose": list(check.loose)}
                for text, check in zip(answers, checks, strict=True)
            )
            evaluation = Evaluation(task, score_answers(checks), items)
            self._keep(session, recorder, evaluation, "prompts_strict")
        return _result(evaluation, recording, recorder)

    @property
    def _engine(self) -> "ReferenceEngine":
        return self.reference_with or "onnx"

    def _record(
        self,
        session: Session,
        need: Capability,
        task: Task,
        chat: Chat | None,
        max_tokens: int | None = None,
    ) -> WorkloadRecord:
        settings: dict[str, JsonScalar] = {"rows": len(task.rows)}
        if self.few_shot is not None:
            settings["few-shot"] = read_task(session.resolve(self.few_shot)).sha256[:12]
        if chat is not None:
            settings |= chat.record(self.system)
        return WorkloadRecord(
            runner=session.runtime.runner(need),
            max_new_tokens=max_tokens,
            prompt=task.name,
            dataset_sha256=task.sha256,
            sampler=settings,
        )

    def _keep(
        self, session: Session, recorder: RunRecorder | None, evaluation: Evaluation, judged: str
    ) -> None:
        if recorder is not None:
            recorder.add_values(evaluation.values)
            recorder.add_library_versions(engine_versions(self._engine))
            lines = (json.dumps(item, ensure_ascii=False) + "\n" for item in evaluation.items)
            recorder.add_artifact(ITEMS, "".join(lines).encode(errors="replace"), "other")
        if self.min is not None:
            value = evaluation.values[judged]
            summary = f"{judged} of {evaluation.task.name} is {value:.3f}"
            check = OutputCheck(outcome="passed", reason=f"{summary}, at least {self.min:g}")
            if value < self.min:
                check = OutputCheck(outcome="failed", reason=f"{summary}, below {self.min:g}")
            require_passed(check, recorder, session.device.serial)


def float_choices(
    checkpoint: str | os.PathLike[str],
    model: ContainerInfo,
    questions: "Sequence[EncodedQuestion]",
    engine: "ReferenceEngine" = "onnx",
    folder: Path | None = None,
) -> list[ChoiceScores]:
    """Score questions by a checkpoint in float, on this host.

    Args:
        checkpoint, folder: as `open_float` has them.
    """
    import numpy as np

    from buildlib.numerics.evaluation import Sample, predict

    config = float_config(checkpoint, folder)
    with open_float(checkpoint, model, engine, folder) as loop:

        def logits(window: StepWindow) -> "Logits":
            begin = tuple(config.begin) if window.bos else ()
            sample = Sample(begin, window.prompt, window.following)
            return np.concatenate(list(predict(loop, [sample])))

        return [one.scores(list(map(logits, one.windows))) for one in questions]


def _steps(question: "EncodedQuestion") -> int:
    return sum(len(window.following) for window in question.windows)


def _tell(session: Session, done: int, total: int) -> None:
    if session.options.on_rows is not None:
        session.options.on_rows(done, total)


def _check_answer(row: Instructed, answer: str) -> AnswerChecks:
    instructions = row.instructions
    return AnswerChecks(
        strict=tuple(each.is_followed(answer) for each in instructions),
        loose=tuple(each.is_followed(answer, loose=True) for each in instructions),
    )


def _result(
    evaluation: Evaluation, recording: Recording, recorder: RunRecorder | None
) -> WorkloadResult[Evaluation]:
    summary = f"{summarize(evaluation.values)} of {evaluation.task.name}"
    return WorkloadResult(evaluation, evaluation.values, summary, recording.stored_run(recorder))


@contextmanager
def _naming(task: Task, number: int) -> Iterator[None]:
    try:
        yield
    except (PromptTooLongError, ValueError) as error:
        raise WrongUseError(f"row {number} of {task.name}: {error}") from error


def _batches(
    items: Sequence[_Item], size: Callable[[_Item], int], most: int
) -> Iterator[Sequence[_Item]]:
    """Cut items into batches of a size, or of one item that is larger."""
    start, total = 0, 0
    for number, item in enumerate(items):
        if number > start and total + size(item) > most:
            yield items[start:number]
            start, total = number, 0
        total += size(item)
    yield items[start:]
