"""Questions that the suites ask of a session, in a line each."""

from collections.abc import Mapping, Sequence

from harness.runtimes.base import ConversationResult, GenerationResult
from harness.runtimes.tokenizer import ContextLimit
from harness.workloads.dialog import Dialog
from harness.workloads.generate import Generate
from harness.workloads.session import Session

Dialogs = Sequence[Sequence[str] | Mapping[str, object]]


def ask(session: Session, prompt: str | None = None, **fields: object) -> GenerationResult:
    """Answer one prompt in a process of its own; fields are those of `Generate`."""
    return Generate.of(prompt=prompt, **fields).run(session).output


def converse(session: Session, *turns: str, **fields: object) -> tuple[str, ...]:
    """Hold one conversation, and return its answers; fields are those of `Generate`."""
    return Generate.of(prompt=turns, **fields).run(session).output.answers


def hold(session: Session, dialogs: Dialogs, max_tokens: int) -> ConversationResult:
    """Hold conversations in one process: turns, or `{"turns": ..., "lora": {NAME: STRENGTH}}`."""
    turns = tuple(dict(one) if isinstance(one, Mapping) else tuple(one) for one in dialogs)
    workload = Dialog.of(dialogs=turns, max_tokens=max_tokens)
    workload.check(session.model)
    return workload.run(session).output


def limit_of(session: Session) -> ContextLimit:
    """Return the limit of the container's context."""
    return ContextLimit.of(session.container)
