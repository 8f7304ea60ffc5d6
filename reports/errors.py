"""Error of `reports`.

    ReportError    a report, or the lab's page, cannot be made

`str(error)` is one line for the user: what is wrong, where, and what to do.
"""

from pathlib import Path

from buildlib.error_base import QnnfarmError


class ReportError(QnnfarmError):
    """A report, or the lab's page, cannot be made."""

    reason: str
    template = "{reason}"


def cannot_write(path: Path, cause: OSError | str) -> ReportError:
    """Return the error of a report that cannot be written."""
    reason = cause if isinstance(cause, str) else cause.strerror or str(cause)
    return ReportError(f"cannot write {path}: {reason}")
