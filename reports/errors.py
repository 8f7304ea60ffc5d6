"""Error of `reports`.

    ReportError    a report, or the lab's page, cannot be made

`str(error)` is one line for the user: what is wrong, where, and what to do.
"""

from buildlib.error_base import QnnfarmError


class ReportError(QnnfarmError):
    """A report, or the lab's page, cannot be made."""

    reason: str
    template = "{reason}"
