"""Recordings of commands' runs: results, traces, the library's log, and values in words."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.arguments import RunOptions
from harness.console import print_remark
from harness.errors import HarnessError, WrongUseError
from harness.results.metrics import METRICS
from harness.results.records import Run, new_run_id
from harness.runtimes.base import LogLevel, Model
from harness.words import emulator_notice, pluralize
from harness.workloads.base import UNRECORDED, Recording
from harness.workloads.session import Session

if TYPE_CHECKING:
    from harness.results.store import LazyResultsStore, ResultsStore


@contextmanager
def open_recorded_session(
    model: Model, options: RunOptions, *, command: str, db: str | None = None
) -> Iterator[tuple[Session, Recording]]:
    """Open a session with the recording of its run.

    Args:
        model, command: see `open_session`.
        db: results database; without one, runs are kept for the trace alone.
    """
    from harness.cli.device_lease import open_session

    group_id = new_run_id()
    with (
        _open_store(db, options.trace) as store,
        writing_trace(options.trace, store, [group_id]),
        open_session(model, options, command=command) as session,
        _showing_log(session, options.log_level),
    ):
        yield session, UNRECORDED if store is None else Recording(store.open, group_id)


@contextmanager
def _open_store(db: str | None, trace: Path | None) -> "Iterator[LazyResultsStore | None]":
    """Open the user's store, else one for the trace; None without a trace."""
    if db is None and trace is None:
        yield None
        return
    from harness.results.store import LazyResultsStore

    with (
        tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder,
        LazyResultsStore(db if db is not None else str(Path(folder) / "results.db")) as store,
    ):
        yield store


@contextmanager
def _showing_log(session: Session, log_level: LogLevel | None) -> Iterator[None]:
    """Print the log of the session's last process after the block, if a level was asked for."""
    try:
        yield
    finally:
        if log_level is not None:
            with suppress(HarnessError):
                for line in session.runtime.read_log().splitlines():
                    print_remark(line)


@contextmanager
def writing_trace(
    trace: Path | None, store: "LazyResultsStore | None", group_ids: Sequence[str]
) -> Iterator[None]:
    """Write the trace of all runs in the block, also of those that fail.

    Args:
        trace: the file; None for none.
        group_ids: of the runs, once the block has ended.
    """
    if trace is None or store is None:
        yield
        return
    if not trace.parent.is_dir():
        raise WrongUseError(f"--trace {trace}: there is no folder {trace.parent}")
    try:
        yield
    except HarnessError as error:
        try:
            _write_trace(trace, store, group_ids)
        except HarnessError as unwritten:
            error.add_note(f"and there is no trace: {unwritten}")
        raise
    _write_trace(trace, store, group_ids)


def _write_trace(trace: Path, store: "LazyResultsStore", group_ids: Sequence[str]) -> None:
    if store.existing is None:
        return
    from harness.results.store import RunFilter

    save_trace(store.existing, store.existing.list_runs(RunFilter(group_ids=group_ids)), trace)


def save_trace(store: "ResultsStore", runs: Sequence[Run], trace: Path) -> None:
    """Write the trace of stored runs, and say where."""
    from harness.results.timeline import write_trace

    write_trace(store, runs, trace)
    print_remark(f"wrote {trace}: open it in ui.perfetto.dev")


def with_error(key: str, values: Mapping[str, float]) -> str:
    """Show a metric's value with its unit and, if `KEY_error` is there too, its error."""
    metric, error = METRICS[key], values.get(f"{key}_error")
    if error is None:
        return metric.show(values[key])
    spread = f"{metric.format(values[key])} ± {metric.format(error, beside=values[key])}"
    return f"{spread} {metric.shown_unit}".rstrip()


def in_words(values: Mapping[str, float]) -> str:
    """List values by metric, each with its label and its unit."""
    keys = [key for key in values if key.removesuffix("_error") == key or key[:-6] not in values]
    return ", ".join(f"{METRICS[key].label.lower()} {with_error(key, values)}" for key in keys)


def print_from(session: Session, words: str) -> None:
    """Print on stderr where something was measured, and that an emulator's speed says nothing."""
    print_remark(f"{session.device_label}: {words}")
    if session.properties.emulator:
        print_remark(emulator_notice([session.model.runtime.name]))


def caveats(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the limits of trust in runs: outputs that nothing checked, and the emulator."""
    unchecked = sum(run.check.outcome != "passed" for run in runs)
    if unchecked:
        sessions = pluralize(len(runs), "session")
        yield f"the output of {unchecked} of {sessions} was compared with nothing"
    virtual = [run.workload.runtime for run in runs if run.device.emulator]
    if virtual:
        yield emulator_notice(virtual)
