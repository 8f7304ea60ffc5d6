"""Arguments and options that several commands share."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import typer

from buildlib.files import atomic_write_bytes, check_file
from harness.cli.completion import complete_containers, complete_devices
from harness.errors import HostFileError, WrongUseError

_Command = TypeVar("_Command", bound=Callable[..., object])


def with_groups(command: _Command) -> _Command:
    """Give a command for typer the options of its groups, which it takes as dataclasses."""
    parameters = signature(command).parameters
    groups: dict[str, type[Any]] = {
        name: one.annotation
        for name, one in parameters.items()
        if isinstance(one.annotation, type) and is_dataclass(one.annotation)
    }
    options: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        options |= signature(groups[name]).parameters if name in groups else {name: parameter}

    @functools.wraps(command)
    def call(**values: object) -> object:
        for name, group in groups.items():
            values[name] = group(**{one: values.pop(one) for one in signature(group).parameters})
        return command(**values)

    call.__annotations__ = {name: one.annotation for name, one in options.items()}
    vars(call)["__signature__"] = Signature(
        [one.replace(kind=Parameter.KEYWORD_ONLY) for one in options.values()]
    )
    return cast("_Command", call)


ContainerDir = Annotated[
    Path, typer.Argument(help="Folder of a container.", autocompletion=complete_containers)
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        help="Cache of the builds that made the containers; by default $QNNFARM_CACHE_DIR, or the "
        "usual one.",
        show_default=False,
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
Database = Annotated[
    str, typer.Option("--db", help="Results database: a SQLite file, or a database URL.")
]
KeepIn = Annotated[
    str | None, typer.Option("--db", help="Results database to keep the results in.")
]
Threshold = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Largest loss that counts as no difference, as a part: 0.05 is 5 %."
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
LabDb = Annotated[
    str | None,
    typer.Option(
        "--db",
        envvar="QNNFARM_LAB",
        help="Database of the lab's results, which has its queue: postgresql+psycopg://...",
    ),
]
Wait = Annotated[
    float, typer.Option(min=0, help="Seconds to wait for a device that somebody else holds.")
]
WAIT_S = 600.0
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=1,
        metavar="N",
        help="Seconds for an answer, a window or a text on the device. By default 300, and on the "
        "emulator more, by the size of the model.",
        show_default=False,
    ),
]
LogLevel = Annotated[
    Literal["error", "warn", "info", "verbose"] | None,
    typer.Option(
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
Push = Annotated[
    list[str] | None,
    typer.Option(
        "--push",
        metavar="FILE[:NAME]",
        help="Push a file of your own into the folder of the run, too; under the name of a file "
        "there, in its place. May be repeated.",
    ),
]


@dataclass(frozen=True)
class DeviceOptions:
    """The device that a command works on, and the time limit there."""

    device: Annotated[
        str | None,
        typer.Option(
            help="The device: SERIAL, SERIAL@HOST, linux:HOST, virtual:NAME, or a member of the "
            "pool. By default $ANDROID_SERIAL, one of the pool that fits, or the only one.",
            autocompletion=complete_devices,
        ),
    ] = None
    pool: PoolFile = None
    wait: Wait = WAIT_S
    timeout: Timeout = None


@dataclass(frozen=True)
class RecordOptions:
    """The files of a run beside its results."""

    log_level: LogLevel = None
    trace: TraceFile = None
    push: Push = None


@dataclass(frozen=True)
class RunOptions(RecordOptions, DeviceOptions):
    """The device of a run, and the files of the run beside its results."""


ReferenceWith = Annotated[
    Literal["onnx", "transformers"],
    typer.Option(
        help="Engine of the reference: our own float model, or transformers, whose reading of "
        "a checkpoint is not ours (`pip install 'qnnfarm[reference]'`)."
    ),
]


MaxKl = Annotated[
    float | None,
    typer.Option(
        min=0, metavar="N", help="Fail at a KL divergence from the reference above N nats."
    ),
]


_RUNTIME = "Runtime of the container: genie, or another of docs/runtimes.md."
Runtime = Annotated[str, typer.Option("-r", "--runtime", metavar="NAME", help=_RUNTIME)]
LongRuntime = Annotated[str, typer.Option("--runtime", metavar="NAME", help=_RUNTIME)]
"""Without `-r`, which is llama-bench's for repetitions."""
DEFAULT_RUNTIME = "genie"
Json = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]


def absolute(path: Path | str | None) -> str | None:
    """Return the path of an option as workloads and requests take it."""
    return None if path is None else str(Path(path).absolute())


def find_reference(model: str | None) -> None:
    """Find the model of an option, or download it, before a device is leased."""
    if model is not None:
        from buildlib.builder.model_place import find_model

        find_model(model)


def write_file(path: Path, content: bytes) -> None:
    """Write a file of the user's."""
    try:
        atomic_write_bytes(path.expanduser(), content)
    except OSError as error:
        raise HostFileError(str(path), error.strerror or str(error)) from error


def read_text(path: Path) -> str:
    """Read a text file of the user's, in UTF-8."""
    try:
        check_file(path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
        raise WrongUseError(f"cannot read the text {path}: {reason}") from error
