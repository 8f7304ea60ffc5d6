"""Errors of `reports`: one root, each with the data of what went wrong.

    ReportError
      ReportWriteError       the report cannot be written there
        OutputPathError      nor any other file
      OutputIsDatabaseError  the report would overwrite the results
      UnknownFigureError     the report has no figure of that name
      ServeError             the lab's page cannot be served there
      TokensError            the tokens of its users cannot be used

`str(error)` is one line for the user: what is wrong, where, and what to do.
"""

from buildlib.error_base import QnnfarmError


class ReportError(QnnfarmError):
    """Root of everything `reports` raises on purpose."""


class ReportWriteError(ReportError):
    """The report cannot be written to its destination."""

    path: str
    reason: str
    template = "cannot write the report {path}: {reason}"


class OutputPathError(ReportWriteError):
    """The destination's folder does not exist, or the destination is a folder."""


class OutputIsDatabaseError(ReportError):
    """The report would overwrite the results database."""

    path: str
    template = "{path} is the results database: give --out another name"


class UnknownFigureError(ReportError):
    """The report has no figure of that name."""

    name: str
    known: tuple[str, ...]
    template = "the report has no figure {name!r:80}; it has {known}"


class ServeError(ReportError):
    """The lab's page cannot be served."""

    address: str
    reason: str
    template = "cannot serve the lab's page at {address}: {reason}"


class TokensError(ReportError):
    """The file with the tokens of the page's users cannot be used."""

    path: str
    reason: str
    template = "cannot use the tokens in {path}: {reason}"
