"""The `perplexity` workload, and the float reference that the host computes for it."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from buildlib.files import check_file
from harness.errors import HostFileError, WrongUseError
from harness.results.perplexity import (
    PERPLEXITY,
    PERPLEXITY_ERROR,
    PERPLEXITY_FLOAT,
    PerplexityBound,
    describe_scored,
)
from harness.results.records import ContainerInfo, PerplexityDefinition, WorkloadRecord
from harness.runtimes.base import (
    Model,
    ModelRole,
    Need,
    PerplexityResult,
    Scores,
    Window,
)
from harness.runtimes.container_model import ContainerModel
from harness.runtimes.dialog_settings import Lora
from harness.runtimes.tokenizer import ContextLimit
from harness.words import pluralize
from harness.workloads.base import (
    UNRECORDED,
    NonEmpty,
    Recording,
    Workload,
    WorkloadResult,
    require_passed,
    summarize,
)
from harness.workloads.reference import (
    engine_versions,
    float_config,
    open_float,
    window_samples,
)
from harness.workloads.session import Session

if TYPE_CHECKING:
    from buildlib.numerics.transformers import ReferenceEngine


def _readable_bound(value: float | str) -> float | str:
    try:
        bound = PerplexityBound.parse(value)
    except WrongUseError as error:
        raise ValueError(error.reason) from error
    return str(bound) if bound.relative else bound.limit


MaxPerplexity = Annotated[float | str, AfterValidator(_readable_bound)]
"""A bound of a workload: 20, or `5%` of the model in float."""


class Perplexity(Workload):
    """The perplexity of a text file, by Genie's accuracy API.

    Attributes:
        windows: score only the first windows of the context length; None scores all.
        max: the bound above which the container counts as broken.
        reference: the checkpoint that the host scores in float over the same positions.
        reference_with: engine of the reference: our own float model (None), or transformers.
        role: which model of a container that drafts; `reference` is that model's.
        lora: the adapter to apply, and its strength.
    """

    kind: Literal["perplexity"] = "perplexity"
    text: NonEmpty
    windows: Annotated[int, Field(ge=1)] | None = None
    max: MaxPerplexity | None = None
    reference: NonEmpty | None = None
    reference_with: Literal["onnx", "transformers"] | None = None
    role: ModelRole | None = None
    lora: Lora | None = None

    input_keys: ClassVar[tuple[str, ...]] = ("text",)
    later_keys: ClassVar[frozenset[str]] = frozenset(
        {"reference", "reference_with", "role", "lora"}
    )

    @model_validator(mode="after")
    def _relative_to_a_reference(self) -> Self:
        bound = self.bound
        if bound is not None and bound.relative and self.reference is None:
            raise ValueError(f"`max` {bound} is relative to the float model: give its `reference`")
        if self.reference_with is not None and self.reference is None:
            raise ValueError("`reference_with` computes the reference: give `reference`")
        return self

    @property
    def engine(self) -> "ReferenceEngine":
        """The engine of the reference: `reference_with`, by default `onnx`."""
        return self.reference_with or "onnx"

    @property
    def bound(self) -> PerplexityBound | None:
        """The bound, read."""
        return None if self.max is None else PerplexityBound.parse(self.max)

    @property
    def needs(self) -> tuple[Need, ...]:
        """See `Workload.needs`."""
        return (Scores,)

    def check(self, model: Model) -> None:
        """See `Workload.check`; the engine of the reference must be installed, too."""
        super().check(model)
        if isinstance(model, ContainerModel):
            ContextLimit.of(model.container)
        if self.reference_with == "transformers":
            from buildlib.numerics.transformers import require_installed

            require_installed(Path(str(self.reference)))

    def prepare(
        self,
        model: Model,
        folder: Path = Path(),
        on_progress: Callable[[str], None] = lambda _words: None,
    ) -> "PreparedText":
        """Read the text, and compute its references in float: all that needs no device.

        Args:
            folder: that the paths of the workload are relative to.
            on_progress: called with words before the host computes.

        Raises:
            HostFileError: the text cannot be read.
            WrongUseError: it is shorter than one window.
            BuildError: the reference cannot be computed.
        """
        text = read_text(folder / Path(self.text).expanduser())
        windows = model.windows(text, self.windows, self.role or "target")
        if self.reference is None:
            return PreparedText(text)
        on_progress(f"scoring {pluralize(len(windows), 'window')} in float on this host")
        value = float_perplexity(self.reference, model.info, windows, self.engine, folder)
        return PreparedText(text, references={PERPLEXITY_FLOAT: value})

    def run(
        self,
        session: Session,
        recording: Recording = UNRECORDED,
        prepared: "PreparedText | None" = None,
    ) -> WorkloadResult[PerplexityResult]:
        """Score the file, on the host in float first unless that was prepared."""
        prepared = prepared or self.prepare(session.model, session.options.folder)
        return score_text(
            session,
            prepared.text,
            recording,
            windows=self.windows,
            bound=self.bound,
            references=prepared.references,
            reference_with=self.engine,
            role=self.role or "target",
            lora=self.lora,
        )


@dataclass(frozen=True)
class PreparedText:
    """A text with the results in float of this host, by metric, over what a device scores."""

    text: str
    references: Mapping[str, float] = field(default_factory=dict)


def read_text(path: Path) -> str:
    """Read a text to score."""
    try:
        check_file(path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
        raise HostFileError(str(path), reason or str(error)) from error


def score_text(
    session: Session,
    text: str,
    recording: Recording = UNRECORDED,
    *,
    windows: int | None = None,
    bound: PerplexityBound | None = None,
    references: Mapping[str, float] | None = None,
    reference_with: "ReferenceEngine" = "onnx",
    dataset_sha256: str | None = None,
    role: ModelRole = "target",
    lora: Mapping[str, float] | None = None,
) -> WorkloadResult[PerplexityResult]:
    """Score a text on the session's device.

    Args:
        windows: score only the first windows; None scores all.
        bound: the highest right value; a relative one needs the float reference.
        references: results of the host over the same positions, such as `perplexity_float`.
        reference_with: the engine of them; the versions of transformers are stored with the run.
        dataset_sha256: hash of the text that this one repeats; by default of this one.
        role: which model of a container that drafts.
        lora: the adapter to apply, and its strength.
    """
    runtime = session.require(Scores)
    pieces = session.model.windows(text, windows, role)
    definition = PerplexityDefinition(
        positions=runtime.positions(role),
        windows=len(pieces),
        tokens=sum(len(window.scored) for window in pieces),
    )
    record = WorkloadRecord(
        runner=session.runtime.runner(Scores),
        dataset_sha256=dataset_sha256 or hashlib.sha256(text.encode()).hexdigest(),
        perplexity=definition,
        sampler=_adapter(lora or {}),
    )
    with recording.start_if_stored(session, "perplexity", record) as recorder:
        result = runtime.score(pieces, role, lora)
        values = {PERPLEXITY: result.perplexity, **(references or {})}
        if result.error is not None:
            values[PERPLEXITY_ERROR] = result.error
        if recorder is not None:
            recorder.add_values(values)
            recorder.add_library_versions(engine_versions(reference_with))
            recorder.traces.extend(result.traces)
        if bound is not None:
            check = bound.check(values, describe_scored(definition))
            require_passed(check, recorder, session.device.serial)
    summary = f"{summarize(values)} over {describe_scored(definition)}"
    return WorkloadResult(result, values, summary, recording.stored_run(recorder))


def _adapter(lora: Mapping[str, float]) -> dict[str, str]:
    """Return the labels that tell a run's adapter."""
    text = ", ".join(f"{name}={strength:g}" for name, strength in lora.items())
    return {"lora": text} if text else {}


def float_perplexity(
    checkpoint: str | os.PathLike[str],
    info: ContainerInfo,
    windows: Sequence[Window],
    engine: "ReferenceEngine" = "onnx",
    folder: Path | None = None,
) -> float:
    """Compute, on this host, the perplexity of a checkpoint over windows cut for a model of it.

    Args:
        checkpoint, folder: as `open_float` has them.
    """
    from buildlib.numerics.evaluation import text_perplexity

    samples = window_samples(windows, float_config(checkpoint, folder).begin, info.model)
    with open_float(checkpoint, info, engine, folder) as model:
        return text_perplexity(model, samples)
