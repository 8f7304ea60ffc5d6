"""The `perplexity` workload, and the float reference that the host computes for it."""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from buildlib.container.container import GenAIContainer
from harness.errors import HostFileError
from harness.results.identity import describe_scored
from harness.results.records import PerplexityDefinition
from harness.results.records import Workload as WorkloadRecord
from harness.runtimes.base import PerplexityResult, Window
from harness.workloads.base import (
    UNRECORDED,
    NonEmpty,
    Recording,
    WorkloadModel,
    WorkloadResult,
    require_passed,
    summarize,
)
from harness.workloads.output_check import bounded_quality
from harness.workloads.session import Session


class Perplexity(WorkloadModel):
    """The perplexity of a text file, by Genie's accuracy API.

    Attributes:
        windows: score only the first windows of the context length; None scores all.
        max: the bound above which the container counts as broken.
    """

    kind: Literal["perplexity"] = "perplexity"
    text: NonEmpty
    windows: Annotated[int, Field(ge=1)] | None = None
    max: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    input_key: ClassVar[str] = "text"

    def run(
        self, session: Session, recording: Recording = UNRECORDED
    ) -> WorkloadResult[PerplexityResult]:
        """Score the file."""
        path = session.resolve(self.text)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise HostFileError(str(path), str(error)) from error
        return score_text(session, text, recording, windows=self.windows, bound=self.max)


def score_text(
    session: Session,
    text: str,
    recording: Recording = UNRECORDED,
    *,
    windows: int | None = None,
    bound: float | None = None,
    references: Mapping[str, float] | None = None,
) -> WorkloadResult[PerplexityResult]:
    """Score a text on the session's device.

    Args:
        windows: score only the first windows; None scores all.
        bound: the highest perplexity that counts as right.
        references: by metric, e.g. `perplexity_float`: what the host computed over the same
            positions.

    Raises:
        OutputCheckError: the perplexity is above the bound.
        HarnessError: what else went wrong; the run is stored as failed, with that error.
    """
    runtime = session.runtime
    cut = runtime.windows(text, windows)
    record = WorkloadRecord(
        runner=runtime.perplexity_runner,
        dataset_sha256=hashlib.sha256(text.encode()).hexdigest(),
        perplexity=PerplexityDefinition(
            positions=runtime.positions,
            windows=len(cut),
            tokens=sum(len(window.scored) for window in cut),
        ),
    )
    with recording.start_if_stored(session, "perplexity", record) as recorder:
        result = runtime.score(cut)
        values = {"perplexity": result.perplexity, **(references or {})}
        if recorder is not None:
            recorder.add_values(values)
        if bound is not None:
            check = bounded_quality(result.perplexity, bound).check
            require_passed(check, recorder, session.device.serial)
    run = recording.stored_run(recorder)
    summary = f"{summarize(values)} over {describe_scored(record.perplexity)}"
    return WorkloadResult(result, values, summary, run)


def float_perplexity(
    checkpoint: Path, container: GenAIContainer, windows: Sequence[Window]
) -> float:
    """Compute, on this host, the perplexity of a checkpoint over windows cut for a container.

    Raises:
        BuildError: the folder holds no checkpoint that can be exported.
    """
    from buildlib.checkpoint.checkpoint import Checkpoint
    from buildlib.checkpoint.config import load_config
    from buildlib.graph.llama import export_onnx
    from buildlib.graph.shape import GraphShape
    from buildlib.reference.perplexity import onnx_perplexity

    graphs = container.metadata.graphs
    shape = GraphShape(max(graphs.auto_regression_numbers), graphs.context_length)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
        model = export_onnx(Checkpoint.load(checkpoint), shape, Path(folder))
        config = load_config(checkpoint / "config.json")
        scored = [window.scored for window in windows]
        return onnx_perplexity({shape.ar: [model]}, config, scored)
