"""What goes wrong between a user and a pool of devices."""

from harness.errors.base import HarnessError, one_line


class PoolError(HarnessError):
    """Root of what a pool raises."""


class PoolConfigError(PoolError):
    """A pool's configuration that cannot be used.

    Attributes:
        line: the line of the file, counted from 1; `None` where it has none.
        key: where in the file, e.g. `devices[2].tags`; empty for the whole.
    """

    def __init__(self, path: str, line: int | None, key: str, reason: str) -> None:
        super().__init__(path, line, key, reason)
        self.path = path
        self.line = line
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        line = "" if self.line is None else f", line {self.line}"
        key = f", {one_line(self.key, 120)}" if self.key else ""
        return f"{one_line(self.path)}{line}{key}: {one_line(self.reason)}"


class UnknownMemberError(PoolError):
    """The pool has no device of that name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(name, known)
        self.name = name
        self.known = known

    def __str__(self) -> str:
        known = f"it has {', '.join(self.known)}" if self.known else "it has none"
        return f"the pool has no device {one_line(self.name, 80)!r}: {one_line(known)}"


class MemberStateError(PoolError):
    """What was asked for cannot be done to a device in its state."""

    def __init__(self, name: str, state: str, wish: str) -> None:
        super().__init__(name, state, wish)
        self.name = name
        self.state = state
        self.wish = wish

    def __str__(self) -> str:
        return f"{one_line(self.name, 80)} is {self.state}: {one_line(self.wish)}"


class RequirementError(PoolError):
    """No device of the pool could ever meet what was asked for.

    Attributes:
        requirement: all that was asked for, in words.
        reason: the part that none meets, and what there is instead.
    """

    def __init__(self, requirement: str, reason: str) -> None:
        super().__init__(requirement, reason)
        self.requirement = requirement
        self.reason = reason

    def __str__(self) -> str:
        return f"no device of the pool meets {one_line(self.requirement)}: {one_line(self.reason)}"


class LeaseTimeoutError(PoolError):
    """No lease was granted in time.

    Attributes:
        reason: who or what stood in the way, device by device.
    """

    def __init__(self, requirement: str, timeout_s: float, reason: str) -> None:
        super().__init__(requirement, timeout_s, reason)
        self.requirement = requirement
        self.timeout_s = timeout_s
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"no lease of {one_line(self.requirement)} within {self.timeout_s:g} s: "
            f"{one_line(self.reason)}"
        )


class LeaseLostError(PoolError):
    """A lease ended under its holder, whose device may be another's by now."""

    def __init__(self, name: str, token: int, reason: str) -> None:
        super().__init__(name, token, reason)
        self.name = name
        self.token = token
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"the lease of {one_line(self.name, 80)} (token {self.token}) is lost: "
            f"{one_line(self.reason)}"
        )


class RecoveryStepError(PoolError):
    """A step of a device's recovery that was not taken, or did not help."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return one_line(self.reason)


class LedgerError(PoolError):
    """The ledger of all leases cannot be used."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"the ledger of leases {one_line(self.path)} cannot be used: {one_line(self.reason)}"


class DamagedLedgerError(LedgerError):
    """The file is no ledger, or a damaged one."""

    def __str__(self) -> str:
        return f"{super().__str__()}; while nothing is leased it may be moved away"


class NewerLedgerError(LedgerError):
    """The ledger was written by a newer qnnfarm."""

    def __init__(self, path: str, version: int) -> None:
        super().__init__(path, f"a newer qnnfarm wrote it (format {version})")
        self.args = (path, version)
        self.version = version
