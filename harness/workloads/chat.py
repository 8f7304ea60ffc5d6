"""Chats: the token ids that a conversation feeds to a device, by the container's template.

The ids are those of transformers' `apply_chat_template`, bos included where the template writes
it, so the runtime adds none. Later turns go on with the KV cache: only what the template appends
after an answer is fed. Between them Genie 1.21 puts an end token of its own after an answer, unless
the answer ended with it: the first of its end-of-sequence tokens. So the token by which the
template ends answers is made the first.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from buildlib.errors import ContainerError
from harness.errors import WrongUseError
from harness.runtimes.tokenizer import encode, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from buildlib.container.chat_template import ChatTemplate, Message

_SHOWN_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """Turns of one conversation.

    Attributes:
        messages: system and user messages, in order.
        ids: token ids of each turn: the first with all before it, others from the end of the answer
            before on, without its end token.
        end_token: ends answers in the template; None if it writes no special token after them.
    """

    messages: "tuple[Message, ...]"
    ids: tuple[tuple[int, ...], ...]
    end_token: int | None


@dataclass(frozen=True)
class Chat:
    """The chat template of a container, with its tokenizer.

    Attributes:
        folder: of the container, for errors.
    """

    folder: Path
    template: "ChatTemplate"

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the template of a container."""
        from buildlib.container.chat_template import ChatTemplate

        template = ChatTemplate.find(folder)
        if template is None:
            raise WrongUseError(
                f"{folder} has no chat template: build it from a model folder with one in "
                "tokenizer_config.json or chat_template.jinja"
            )
        return cls(folder, template)

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        return load_tokenizer(self.folder / "tokenizer.json")

    def prompts(
        self, prompts: Sequence[str], system: str | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of prompts, each of which is a conversation of its own."""
        return tuple(map(self._ids, self.texts(prompts, system)))

    def texts(self, prompts: Sequence[str], system: str | None = None) -> list[str]:
        """Return the texts of prompts, each of which is a conversation of its own."""
        return self._render([[*_system(system), _user(prompt)] for prompt in prompts])

    def record(self, system: str | None) -> dict[str, str]:
        """Describe a chat in the results store."""
        template = hashlib.sha256(self.template.text.encode()).hexdigest()
        return {"chat": template[:12], **({"system": system} if system else {})}

    def turns(self, prompts: Sequence[str], system: str | None = None) -> ChatTurns:
        """Return the turns of a conversation, before any answer is known.

        Raises:
            ContainerError: the template cannot be rendered.
            WrongUseError: it does not keep answers as they are, so that no turn can follow.
        """
        messages = [*_system(system), _user(prompts[0])]
        (text,) = self._render([messages])
        ids, end = [self._ids(text)], None
        for prompt in (*prompts[1:], None):
            answer = _unused_word(messages)
            messages.append({"role": "assistant", "content": answer})
            more = [] if prompt is None else [_user(prompt)]
            try:
                (text,) = self._render([[*messages, *more]], add_prompt=prompt is not None)
            except ContainerError:
                if prompt is None:  # no turn follows, and it need not say how answers end
                    break
                raise
            if prompt is not None and text.count(answer) != 1:
                raise WrongUseError(
                    f"the chat template of {self.folder} does not keep an answer as it is, so no "
                    "turn can follow one: give one --prompt"
                )
            appended = self._ids_after(text, answer)
            place = next((n for n, each in enumerate(appended) if each in self._specials), None)
            end = None if place is None else appended[place]
            if prompt is not None:
                ids.append(appended if place is None else appended[place + 1 :])
                messages += more
        spoken = tuple(message for message in messages if message["role"] != "assistant")
        return ChatTurns(spoken, tuple(ids), end)

    def difference(
        self, turns: ChatTurns, answers: Sequence[Sequence[int]], end_token: int
    ) -> str | None:
        """Say where the KV cache before the last answer differs from the template; None if not.

        Args:
            answers: token ids of the answers before the last.
            end_token: that the runtime puts after an answer.
        """
        fed = list(turns.ids[0])
        messages = list(turns.messages)
        first = len(messages) - len(turns.ids) + 1
        for number, (answer, following) in enumerate(zip(answers, turns.ids[1:], strict=True)):
            fed += [
                *answer,
                *(() if answer and answer[-1] == end_token else (end_token,)),
                *following,
            ]
            text = self._tokenizer.decode(list(answer))
            messages.insert(first + 2 * number, {"role": "assistant", "content": text})
        (text,) = self._render([messages])
        whole = list(self._ids(text))
        if fed == whole:
            return None
        pairs = zip(fed, whole, strict=False)
        place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(fed), len(whole)))
        mine, theirs = (
            self._tokenizer.decode(ids[place : place + _SHOWN_TOKENS], skip_special_tokens=False)
            for ids in (fed, whole)
        )
        return (
            f"the KV cache differs from the chat template from token {place} of {len(whole)} on: "
            f"{mine!r}, not {theirs!r}"
        )

    def _render(
        self, conversations: "Sequence[Sequence[Message]]", *, add_prompt: bool = True
    ) -> list[str]:
        return self.template.render(conversations, self.folder, add_generation_prompt=add_prompt)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(encode(self._tokenizer, text))

    def _ids_after(self, text: str, word: str) -> tuple[int, ...]:
        """Return the tokens of a text after the last place of a word."""
        end = text.rindex(word) + len(word)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return tuple(token for token, (start, _) in places if start >= end)

    @cached_property
    def _specials(self) -> frozenset[int]:
        decoder = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, entry in decoder.items() if entry.special)


def _system(text: str | None) -> "list[Message]":
    return [] if text is None else [{"role": "system", "content": text}]


def _user(text: str) -> "Message":
    return {"role": "user", "content": text}


def _unused_word(messages: "Sequence[Message]") -> str:
    """Return a word that stands in for an answer, and in no message."""
    while True:
        word = f"Answer{secrets.token_hex(8)}"
        if not any(word in message["content"] for message in messages):
            return word
