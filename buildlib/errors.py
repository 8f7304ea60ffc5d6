"""The errors of `buildlib`: one root, each with the data of what went wrong.

    BuildError

`str(error)` is one line for the user: what is wrong, where, and what to do. All data goes to
`super().__init__`, so that every error survives pickling on its way out of a worker process.
"""


class BuildError(Exception):
    """Root of everything `buildlib` raises on purpose.

    Attributes:
        exit_code: what the command line exits with: 1 failed, 2 wrong use.
    """

    exit_code = 1
