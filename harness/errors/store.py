"""What goes wrong with the results store."""

from harness.errors.base import HarnessError


class StoreError(HarnessError):
    """Root of what the results store raises."""


class MissingStoreError(StoreError):
    """There is no results database to read."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.location = location

    def __str__(self) -> str:
        return f"no results database at {self.location}: `qnnfarm bench --db` makes one"


class NotAStoreError(StoreError):
    """What was named as results database is something else, or damaged."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(location, reason)
        self.location = location
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.location} is no results database: {self.reason}"


class NewerSchemaError(StoreError):
    """A newer qnnfarm wrote the results database."""

    def __init__(self, location: str, found: int, supported: int) -> None:
        super().__init__(location, found, supported)
        self.location = location
        self.found = found
        self.supported = supported

    def __str__(self) -> str:
        return (
            f"{self.location} has schema {self.found}, newer than the {self.supported} "
            "that this qnnfarm knows: update qnnfarm"
        )


class StoreLockedError(StoreError):
    """Another process kept the results database locked for too long."""

    def __init__(self, location: str, waited_s: float) -> None:
        super().__init__(location, waited_s)
        self.location = location
        self.waited_s = waited_s

    def __str__(self) -> str:
        return (
            f"{self.location} stayed locked by another process for {self.waited_s:g} s: "
            "try again once it is done"
        )


class StoreUnavailableError(StoreError):
    """The results database cannot be reached, read or written."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(location, reason)
        self.location = location
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot use the results database {self.location}: {self.reason}"


class UnknownRunError(StoreError):
    """The results database holds no run of that identifier."""

    def __init__(self, location: str, run_id: str) -> None:
        super().__init__(location, run_id)
        self.location = location
        self.run_id = run_id

    def __str__(self) -> str:
        return f"{self.location} holds no run {self.run_id!r}"


class RunConflictError(StoreError):
    """A write contradicts what the results database already holds of the run."""

    def __init__(self, location: str, run_id: str, reason: str) -> None:
        super().__init__(location, run_id, reason)
        self.location = location
        self.run_id = run_id
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot write run {self.run_id} to {self.location}: {self.reason}"


class CorruptRunError(StoreError):
    """A run in the results database is not one that qnnfarm can have written."""

    def __init__(self, location: str, run_id: str, reason: str) -> None:
        super().__init__(location, run_id, reason)
        self.location = location
        self.run_id = run_id
        self.reason = reason

    def __str__(self) -> str:
        return f"run {self.run_id} in {self.location} is damaged: {self.reason}"


class UnknownMetricError(StoreError):
    """A metric that is not registered."""

    def __init__(self, key: str, known: tuple[str, ...]) -> None:
        super().__init__(key, known)
        self.key = key
        self.known = known

    def __str__(self) -> str:
        return f"unknown metric {self.key!r}: known are {', '.join(self.known)}"


class MetricValueError(StoreError):
    """A value that its metric cannot have."""

    def __init__(self, key: str, value: float, legal: str) -> None:
        super().__init__(key, value, legal)
        self.key = key
        self.value = value
        self.legal = legal

    def __str__(self) -> str:
        return f"{self.key} cannot be {self.value:g}: legal is {self.legal}"
