"""Output checks: a fast machine that prints garbage has no speed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.errors import WrongUseError
from harness.results.records import OutputCheck
from harness.runtimes.tokenizer import load_tokenizer

_LARGEST_FILE = 4 << 20
_MOST_TOKENS = 1 << 20
_SHOWN = 20
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_AS_BEFORE = "the same text as the group's first session"
_SEPARATORS = re.compile(r"[\s,;\[\]]+")


class Expectation(Protocol):
    """An expectation of the output of a greedy query."""

    def evaluate(self, text: str) -> OutputCheck:
        """Check a generated text."""
        ...


@dataclass(frozen=True, slots=True)
class ReferenceTokens:
    """The tokens that a right container generates.

    Attributes:
        prefixes: the text of the first token, of the first two, and so on.
        source: where they come from, for people.
    """

    prefixes: tuple[str, ...]
    source: str

    @classmethod
    def of(cls, token_ids: Sequence[int], tokenizer: Path, source: str) -> "ReferenceTokens":
        """Make it from tokens and the tokenizer that they belong to."""
        encoder = load_tokenizer(tokenizer)
        size = encoder.get_vocab_size(with_added_tokens=True)
        strange = next((token for token in token_ids if not 0 <= token < size), None)
        if strange is not None or not token_ids:
            what = "no tokens" if strange is None else f"token {strange}, of {size}"
            raise WrongUseError(f"{source} holds {what}: name the tokens of this container")
        prefixes = (encoder.decode(list(token_ids[:end])) for end in range(1, len(token_ids) + 1))
        return cls(tuple(prefixes), source)

    def evaluate(self, text: str) -> OutputCheck:
        """Require that the text begins with all of them; name the first token that differs."""
        place = next(
            (number for number, prefix in enumerate(self.prefixes) if not _agree(text, prefix)),
            None if text else 0,
        )
        if place is None:
            return OutputCheck(outcome="passed", reason=f"the tokens of {self.source}")
        before = self.prefixes[place - 1] if place else ""
        reference = self.prefixes[-1][len(before) :][:_SHOWN]
        answer = text[len(before) :][:_SHOWN]
        reason = (
            f"it differs from {self.source} at token {place + 1}: {answer!r} where {reference!r} "
            "was expected"
        )
        return OutputCheck(outcome="failed", reason=reason)


@dataclass(frozen=True, slots=True)
class ReferenceText:
    """The text of an earlier session; agreement is worth as much as that session's check."""

    text: str
    check: OutputCheck

    def evaluate(self, text: str) -> OutputCheck:
        """Compare character by character: sampling is greedy."""
        if text == self.text:
            if self.check.outcome == "passed":
                return OutputCheck(outcome="passed", reason=_AS_BEFORE)
            return OutputCheck(reason=f"{_AS_BEFORE}, whose output nothing checked")
        place = next(
            (n for n, (a, b) in enumerate(zip(text, self.text, strict=False)) if a != b),
            min(len(text), len(self.text)),
        )
        reference, answer = self.text[place : place + _SHOWN], text[place : place + _SHOWN]
        reason = (
            f"it differs from the group's first session at character {place + 1}: {answer!r} where "
            f"{reference!r} was expected"
        )
        return OutputCheck(outcome="failed", reason=reason)


def check_text(expectations: Sequence[Expectation], text: str) -> OutputCheck:
    """Check a text against all expectations: one failure fails; name those that passed."""
    checks = [expectation.evaluate(text) for expectation in expectations]
    failure = next((check for check in checks if check.outcome == "failed"), None)
    if failure is not None:
        return failure
    reasons = [check.reason for check in checks if check.outcome == "passed"]
    if reasons:
        return OutputCheck(outcome="passed", reason="; ".join(dict.fromkeys(reasons)))
    return next(iter(checks), OutputCheck())


def read_tokens(path: Path) -> tuple[int, ...]:
    """Read token ids from a file: numbers separated by blanks or commas, or a JSON list."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        words = [word for word in _SEPARATORS.split(content.decode("ascii")) if word]
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUseError(f"cannot read the reference tokens {path}: {error}") from error
    if len(content) > _LARGEST_FILE or not words or len(words) > _MOST_TOKENS:
        raise WrongUseError(f"{path} holds no tokens, or too many")
    strange = next((word for word in words if not re.fullmatch(r"[0-9]{1,9}", word)), None)
    if strange is not None:
        raise WrongUseError(f"{path} holds {strange[:20]!r}, which is not a token id")
    return tuple(int(word) for word in words)


def _agree(text: str, prefix: str) -> bool:
    """Compare a beginning; a token may end within a character, which decodes to U+FFFD."""
    return text.startswith(prefix.rstrip(_REPLACEMENT))
