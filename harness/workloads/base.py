"""`Workload`, the base of all kinds of work on a device, and what records their runs."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from buildlib.validation import first_fault
from harness.errors import (
    DeviceError,
    FailureClass,
    HarnessError,
    OutputCheckError,
    WrongUseError,
    one_line,
)
from harness.results.metrics import BRIEF_METRICS, METRICS, summarise
from harness.results.perplexity import describe_scored
from harness.results.records import OutputCheck, Run, RunKind, WorkloadRecord, new_run_id
from harness.runtimes.base import GenerationResult, Model, Need, require
from harness.runtimes.dialog_settings import DialogSettings
from harness.workloads.session import Session

if TYPE_CHECKING:
    from harness.results.run_recorder import RunRecorder
    from harness.results.store import ResultsStore
    from harness.workloads.chat import Chat

NonEmpty = Annotated[str, Field(min_length=1, pattern=r"\A[^\x00]+\Z")]
Output = TypeVar("Output", covariant=True)  # noqa: PLC0105
_SUMMARY_LENGTH = 60


CHAT_KEYS = ("chat", "system")


class ChatFields(BaseModel):
    """Fields of workloads with prompts that a chat template can make.

    Attributes:
        chat: the container's chat template makes the prompts, of which each is a user's turn.
        system: the system message of a chat.
    """

    chat: bool | None = None
    system: Annotated[str, Field(min_length=1)] | None = None

    def open_chat(self, folder: Path) -> "Chat":
        """Read the chat template of a container."""
        from harness.workloads.chat import Chat

        return Chat.of(folder)

    @model_validator(mode="after")
    def _fits_a_chat(self) -> Self:
        if self.system is not None and not self.chat:
            raise ValueError("`system` is the system message of a chat: give `chat`, too")
        if self.chat and getattr(self, "stop", None):
            raise ValueError(
                "`chat`: Genie stops at no sequences after token ids: leave out `stop`"
            )
        return self


@dataclass(frozen=True, slots=True)
class WorkloadResult(Generic[Output]):
    """Result of a workload on a device.

    Attributes:
        output: the result of this kind of workload.
        values: mean over the measured repetitions, by metric.
        summary: a few words for people: `prefill 12.3 tokens/s`.
        run: the run as stored; None if nothing was stored.
    """

    output: Output
    values: Mapping[str, float]
    summary: str
    run: Run | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """Database of a workload's run, and its ties to other runs.

    Attributes:
        open_store: gives the store once there is something to keep; None stores nothing.
        group_id: shared by runs that belong together; empty for a group of its own.
        session: number of the session in its group, from 0.
        label: tells the members of a group apart.
        first: the group's first session of the same container, whose text a benchmark must repeat.
        labels: the user's own keys and values.
        plan: name of the plan.
        shield: lets the logs of a failure be read though its cell was cancelled.
    """

    open_store: "Callable[[], ResultsStore] | None" = None
    group_id: str = ""
    session: int = 0
    label: str = ""
    first: Run | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    plan: str | None = None
    shield: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def store(self) -> "ResultsStore":
        """The store; made now if there is none yet."""
        if self.open_store is None:
            raise ValueError("this workload needs a results store")
        return self.open_store()

    @contextmanager
    def start(
        self, session: Session, kind: RunKind, workload: WorkloadRecord
    ) -> "Iterator[RunRecorder]":
        """Record a run while the block lasts; it is stored as failed if the block raises."""
        container, device, provenance = session.records()
        workload = workload.model_copy(update={"sampler": {**workload.sampler, **session.settings}})
        run = Run(
            kind=kind,
            group_id=self.group_id or new_run_id(),
            session=self.session,
            label=self.label,
            labels=self.labels,
            plan=self.plan,
            container=container,
            device=device,
            provenance=provenance,
            workload=workload,
        )
        began = time.monotonic()
        with self.store.recording(run) as recorder:
            try:
                recorder.add_library_versions(session.runtime.versions())
                sha256 = session.runtime.sha256_of(workload.runner)
                if sha256 is not None:
                    recorder.set_runner_sha256(sha256)
                yield recorder
            except HarnessError as error:
                with self.shield(), suppress(HarnessError):  # the failure is what counts
                    _keep_records(session, recorder, error, time.monotonic() - began)
                raise
            sessions = session.count.highest
            if sessions is not None:
                recorder.set_concurrency(sessions)
            _keep_records(session, recorder)

    def start_if_stored(
        self, session: Session, kind: RunKind, workload: WorkloadRecord
    ) -> "AbstractContextManager[RunRecorder | None]":
        """Record a run as `start` does, or nothing if there is no store."""
        return nullcontext() if self.open_store is None else self.start(session, kind, workload)

    def stored_run(self, recorder: "RunRecorder | None") -> Run | None:
        """Read back the run of an ended recording."""
        return None if recorder is None else self.store.get_run(recorder.run.id)


def _keep_records(
    session: Session,
    recorder: "RunRecorder",
    error: HarnessError | None = None,
    seconds: float = 0.0,
) -> None:
    """Keep the runtime's records of a run: profiles, traces and its log."""
    profiles = [
        json.dumps(json.loads(profile), separators=(",", ":")) + "\n"
        for profile in recorder.profiles
        if profile
    ]
    if profiles:
        recorder.add_artifact("profiles.jsonl", "".join(profiles).encode(), "profile")
    if any(recorder.traces):
        recorder.add_traces(session.runtime.prepare().stages)
    if error is not None and error.loses_device:
        return
    log = ""
    with suppress(DeviceError):  # all that counts was measured before
        log = session.runtime.read_log()
    if log:
        recorder.add_artifact("run.log", log.encode(), "log")
    if error is not None and error.failure_class is not FailureClass.USE:
        from harness.telemetry.device_log import read_device_log

        for name, text in read_device_log(session.device, seconds).items():
            recorder.add_artifact(f"{name}.txt", text.encode(errors="replace"), "log")


