"""Comparison of the logits of models: the `verify` workload, and the answer of the command.

A device decodes the second half of each window token by token, whatever the logits say, so that it
goes the way of the text and all sides see the same context. Genie hands the logits to a custom
sampler of ours.
"""

import hashlib
import math
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer
from pydantic import Field

from harness.console import Row, answers, print_json, print_rows
from harness.errors import BAD, OutputCheckError
from harness.results.metrics import METRICS
from harness.results.records import OutputCheck, PerplexityDefinition, Run, WorkloadRecord
from harness.runtimes.base import DecodesSteps, Model, Need, Scores, StepWindow
from harness.workloads.base import (
    UNRECORDED,
    NonEmpty,
    Recording,
    Workload,
    WorkloadResult,
    require_passed,
    summarize,
)
from harness.workloads.perplexity import read_text
from harness.workloads.reference import (
    engine_versions,
    float_config,
    open_float,
    window_samples,
)
from harness.workloads.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from buildlib.numerics.comparison import Bound, SideComparison, VerificationReport
    from buildlib.numerics.divergence import Divergence, Logits
    from buildlib.numerics.evaluation import ModelSide, OpenSide, Sample
    from buildlib.numerics.host_loop import TokenModel
    from buildlib.numerics.transformers import ReferenceEngine
    from harness.results.run_recorder import RunRecorder

KL_DIVERGENCE, TOP1_AGREEMENT = "kl_divergence", "top1_agreement"
DEFAULT_WINDOWS = 2
"""By default: the emulator decodes a few tokens a second."""
_HEADINGS = (
    "side", "runs on", "tokens", "perplexity", "away", "KL", "top-1", "SQNR", "difference",
    "bound",
)  # fmt: skip


class Verify(Workload):
    """The logits of a container's decode steps on a device, beside those of the model in float.

    Attributes:
        reference: the checkpoint that the host runs in float.
        reference_with: engine of the reference: our own float model (None), or transformers.
        max_kl: bound of the KL divergence in nats; None judges nothing.
    """

    kind: Literal["verify"] = "verify"
    text: NonEmpty
    reference: NonEmpty
    reference_with: Literal["onnx", "transformers"] | None = None
    windows: Annotated[int, Field(ge=1)] = DEFAULT_WINDOWS
    max_kl: Annotated[float, Field(ge=0)] | None = None

    input_keys: ClassVar[tuple[str, ...]] = ("text",)

    @property
    def needs(self) -> tuple[Need, ...]:
        """See `Workload.needs`."""
        return (Scores, DecodesSteps)

    def check(self, model: Model) -> None:
        """See `Workload.check`; the engine of the reference must be installed, too."""
        super().check(model)
        if self.reference_with == "transformers":
            from buildlib.numerics.transformers import require_installed

            require_installed(Path(self.reference))

    def run(
        self, session: Session, recording: Recording = UNRECORDED
    ) -> "WorkloadResult[Divergence]":
        """Run the model in float on this host, then decode on the device."""
        text = read_text(session.resolve(self.text))
        return compare_with_float(
            session,
            text,
            self.reference,
            recording,
            windows=self.windows,
            max_kl=self.max_kl,
            reference_with=self.reference_with or "onnx",
        )


def compare_with_float(
    session: Session,
    text: str,
    reference: str | Path,
    recording: Recording = UNRECORDED,
    *,
    windows: int = DEFAULT_WINDOWS,
    max_kl: float | None = None,
    reference_with: "ReferenceEngine" = "onnx",
) -> "WorkloadResult[Divergence]":
    """Compare the decode steps of a session's device with the model in float on this host.

    Raises:
        OutputCheckError: the KL divergence is above `max_kl`.
    """
    from buildlib.numerics.evaluation import compare_sides

    model, folder = session.model, session.options.folder
    config = float_config(reference, folder)
    samples = window_samples(model.windows(text, windows), config.begin, model.info.model)
    opened = nullcontext((session, recording))
    device = DeviceSide(model.runtime.name, opened, text, max_kl, reference_with)
    in_float = partial(open_float, reference, model.info, reference_with, folder)
    side = float_side(in_float, reference_with)
    *_, row = compare_sides(side, [device.side], samples, config.vocab_size)
    values = row.found.metrics
    return WorkloadResult(row.found, values, summarize(values), device.run)


def float_side(
    open_model: "Callable[[], AbstractContextManager[TokenModel]]",
    engine: "ReferenceEngine" = "onnx",
) -> "ModelSide":
    """Return a model in float as a side."""
    from buildlib.numerics.evaluation import ModelSide, open_side

    versions = ", ".join(f"{name} {version}" for name, version in engine_versions(engine).items())
    name = "float" if engine == "onnx" else engine
    return ModelSide(name, lambda: open_side(open_model(), versions or "CPU, float"))


def kl_bound(most: float | None) -> "Bound":
    """Return the bound of a user, in nats; without one, values must be finite."""
    from buildlib.numerics.comparison import FINITE, Bound

    return FINITE if most is None else Bound("kl", most)


