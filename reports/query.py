"""Runs out of the store, sorted into those with a result and those without."""

from dataclasses import dataclass

from harness.store.records import Run
from harness.store.store import ResultsStore


@dataclass(frozen=True, slots=True)
class Results:
    """What a store holds.

    Attributes:
        name: the database's name, for people.
        done: runs with a result, oldest first.
        gaps: runs without: failed, interrupted, or still running.
    """

    name: str
    done: tuple[Run, ...]
    gaps: tuple[Run, ...]

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
    return Results(
        name=name,
        done=tuple(run for run in runs if run.status == "done"),
        gaps=tuple(run for run in runs if run.status != "done"),
    )