UNRECORDED = Recording()


class Workload(BaseModel):
    """One thing to do on a leased device: frozen, checked when made, and kept as JSON (`registry`).

    Each kind has a method `run(session, recording)`, which gives a `WorkloadResult`. It raises
    `OutputCheckError` for a wrong output, and other `HarnessError`s; the run is stored as failed.

    Attributes:
        kind: its type tag in plans, journals and JSON; each kind declares it.
        needs_container: False for a plain command.
        length_key: field that sets how much context is needed; empty if none does.
        input_keys: fields that name files on this host.
        binary_keys: those of them that name binary files.
        later_keys: fields that older journals of plans do not know; None means nothing there.
        under_conditions: whether its values depend on the conditions that it begins under.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="python-re")

    needs_container: ClassVar[bool] = True
    length_key: ClassVar[str] = ""
    input_keys: ClassVar[tuple[str, ...]] = ()
    binary_keys: ClassVar[frozenset[str]] = frozenset()
    later_keys: ClassVar[frozenset[str]] = frozenset()
    under_conditions: ClassVar[bool] = False

    @classmethod
    def of(cls, **fields: object) -> Self:
        """Make one from values that a user gave.

        Raises:
            WrongUseError: names the first wrong field, or, in backquotes, fields that do not go
                together.
        """
        try:
            return cls.model_validate({"kind": cls.model_fields["kind"].default, **fields})
        except ValidationError as error:
            fault = first_fault(error, cls)
            field = f"{fault.location[0]}: " if fault.location else ""
            raise WrongUseError(f"{field}{fault.reason}") from error

    @property
    def needs(self) -> Sequence[Need]:
        """Capabilities that the runtime must have."""
        return ()

    def check(self, model: Model) -> None:
        """Refuse a model that cannot run it, before any device is involved.

        Raises:
            WrongUseError: its runtime cannot do what the workload needs.
            PromptTooLongError: it needs more context than the model has.
        """
        require(model.runtime, self.needs)


class DialogWorkload(DialogSettings, Workload):
    """Base of workloads that hold a dialog with settings of their own."""

    def check_dialog(
        self, model: Model, prompt_tokens: int, new_tokens: int, *, depth_tokens: int = 0
    ) -> None:
        """Refuse a dialog that the runtime cannot hold with the model.

        A dialog of another `genie_config` is judged when it runs: a plan's file is relative to it.
        """
        if self.genie_config is None:
            settings = self.resolved(Path)
            model.check_dialog(settings, prompt_tokens, new_tokens, depth_tokens=depth_tokens)


def check_length(result: GenerationResult) -> OutputCheck:
    """Fail an answer of fewer tokens than were asked for, unless something ended it."""
    end = result.early_end
    if end is None or end.reason is not None:
        return OutputCheck()
    return OutputCheck(outcome="failed", reason=str(end))


def require_passed(check: OutputCheck, recorder: "RunRecorder | None", serial: str) -> None:
    """Record an output check, and raise if it failed."""
    if recorder is not None:
        recorder.set_check(check.outcome, check.reason)
    if check.outcome == "failed":
        raise OutputCheckError(serial, check.reason)


def stored_result(run: Run) -> WorkloadResult[Run]:
    """Return the result of a workload that was stored as a run."""
    values = {
        key: stats.mean for key in METRICS if (stats := summarise([run.values(key)])) is not None
    }
    text = run.generated_text if run.kind == "generate" else None
    summary = summarize(values, text)
    if run.kind == "perplexity":
        summary += f" over {describe_scored(run.workload.perplexity)}"
    return WorkloadResult(run, values, summary, run)


def summarize(values: Mapping[str, float], text: str | None = None) -> str:
    """Summarize an answer by its beginning, other results by their main metrics."""
    figures = [
        f"{METRICS[key].label} {METRICS[key].show(values[key])}"
        for key in BRIEF_METRICS
        if key in values
    ]
    return one_line(text or "", _SUMMARY_LENGTH) or ", ".join(figures)
