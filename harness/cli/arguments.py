"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from harness.errors import WrongUseError

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
Wait = Annotated[
    float,
    typer.Option(min=0, help="Seconds to wait for a device that somebody else holds."),
]
WAIT_S = 600.0
Json = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        WrongUseError: it cannot be read as UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUseError(f"cannot read the text {path}: {error}") from error