@dataclass
class DeviceSide:
    """A container through a runtime on a device, whose run is stored.

    Attributes:
        name: of the runtime.
        opened: the session, and where its run is recorded.
        text: that the samples are of.
        reference_with: engine of the model in float, if runs are recorded.
        run: as stored, once it has ended.
    """

    name: str
    opened: AbstractContextManager[tuple[Session, Recording]]
    text: str = ""
    max_kl: float | None = None
    reference_with: "ReferenceEngine" = "onnx"
    run: Run | None = None

    @property
    def side(self) -> "ModelSide":
        """It as a side."""
        from buildlib.numerics.evaluation import ModelSide

        return ModelSide(self.name, self.open, kl_bound(self.max_kl), ("decode",))

    @contextmanager
    def open(self) -> "Iterator[OpenSide]":
        """Open the session; a run begins with the samples."""
        from buildlib.numerics.evaluation import OpenSide

        recorder: RunRecorder | None = None
        with self.opened as (session, recording):
            runtime = session.require(DecodesSteps)
            with ExitStack() as running:

                def predict(samples: "Sequence[Sample]", _calls: object) -> "Sequence[Logits]":
                    nonlocal recorder
                    record = WorkloadRecord(
                        runner=session.runtime.runner(DecodesSteps),
                        dataset_sha256=hashlib.sha256(self.text.encode()).hexdigest(),
                        perplexity=PerplexityDefinition(
                            positions="decode_steps",
                            windows=len(samples),
                            tokens=sum(len(sample.following) for sample in samples),
                        ),
                    )
                    started = recording.start_if_stored(session, "perplexity", record)
                    recorder = running.enter_context(started)
                    answer = runtime.decode_steps(
                        [StepWindow(one.prompt, one.following, bool(one.begin)) for one in samples]
                    )
                    if recorder is not None:
                        recorder.traces.append(answer.trace)
                    return answer.windows

                def keep(found: "Divergence") -> None:
                    if recorder is not None:
                        recorder.add_values(found.metrics)
                        recorder.add_library_versions(engine_versions(self.reference_with))
                    if self.max_kl is not None:
                        check = _check(found, self.max_kl)
                        require_passed(check, recorder, session.device.serial)

                yield OpenSide(session.device_label, predict, keep)
            self.run = recording.stored_run(recorder)


def _check(divergence: "Divergence", max_kl: float) -> OutputCheck:
    summary = (
        f"the KL divergence from the reference is {divergence.kl:.5f} nats over {divergence.steps} "
        "steps"
    )
    if divergence.kl <= max_kl:
        return OutputCheck(outcome="passed", reason=f"{summary}, at most {max_kl:g}")
    return OutputCheck(outcome="failed", reason=f"{summary}, above {max_kl:g}")


def collect(rows: "Iterable[SideComparison]") -> "VerificationReport":
    """Run a comparison, up to a device that is outside of its bound."""
    from buildlib.numerics.comparison import VerificationReport

    done: list[SideComparison] = []
    with suppress(OutputCheckError):  # its row says so
        for row in rows:
            done.append(row)  # noqa: PERF402  (kept where the next one fails)
    return VerificationReport(tuple(done))


def answer(report: "VerificationReport", model: str, *, json: bool) -> None:
    """Print the answer of a command.

    Raises:
        Exit: a side is outside of its bound.
    """
    if json:
        print_json({"model": model, **report.as_document()})
    else:
        print_report(report)
    if not report.passed:
        raise typer.Exit(BAD)


def print_report(report: "VerificationReport") -> None:
    """Print a table, and which side is the first outside of its bound."""
    rows = [Row(_cells(row), [row.note] if row.note else []) for row in report.rows]
    print_rows(_HEADINGS, rows, right=set(_HEADINGS[2:-1]))
    if report.failures:
        first = report.failures[0]
        where = f"{first.side} ({first.calls or first.where})"
        answers().print(f"NOT the same model: {where} is the first outside of {first.bound}")


def _cells(row: "SideComparison") -> list[str]:
    found = row.divergence
    bound = row.bound if row.passed else f"NOT {row.bound}"
    if found is None:
        return [row.side, row.where, *["-"] * (len(_HEADINGS) - 3), bound]
    cells = [row.side, row.where, " ".join(filter(None, (str(found.steps), row.calls)))]
    cells.append(f"{found.perplexity:.3f}")
    if not row.bound:  # the reference
        return [*cells, *["-"] * (len(_HEADINGS) - len(cells))]
    return [
        *cells,
        f"{found.perplexity / found.perplexity_float - 1:+.2%}",
        METRICS[KL_DIVERGENCE].show(found.kl),
        METRICS[TOP1_AGREEMENT].show(found.top1),
        "equal" if math.isinf(found.sqnr_db) else f"{found.sqnr_db:.1f} dB",
        f"{found.relative:.1g}",
        bound,
    ]
