"""The `generate` workload: one prompt, or a conversation of several, answered once."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from harness.errors import HostFileError
from harness.results.records import OutputCheck, WorkloadRecord
from harness.runtimes.base import (
    Conversation,
    ConversationRequest,
    Converses,
    Framing,
    Generates,
    GenerationRequest,
    GenerationResult,
    Model,
    Need,
    TakesChats,
    Turn,
    require,
)
from harness.runtimes.dialog_settings import SETTING_KEYS
from harness.runtimes.genie.conversation import check_save
from harness.workloads.base import (
    CHAT_KEYS,
    UNRECORDED,
    ChatFields,
    DialogWorkload,
    NonEmpty,
    Recording,
    WorkloadResult,
    check_length,
    require_passed,
    summarize,
)
from harness.workloads.session import Session

SHORTEST_PROMPT = 2
"""Tokens: bos and one more."""
_LARGEST_PROMPT = 16 << 20
_PROMPT_KEYS = ("prompt", "prompt_file", "tokens", "embeddings")
_Prompts = Annotated[tuple[NonEmpty, ...], Field(min_length=1, max_length=1000, strict=False)]
_Tokens = Annotated[
    tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...],
    Field(min_length=1, max_length=1 << 20, strict=False),
]


class Generate(DialogWorkload, ChatFields):
    """One prompt, or the turns of one conversation; greedy unless a sampler is set.

    Attributes:
        prompt: a text; of several, each is a turn that sees those before it.
        prompt_file: a file that holds the prompt.
        tokens: token ids as the prompt, taken as they are; the answer has its ids, too.
        embeddings: a file of embeddings as the prompt: `.npy`, or raw rows.
        rewind: turns replace what follows their common beginning with the turn before.
        save: a new folder that gets the state of the dialog after the last turn.
        restore: such a folder, to go on with its dialog.
        expect: a text that the answer must contain.
    """

    kind: Literal["generate"] = "generate"
    prompt: NonEmpty | _Prompts | None = None
    prompt_file: NonEmpty | None = None
    tokens: _Tokens | None = None
    embeddings: NonEmpty | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 32
    rewind: bool | None = None
    save: NonEmpty | None = None
    restore: NonEmpty | None = None
    expect: NonEmpty | None = None

    length_key: ClassVar[str] = "max_tokens"
    input_keys: ClassVar[tuple[str, ...]] = ("prompt_file", "embeddings", "genie_config")
    binary_keys: ClassVar[frozenset[str]] = frozenset({"embeddings"})
    later_keys: ClassVar[frozenset[str]] = frozenset(
        {*SETTING_KEYS, *_PROMPT_KEYS[1:], *CHAT_KEYS, "rewind", "save", "restore"}
    )

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        keys = [key for key in _PROMPT_KEYS if getattr(self, key) is not None]
        if len(keys) != 1:
            wrong = f"not {_quoted(keys, ' and ')} together" if keys else "none is given"
            raise ValueError(f"give one of {_quoted(_PROMPT_KEYS, ', ')}: {wrong}")
        if self.rewind and not isinstance(self.prompt, tuple):
            raise ValueError("`rewind` needs several prompts, each of which is a turn")
        if self.embeddings is not None and (self.save or self.restore):
            raise ValueError("`embeddings` go without `save` and `restore`: give a text or tokens")
        if self.tokens is not None and self.stop:
            raise ValueError("`stop`: Genie looks for it in answers to texts alone: give a prompt")
        return self

    @model_validator(mode="after")
    def _chats_in_texts(self) -> Self:
        if not self.chat:
            return self
        if self.tokens is not None or self.embeddings is not None:
            raise ValueError("`chat` makes prompts of texts: give `prompt` or `prompt_file`")
        if self.rewind or self.restore:
            raise ValueError("`chat` begins a conversation: leave out `rewind` and `restore`")
        return self

    @property
    def is_conversation(self) -> bool:
        """True if it has turns, or a state that it begins or ends with."""
        return isinstance(self.prompt, tuple) or bool(self.save or self.restore)

    @property
    def needs(self) -> tuple[Need, ...]:
        """See `Workload.needs`."""
        asks = Converses if self.is_conversation else Generates
        return (asks, TakesChats) if self.chat else (asks,)

    def check(self, model: Model) -> None:
        """See `Workload.check`; the prompt's own length is known only to the tokenizer."""
        super().check(model)
        self.check_dialog(model, SHORTEST_PROMPT, self.max_tokens)
        if self.chat:
            self.open_chat(model.path)

    def run(
        self, session: Session, recording: Recording = UNRECORDED
    ) -> WorkloadResult[GenerationResult]:
        """Answer in a process of its own on the device."""
        require(session.model.runtime, self.needs)
        capability = Converses if self.is_conversation else Generates
        chat = self.open_chat(session.model.path).record(self.system) if self.chat else {}
        record = WorkloadRecord(
            runner=session.runtime.runner(capability),
            max_new_tokens=self.max_tokens,
            prompt=self._shown_prompt(),
            sampler=self.record() | chat,
        )
        ask = self._converse if self.is_conversation else self._ask
        if self.save is not None:
            check_save(session.resolve(self.save))
        with recording.start_if_stored(session, "generate", record) as recorder:
            result = ask(session)
            if recorder is not None:
                recorder.profiles.append(result.profile)
                recorder.traces.append(result.trace)
                recorder.generated_text = result.text
            require_passed(self._check_answer(result), recorder, session.device.serial)
            if recorder is not None:
                recorder.add_values(result.metrics, clocked=result.clocked)
                recorder.add_telemetry(result.telemetry, repetition=0)
        run = recording.stored_run(recorder)
        return WorkloadResult(result, result.metrics, summarize(result.metrics, result.text), run)

    def _ask(self, session: Session) -> GenerationResult:
        ask = partial(GenerationRequest, self.max_tokens, settings=self.resolved(session.resolve))
        if self.chat:
            turns = self.open_chat(session.model.path).turns(self._texts(session), self.system)
            request = ask(token_ids=turns.ids[0], framing=Framing(turns.end_token))
            answer = session.require(Generates).generate(request)
            return replace(answer, token_ids=None)
        if self.tokens is not None:
            request = ask(token_ids=self.tokens)
        elif self.embeddings is not None:
            request = ask(embeddings=session.resolve(self.embeddings))
        else:
            (text,) = self._texts(session)
            request = ask(prompt=text)
        return session.require(Generates).generate(request)

    def _converse(self, session: Session) -> GenerationResult:
        turns: tuple[Turn, ...] = (self.tokens,) if self.tokens else self._texts(session)
        settings = self.resolved(session.resolve)
        chat, framing = None, None
        if self.chat:
            chat = self.open_chat(session.model.path)
            spoken = chat.turns(self._texts(session), self.system)
            turns, framing = spoken.ids, Framing(spoken.end_token)
        request = ConversationRequest(
            (Conversation(turns, self.lora),),
            self.max_tokens,
            settings=settings,
            rewind=bool(self.rewind),
            save=None if self.save is None else session.resolve(self.save),
            restore=None if self.restore is None else session.resolve(self.restore),
            framing=framing,
        )
        result = session.require(Converses).converse(request)
        (answers,) = result.answers
        difference = None
        earlier = [ids for ids in result.token_ids[0][:-1] if ids is not None]
        if chat is not None and framing is not None and len(earlier) == len(turns) - 1:
            end = session.require(TakesChats).end_token(settings, framing)
            difference = chat.difference(spoken, earlier, end)
        return GenerationResult(
            answers[-1],
            result.metrics,
            result.telemetry,
            result.profile,
            result.trace,
            answers=answers,
            early_end=result.early_end,
            speculation=result.speculation,
            chat_difference=difference,
        )

    def _texts(self, session: Session) -> tuple[str, ...]:
        if self.prompt_file is not None:
            return (read_prompt(session, self.prompt_file),)
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt or ()

    def _shown_prompt(self) -> str | None:
        """Return the prompt as the store keeps it."""
        if self.tokens is not None:
            return " ".join(map(str, self.tokens))
        if isinstance(self.prompt, tuple):
            return "\n".join(self.prompt)
        return self.prompt or self.prompt_file or self.embeddings

    def _check_answer(self, result: GenerationResult) -> OutputCheck:
        length = check_length(result)
        if length.outcome == "failed" or self.expect is None:
            return length
        if self.expect in result.text:
            return OutputCheck(outcome="passed", reason=f"the answer holds {self.expect[:80]!r}")
        reason = f"the answer does not hold {self.expect[:80]!r}"
        return OutputCheck(outcome="failed", reason=reason)


def read_prompt(session: Session, name: str) -> str:
    """Read a file that holds a prompt."""
    path = session.resolve(name)
    try:
        if path.stat().st_size > _LARGEST_PROMPT:
            raise HostFileError(str(path), "it is too large for a prompt")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HostFileError(str(path), str(error)) from error
    if not text or "\0" in text:
        raise HostFileError(str(path), "it holds no prompt: it is empty, or has a zero byte")
    return text


def _quoted(keys: Iterable[str], between: str) -> str:
    return between.join(f"`{key}`" for key in keys)
