"""The errors of `reports`: one root, each with the data of what went wrong.

    ReportError

`str(error)` is one line for the user: what is wrong, where, and what to do.
"""


class ReportError(Exception):
    """Root of everything `reports` raises on purpose.

    Attributes:
        exit_code: what the command line exits with: 1 failed, 2 wrong use.
    """

    exit_code = 1
