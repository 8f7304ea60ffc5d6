"""Where the tree of errors begins, and how what came from outside is put on one line."""


class HarnessError(Exception):
    """Root of everything `harness` raises on purpose.

    Attributes:
        exit_code: of the command line: 2, no answer could be had, or 1, the answer is bad.
    """

    exit_code = 2


def one_line(text: str, limit: int = 300) -> str:
    """`text` from outside, fit for one line of a message: control characters as spaces.

    What is longer than `limit` loses its middle: what was done stands at the beginning, what came
    of it at the end.
    """
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    head = limit // 3
    return flat if len(flat) <= limit else f"{flat[:head]} … {flat[head - limit :]}"


class WrongUseError(HarnessError):
    """An option or argument that cannot be used as it was given."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class HostFileError(HarnessError):
    """A file of this host is missing, unreadable, no file, or changes while it is used."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot use the file {self.path!r}: {one_line(self.reason)}"
