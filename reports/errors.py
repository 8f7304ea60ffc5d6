"""The errors of `reports`: one root, each with the data of what went wrong.

    ReportError
      ReportWriteError       the report cannot be written there
        OutputPathError      nor any other file
      OutputIsDatabaseError  the report would overwrite the results

`str(error)` is one line for the user: what is wrong, where, and what to do.
"""


class ReportError(Exception):
    """Root of everything `reports` raises on purpose.

    Attributes:
        exit_code: of the command line: 2, no answer could be had, or 1, the answer is bad.
    """

    exit_code = 2


class ReportWriteError(ReportError):
    """The report cannot be written where it should go."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot write the report {self.path}: {self.reason}"


class OutputPathError(ReportWriteError):
    """There is no folder to write it to, or the name is a folder's."""


class OutputIsDatabaseError(ReportError):
    """The report would overwrite the results that it is made of."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} is the results database: give --out another name"
