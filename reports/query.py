"""Runs out of the store, sorted into those with a result and those without."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.results.records import RepetitionTelemetry, Run
from harness.results.store import ResultsStore

MOST_PLOTTED = 12
"""Telemetry is read of the newest runs only; it is by far the largest part of a store."""


@dataclass(frozen=True, slots=True)
class Results:
    """What a store holds.

    Attributes:
        name: the database's name, for people.
        done: runs with a result, oldest first.
        gaps: runs without: failed, interrupted, or still running.
        telemetry: by run, of the newest runs that have some.
    """

    name: str
    done: tuple[Run, ...]
    gaps: tuple[Run, ...]
    telemetry: Mapping[str, tuple[RepetitionTelemetry, ...]] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, oldest first."""
        return tuple(sorted((*self.done, *self.gaps), key=lambda run: (run.created_at, run.id)))


def load(location: str) -> Results:
    """Read all runs of a store.

    Raises:
        StoreError: there is no such store, or it cannot be read.
    """
    with ResultsStore.open(location, create=False) as store:
        runs = store.list_runs()
        name = store.location.rstrip("/").rpartition("/")[2]
        telemetry = _telemetry(store, runs)
    return Results(
        name=name,
        done=tuple(run for run in runs if run.status == "done"),
        gaps=tuple(run for run in runs if run.status != "done"),
        telemetry=telemetry,
    )


def _telemetry(
    store: ResultsStore, runs: tuple[Run, ...]
) -> dict[str, tuple[RepetitionTelemetry, ...]]:
    newest = store.with_telemetry(MOST_PLOTTED)
    return {run.id: store.telemetry(run.id) for run in runs if run.id in newest}
