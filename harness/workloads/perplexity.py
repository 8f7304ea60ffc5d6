"""The `perplexity` workload, and the float reference that the host computes for it."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from harness.errors import HostFileError, WrongUseError
from harness.results.identity import describe_scored
from harness.results.perplexity import (
    PERPLEXITY,
    PERPLEXITY_ERROR,
    PERPLEXITY_FLOAT,
    PerplexityBound,
)
from harness.results.records import ContainerInfo, PerplexityDefinition, WorkloadRecord
from harness.runtimes.base import (
    DecodesSteps,
    Model,
    ModelRole,
    Need,
    PerplexityResult,
    Scores,
    Window,
    require,
)
from harness.runtimes.container_model import ContainerModel
from harness.runtimes.context_limit import ContextLimit
from harness.workloads.base import (
    UNRECORDED,
    NonEmpty,
    Recording,
    WorkloadModel,
    WorkloadResult,
    require_passed,
    summarize,
)
from harness.workloads.reference import engine_versions, open_float
from harness.workloads.session import Session
from harness.workloads.steps import (
    DEFAULT_STEP_WINDOWS,
    StepResult,
    compare_steps,
    cut_steps,
    float_steps,
)

if TYPE_CHECKING:
    from buildlib.numerics.transformers import ReferenceEngine


def _readable_bound(value: float | str) -> float | str:
    try:
        PerplexityBound.parse(value)
    except WrongUseError as error:
        raise ValueError(error.reason) from error
    return value


MaxPerplexity = Annotated[float | str, AfterValidator(_readable_bound)]
"""A bound of a workload: 20, or `5%` of the model in float."""


class Perplexity(WorkloadModel):
    """The perplexity of a text file, by Genie's accuracy API.

    Attributes:
        windows: score only the first windows of the context length; None scores all.
        max: the bound above which the container counts as broken.
        reference: folder of the checkpoint that the host scores in float over the same positions.
        reference_with: what computes that, our own float model or transformers; None is ours.
        role: which model of a container that drafts; `reference` is that model's.
        per_step: compare the logits of decode steps with those of `reference` instead, over 2
            windows if none are set; `max_kl` bounds their divergence in nats.
    """

    kind: Literal["perplexity"] = "perplexity"
    text: NonEmpty
    windows: Annotated[int, Field(ge=1)] | None = None
    max: MaxPerplexity | None = None
    reference: NonEmpty | None = None
    reference_with: Literal["onnx", "transformers"] | None = None
    role: ModelRole | None = None
    per_step: bool | None = None
    max_kl: Annotated[float, Field(ge=0)] | None = None

    input_keys: ClassVar[tuple[str, ...]] = ("text",)
    later_keys: ClassVar[frozenset[str]] = frozenset(
        {"reference", "reference_with", "role", "per_step", "max_kl"}
    )

    @model_validator(mode="after")
    def _relative_to_a_reference(self) -> Self:
        bound = self.bound
        if bound is not None and bound.relative and self.reference is None:
            raise ValueError(f"`max` {bound} is relative to the float model: give its `reference`")
        if self.reference_with is not None and self.reference is None:
            raise ValueError("`reference_with` computes the reference: give `reference`")
        if self.per_step:
            if self.reference is None:
                raise ValueError("`per_step` compares with the float model: give its `reference`")
            if bound is not None or self.role == "draft":
                raise ValueError("`per_step` goes with `max_kl`, not with `max` or `role` draft")
        elif self.max_kl is not None:
            raise ValueError("`max_kl` goes with `per_step`")
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
        return (Scores, DecodesSteps) if self.per_step else (Scores,)

    def check(self, model: Model) -> None:
        """See `Workload.check`; what computes the reference is installed, too."""
        check_scored(model, per_step=bool(self.per_step))
        if self.reference_with == "transformers":
            from buildlib.numerics.transformers import require_installed

            require_installed(Path(str(self.reference)))

    def run(
        self, session: Session, recording: Recording = UNRECORDED
    ) -> WorkloadResult[PerplexityResult] | WorkloadResult[StepResult]:
        """Score the file, on the host in float first."""
        text = read_text(session.resolve(self.text))
        if self.per_step and self.reference is not None:
            return self._run_steps(session, text, session.resolve(self.reference), recording)
        role = self.role or "target"
        references = {}
        if self.reference is not None:
            cut = session.model.windows(text, self.windows, role)
            value = float_perplexity(
                session.resolve(self.reference), session.container_info, cut, self.engine
            )
            references[PERPLEXITY_FLOAT] = value
        return score_text(
            session,
            text,
            recording,
            windows=self.windows,
            bound=self.bound,
            references=references,
            reference_with=self.engine,
            role=role,
        )

    def _run_steps(
        self, session: Session, text: str, reference: Path, recording: Recording
    ) -> WorkloadResult[StepResult]:
        windows = session.model.windows(text, self.windows or DEFAULT_STEP_WINDOWS)
        steps = cut_steps(windows)
        expected = float_steps(reference, session.container_info, steps, self.engine)
        return compare_steps(
            session,
            text,
            steps,
            expected,
            recording,
            max_kl=self.max_kl,
            reference_with=self.engine,
        )


def check_scored(model: Model, *, per_step: bool = False) -> None:
    """Refuse a model that cannot score texts.

    Args:
        per_step: whether it decodes them step by step.

    Raises:
        WrongUseError: its runtime cannot.
        ContainerError: it holds a text encoder.
    """
    require(model.runtime, (Scores, DecodesSteps) if per_step else (Scores,))
    if isinstance(model, ContainerModel):
        ContextLimit.of(model.container)


def read_text(path: Path) -> str:
    """Read a text to score.

    Raises:
        HostFileError: it is not readable UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HostFileError(str(path), str(error)) from error


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
        bound: what counts as right; a relative one needs the float reference.
        references: by metric, e.g. `perplexity_float`: what the host computed over the same
            positions.
        reference_with: what computed them; the versions of transformers are stored with the run.
        dataset_sha256: hash of the text that this one repeats; by default of this one.
        role: which model of a container that drafts.
        lora: the adapter to apply, and its strength.

    Raises:
        OutputCheckError: the perplexity is above the bound.
        HarnessError: what else went wrong; the run is stored as failed, with that error.
    """
    runtime = session.require(Scores)
    cut = session.model.windows(text, windows, role)
    definition = PerplexityDefinition(
        positions=runtime.positions(role),
        windows=len(cut),
        tokens=sum(len(window.scored) for window in cut),
    )
    record = WorkloadRecord(
        runner=session.runtime.runner(Scores),
        dataset_sha256=dataset_sha256 or hashlib.sha256(text.encode()).hexdigest(),
        perplexity=definition,
        sampler=_adapter(lora or {}),
    )
    with recording.start_if_stored(session, "perplexity", record) as recorder:
        result = runtime.score(cut, role, lora)
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
    checkpoint: Path,
    info: ContainerInfo,
    windows: Sequence[Window],
    engine: "ReferenceEngine" = "onnx",
) -> float:
    """Compute, on this host, the perplexity of a checkpoint over windows cut for a model of it.

    Raises:
        BuildError: the folder holds no checkpoint that the engine can compute.
    """
    from buildlib.numerics.evaluation import text_perplexity

    (context,) = {len(window.context) for window in windows}
    with open_float(checkpoint, info, engine) as (model, config):
        pieces = [(*window.context, *window.scored) for window in windows]
        return text_perplexity(model, config, pieces, context=context)
