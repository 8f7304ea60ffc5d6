"""Errors of the results store, and of measurements that cannot enter it."""

from harness.errors.base import FailureClass, HarnessError


class StoreError(HarnessError):
    """Root of what the results store raises."""


class MissingStoreError(StoreError):
    """There is no results database to read."""

    location: str
    template = "no results database at {location}: `qnnfarm bench --db` makes one"


class StoreUnavailableError(StoreError):
    """The results database cannot be reached, read or written, or is none of this qnnfarm."""

    ends_plan = True
    location: str
    reason: str
    template = "cannot use the results database {location}: {reason}"


class StoreLostError(StoreUnavailableError):
    """The database's server went away, or cut a connection or a transaction."""


class UnknownRunError(StoreError):
    """The results database has no run with this identifier."""

    location: str
    run_id: str
    template = "{location} holds no run {run_id!r}"


class UnknownAlertError(StoreError):
    """There is no such alert in the results database, or more than one."""

    location: str
    alert: str
    reason: str
    template = "{location} has no alert {alert!r}: {reason}; `qnnfarm alerts ls --all` lists them"


class RunConflictError(StoreError):
    """A write contradicts what the results database already holds of the run."""

    location: str
    run_id: str
    reason: str
    template = "cannot write run {run_id} to {location}: {reason}"


class CorruptRunError(StoreError):
    """A run in the results database that qnnfarm cannot have written."""

    location: str
    run_id: str
    reason: str
    template = "run {run_id} in {location} is damaged: {reason}"


class UnknownMetricError(StoreError):
    """A metric that is not registered."""

    key: str
    known: tuple[str, ...]
    template = "unknown metric {key!r}: known are {known}"


class MetricValueError(StoreError):
    """A value outside its metric's legal range."""

    key: str
    value: float
    legal: str
    template = "{key} cannot be {value:g}: legal is {legal}"


class TelemetryRecordError(StoreError):
    """An invalid telemetry series."""

    failure_class = FailureClass.OUTPUT
    channel: str
    reason: str
    template = "telemetry channel {channel!r} is not usable: {reason}"


class ArtifactError(StoreError):
    """A file that is kept with a run cannot be kept or read."""

    ends_plan = True
    location: str
    reason: str
    template = "cannot use the artifact {location}: {reason}"


class OutputCheckError(HarnessError):
    """The output is wrong, so its speed says nothing."""

    failure_class = FailureClass.OUTPUT
    exit_code = 1
    device: str
    reason: str
    template = "the output on {device} is wrong, so its speed is void: {reason}"


class NoBaselineError(StoreError):
    """The results database has nothing that a gate's reference means."""

    location: str
    reference: str
    reason: str
    template = "{location} has no results for {reference!r}: {reason}"
