"""Arguments and options that several commands have, with one wording."""

from pathlib import Path
from typing import Annotated

import typer

ContainerDir = Annotated[Path, typer.Argument(help="Folder of a container.")]
DeviceSerial = Annotated[
    str | None,
    typer.Option(help="Serial of the device; by default $ANDROID_SERIAL, or the only one."),
]
Json = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]
