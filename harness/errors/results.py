"""Errors of the results store, and of measurements that cannot enter it."""

from harness.errors.base import FailureClass, HarnessError


class StoreError(HarnessError):
    """Root of the results store's errors."""


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


class NotStoredError(StoreError):
    """The results database has no such run, alert, or results of a baseline."""

    location: str
    wanted: str
    template = "{location} has no {wanted}"


class RunConflictError(StoreError):
    """A write contradicts the run in the results database."""

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


class MetricError(StoreError):
    """A metric that is not registered, or a value that it cannot have."""

    reason: str
    template = "{reason}"


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
