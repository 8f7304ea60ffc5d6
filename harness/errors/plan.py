"""What goes wrong with a plan as a whole; what goes wrong with a cell is its device's error."""

from harness.errors.base import HarnessError, one_line


class PlanError(HarnessError):
    """Root of what is wrong with a plan or its run."""


class PlanFileError(PlanError):
    """A plan that cannot be used.

    Attributes:
        key: where in the file, e.g. `workloads[1].prompt_tokens`; empty for the whole of it.
    """

    def __init__(self, path: str, key: str, reason: str) -> None:
        super().__init__(path, key, reason)
        self.path = path
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        where = f"{one_line(self.path)}: {one_line(self.key)}".removesuffix(": ")
        return f"{where}: {one_line(self.reason)}"


class PlanBusyError(PlanError):
    """Another process runs the same plan into the same results database."""

    def __init__(self, journal: str) -> None:
        super().__init__(journal)
        self.journal = journal

    def __str__(self) -> str:
        return (
            "another `qnnfarm run` works on this plan and database: wait for it, or stop it "
            f"(its journal is {one_line(self.journal)})"
        )


class JournalError(PlanError):
    """The journal of a plan cannot be read or written."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot use the journal {one_line(self.path)}: {one_line(self.reason)}"


class NoDeviceForCellError(PlanError):
    """A cell got no device within the plan's `timeouts.lease_s`.

    Attributes:
        requirement: what the device was asked for.
        waited_s: for how long none could be had.
    """

    def __init__(self, requirement: str, waited_s: float) -> None:
        super().__init__(requirement, waited_s)
        self.requirement = requirement
        self.waited_s = waited_s

    def __str__(self) -> str:
        return (
            f"no device was free for {one_line(self.requirement)} within {self.waited_s:g} s: "
            "see `qnnfarm pool` for who holds them, and what is wrong with them"
        )
