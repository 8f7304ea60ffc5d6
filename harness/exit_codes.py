"""Exit codes of all commands, which docs/exit-codes.md explains to users."""

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.results.verdicts import Verdict

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


def verdict_exit_code(verdict: "Verdict") -> int:
    """Return the exit code of a verdict: 1 for a regression, 2 for no verdict."""
    return {"regressed": BAD, "no verdict": NO_ANSWER}.get(verdict.value, GOOD)


def help_text() -> str:
    """List them for the end of a help text."""
    return "Exit codes: " + "; ".join(f"{code} {words}" for code, words in MEANINGS.items()) + "."
