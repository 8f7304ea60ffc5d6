"""Exit codes of all commands, which docs/exit-codes.md explains to users."""

from types import MappingProxyType

GOOD = 0
BAD = 1
NO_ANSWER = 2
INTERRUPTED = 130

MEANINGS = MappingProxyType(
    {
        GOOD: "done, and what was asked about is good",
        BAD: "what was asked about is bad: a failed cell or check, a regression, a wrong output",
        NO_ANSWER: "no answer: wrong use, or a file or device that cannot be used",
        INTERRUPTED: "interrupted",
    }
)


def help_text() -> str:
    """List them for the end of a help text."""
    return "Exit codes: " + "; ".join(f"{code} {words}" for code, words in MEANINGS.items()) + "."
