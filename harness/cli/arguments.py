"""Arguments and options that several commands have, with one wording."""

from pathlib import Path
from typing import Annotated

import typer

from harness.errors import WrongUseError

ContainerDir = Annotated[Path, typer.Argument(help="Folder of a container.")]
DeviceSerial = Annotated[
    str | None,
    typer.Option(help="Serial of the device; by default $ANDROID_SERIAL, or the only one."),
]
Json = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]


def read_text(path: Path) -> str:
    """A text file of the user's.

    Raises:
        WrongUseError: it cannot be read as UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUseError(f"cannot read the text {path}: {error}") from error
