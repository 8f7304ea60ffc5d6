"""Perplexity of a container on a device, beside references that the host computed."""

import hashlib
from collections.abc import Mapping, Sequence

from harness.results.records import (
    ContainerInfo,
    DeviceInfo,
    PerplexityDefinition,
    Provenance,
    Run,
    Workload,
)
from harness.results.store import ResultsStore
from harness.runtimes.base import PerplexityResult, Runtime, Window


def perplexity_workload(runtime: Runtime, text: str, windows: Sequence[Window]) -> Workload:
    """What the store keeps of scoring `windows` of `text`."""
    return Workload(
        runner=runtime.perplexity_runner,
        dataset_sha256=hashlib.sha256(text.encode()).hexdigest(),
        perplexity=PerplexityDefinition(
            positions=runtime.positions,
            windows=len(windows),
            tokens=sum(len(window.scored) for window in windows),
        ),
    )


def run_perplexity(
    runtime: Runtime,
    text: str,
    records: tuple[ContainerInfo, DeviceInfo, Provenance],
    store: ResultsStore,
    *,
    max_windows: int | None = None,
    references: Mapping[str, float] | None = None,
) -> PerplexityResult:
    """Score a text on the device and keep the result.

    Args:
        references: by metric, such as `perplexity_float`: what the host computed over the same
            positions.

    Raises:
        HarnessError: what went wrong on the device; the run is in the store as failed, with that
            error.
    """
    container, device, provenance = records
    windows = runtime.windows(text, max_windows)
    run = Run(
        kind="perplexity",
        container=container,
        device=device,
        provenance=provenance,
        workload=perplexity_workload(runtime, text, windows),
    )
    with store.recording(run) as recorder:
        recorder.add_library_versions(runtime.versions())
        result = runtime.score(windows)
        recorder.add_values({"perplexity": result.perplexity, **(references or {})})
    return result
