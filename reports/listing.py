"""Which runs a report lists in full, and which in one line, so that it stays small."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.results import stats
from harness.results.metrics import find_metric
from harness.results.records import Run

MOST_IN_FULL = 500
_BRIEFLY = ("prefill_tokens_per_s", "decode_tokens_per_s", "ttft_s")


@dataclass(frozen=True, slots=True)
class Listing:
    """All runs, each in one of two ways, oldest first.

    Attributes:
        full: the newest ones, and the newest of each container, SoC and kind of run.
        brief: the others.
    """

    full: tuple[Run, ...]
    brief: tuple[Run, ...]


def list_runs(runs: Sequence[Run], most: int = MOST_IN_FULL) -> Listing:
    """Choose.

    Args:
        runs: oldest first.
    """
    if len(runs) <= most:
        return Listing(tuple(runs), ())
    newest = {
        (run.kind, run.container.sha256, run.device.soc, run.device.emulator): run.id
        for run in runs
    }
    kept = {*newest.values(), *(run.id for run in runs[len(runs) - most :])}
    return Listing(
        tuple(run for run in runs if run.id in kept),
        tuple(run for run in runs if run.id not in kept),
    )


def figures(run: Run) -> str:
    """The means of a run's speeds in one line; empty where it has none."""
    words = []
    for key in _BRIEFLY:
        found = stats.summarise([run.values(key)])
        if found is not None:
            metric = find_metric(key)
            words.append(f"{metric.label} {metric.show(found.mean)}")
    return ", ".join(words)
