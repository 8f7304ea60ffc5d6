"""The `dialog` workload: conversations of several turns, by the `genie-app` runner."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.results.records import WorkloadRecord
from harness.runtimes.base import (
    Conversation,
    ConversationRequest,
    ConversationResult,
    Converses,
    Framing,
    Model,
    Need,
    TakesChats,
    Turn,
)
from harness.runtimes.dialog_settings import SETTING_KEYS, DialogSettings
from harness.workloads.base import (
    CHAT_KEYS,
    UNRECORDED,
    ChatFields,
    DialogWorkload,
    NonEmpty,
    Recording,
    WorkloadResult,
    summarize,
)
from harness.workloads.generate import SHORTEST_PROMPT
from harness.workloads.session import Session

Turns = Annotated[tuple[NonEmpty, ...], Field(min_length=1, strict=False)]


class AdaptedTurns(BaseModel):
    """Turns of a dialog with an adapter of its own; strength 0 is none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="python-re")

    turns: Turns
    lora: Annotated[Mapping[NonEmpty, float], Field(min_length=1, max_length=1)]


class Dialog(DialogWorkload, ChatFields):
    """Conversations, turn by turn, with a reset between them.

    All of it is one process on the device and one Genie dialog: a turn sees the turns before it in
    its dialog. Prompts travel in files, unchanged.

    Attributes:
        dialogs: the user's turns of each, or those with an adapter that is applied before them; an
            adapter stays applied until another is.
        max_tokens: of each answer.
    """

    kind: Literal["dialog"] = "dialog"
    dialogs: Annotated[tuple[Turns | AdaptedTurns, ...], Field(min_length=1, strict=False)]
    max_tokens: Annotated[int, Field(ge=1)] = 16

    length_key: ClassVar[str] = "max_tokens"
    input_keys: ClassVar[tuple[str, ...]] = ("genie_config",)
    later_keys: ClassVar[frozenset[str]] = frozenset({*SETTING_KEYS, *CHAT_KEYS})

    @property
    def needs(self) -> tuple[Need, ...]:
        """See `Workload.needs`."""
        return (Converses, TakesChats) if self.chat else (Converses,)

    def check(self, model: Model) -> None:
        """See `Workload.check`; the lengths of the turns are known only to the tokenizer."""
        super().check(model)
        self.check_dialog(model, SHORTEST_PROMPT, self.max_tokens)
        if self.chat:
            self.open_chat(model.path)
        for dialog in self.dialogs:
            if isinstance(dialog, AdaptedTurns) and self.genie_config is None:
                adapted = DialogSettings(lora=dialog.lora)
                model.check_dialog(adapted, SHORTEST_PROMPT, self.max_tokens)

    def run(
        self, session: Session, recording: Recording = UNRECORDED
    ) -> WorkloadResult[ConversationResult]:
        """Hold the conversations."""
        runtime = session.require(Converses)
        chat = self.open_chat(session.model.path) if self.chat else None
        record = WorkloadRecord(
            runner=session.runtime.runner(Converses),
            max_new_tokens=self.max_tokens,
            sampler=self.record() | (chat.record(self.system) if chat else {}),
        )
        conversations, framing = [], None
        for number, dialog in enumerate(self.dialogs):
            texts, lora = (
                (dialog.turns, dialog.lora)
                if isinstance(dialog, AdaptedTurns)
                else (dialog, None if number else self.lora)
            )
            turns: tuple[Turn, ...] = texts
            if chat is not None:
                spoken = chat.turns(texts, self.system)
                turns, framing = spoken.ids, framing or Framing(spoken.end_token)
            conversations.append(Conversation(turns, lora))
        request = ConversationRequest(
            tuple(conversations),
            self.max_tokens,
            settings=self.resolved(session.resolve),
            framing=framing,
        )
        with recording.start_if_stored(session, "generate", record) as recorder:
            result = runtime.converse(request)
            last = result.answers[-1][-1]
            if recorder is not None:
                recorder.generated_text = last
                recorder.add_values(result.metrics)
                recorder.add_telemetry(result.telemetry, repetition=0)
                recorder.profiles.append(result.profile)
                recorder.traces.append(result.trace)
        run = recording.stored_run(recorder)
        return WorkloadResult(result, result.metrics, summarize(result.metrics, last), run)
