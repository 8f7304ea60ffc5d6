"""The exit codes of all commands: docs/exit-codes.md has them for users."""

from types import MappingProxyType

GOOD = 0
BAD = 1
NO_ANSWER = 2
INTERRUPTED = 130

WORDS = MappingProxyType(
    {
        GOOD: "done, and what was asked about is good",
        BAD: "what was asked about is bad: a failed cell or check, a regression, a wrong output",
        NO_ANSWER: "no answer: wrong use, or a file or device that cannot be used",
        INTERRUPTED: "interrupted",
    }
)


def in_words() -> str:
    """All of them, for the end of a help text."""
    return "Exit codes: " + "; ".join(f"{code} {words}" for code, words in WORDS.items()) + "."
