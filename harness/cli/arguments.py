"""Arguments and options that several commands share."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.errors import HarnessError, WrongUseError

if TYPE_CHECKING:
    from harness.results.lazy_store import LazyResultsStore
    from harness.runtimes.base import LogLevel as LogLevelName
    from harness.workloads.session import Session

ContainerDir = Annotated[Path, typer.Argument(help="Folder of a container.")]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="The device: SERIAL, SERIAL@HOST, linux:HOST, virtual:NAME, or a member of the pool. "
        "By default $ANDROID_SERIAL, one of the pool that fits, or the only one.",
    ),
]
PoolFile = Annotated[
    Path | None,
    typer.Option(
        "--pool",
        help="Lease from this pool.yaml; by default from $QNNFARM_POOL or ./pool.yaml, if there is "
        "one.",
        show_default=False,
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="The plan.")]
PlanDb = Annotated[
    str | None,
    typer.Option("--db", help="Results database, instead of the plan's: a SQLite file, or a URL."),
]
PlanPool = Annotated[
    Path | None, typer.Option("--pool", help="Pool configuration, instead of the plan's.")
]
MaxParallel = Annotated[
    int | None, typer.Option("--max-parallel", min=1, help="Most devices to use at once.")
]
Wait = Annotated[
    float,
    typer.Option(min=0, help="Seconds to wait for a device that somebody else holds."),
]
WAIT_S = 600.0
LogLevel = Annotated[
    Literal["error", "warn", "info", "verbose"] | None,
    typer.Option(
        "--log-level",
        help="Level of the library's own log, of Genie and of QNN. It goes with the log of the run "
        "and with every failure; by default, its errors do.",
        show_default=False,
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write a trace that ui.perfetto.dev reads: the deployment, each call of a graph, each "
        "token, and what the sensors read. Packed if the name ends in .gz.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        WrongUseError: it cannot be read as UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
        raise WrongUseError(f"cannot read the text {path}: {said}") from error


@contextmanager
def scratch_store(trace: Path | None) -> "Iterator[LazyResultsStore | None]":
    """Make a store for a trace where the user keeps no results; None without a trace."""
    if trace is None:
        yield None
        return
    from harness.results.lazy_store import LazyResultsStore

    with (
        tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder,
        LazyResultsStore(str(Path(folder) / "results.db")) as store,
    ):
        yield store


@contextmanager
def showing_log(session: "Session", log_level: "LogLevelName | None") -> Iterator[None]:
    """Print the log of the session's last process after the block, if a level was asked for."""
    from harness.console import print_remark

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
    """Write the trace of what the block stores, also of what fails in it.

    Args:
        trace: the file; None for none.
        group_ids: of the runs, once the block has ended.

    Raises:
        WrongUseError: the file's folder does not exist.
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
    from harness.console import print_remark
    from harness.results.store import RunFilter
    from harness.results.timeline import write_trace

    if store.existing is None:
        return
    found = [store.existing.list_runs(RunFilter(group_id=group_id)) for group_id in group_ids]
    runs = sorted((run for group in found for run in group), key=lambda run: run.created_at)
    write_trace(store.existing, runs, trace)
    print_remark(f"wrote {trace}: open it in ui.perfetto.dev")
