"""`qnnfarm op-package`: op packages, the operations that users add to QNN."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import Json
from harness.console import answers, print_json
from harness.errors import WrongUseError

app = typer.Typer(help="Op packages: operations of your own for QNN.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make `check` a command of a group, though it is the only one."""


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="The package's library for this host, x86_64.")],
    provider: Annotated[
        str, typer.Option(metavar="NAME", help="Its function that provides the interface.")
    ],
    json: Json = False,
) -> None:
    """Load an op package into the HTP compiler of this host, and list the operations it adds.

    It shows that the package registers, not that its kernels compute.
    """
    from buildlib.paths import user_path
    from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

    library = user_path(file)
    if not library.is_file():
        raise WrongUseError(f"no file {file}")
    operations = OrtQnnToolchain().op_package(library, provider)
    if not operations:
        raise WrongUseError(
            f"{file} registers, but adds no operation: its information lists none under a name "
            "that QNN does not have already"
        )
    if json:
        print_json({"operations": list(operations)})
        return
    for operation in operations:
        answers().print(operation)
