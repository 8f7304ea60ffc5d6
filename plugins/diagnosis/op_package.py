"""`qnnfarm op-package`: op packages, the operations that users add to QNN."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import typer

from buildlib.elf import read_elf
from buildlib.paths import absolute_user_path
from buildlib.targets import find_soc
from buildlib.toolchains.base import OpPackageLibrary
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from harness.cli.arguments import Json
from harness.cli.completion import complete_socs
from harness.console import answers, print_json
from harness.errors import BAD, WrongUseError
from plugins.diagnosis.operation import run_operation

app = typer.Typer(help="Op packages: operations of your own for QNN.", no_args_is_help=True)

_Library = Annotated[Path, typer.Argument(help="The package's library for this host, x86_64.")]
_AnyLibrary = Annotated[Path, typer.Argument(help="A library of the package, for any processor.")]
_Provider = Annotated[
    str, typer.Option(metavar="NAME", help="Its function that provides the interface.")
]
_HOST = "x86_64"
_SHOWN = 3
_SPREAD = 4.0


@app.command("check")
def check(file: _AnyLibrary, provider: _Provider, json: Json = False) -> None:
    """Show the processor of an op package, and the operations that it adds to this host's compiler.

    Only a library for x86_64 is loaded. That it adds operations shows that it registers, not that
    its kernels compute.

    Example: qnnfarm op-package check libScale.so --provider ScaleProvider
    """
    info = read_elf(absolute_user_path(file))
    if provider not in info.exports:
        near = [name for name in sorted(info.exports) if name.endswith("Provider")][:_SHOWN]
        hint = f"; it exports {', '.join(near)}" if near else ""
        raise WrongUseError(f"{file} ({info}) has no function {provider!r}{hint}")
    operations = _registered(file, provider)[1] if info.machine == _HOST else None
    if json:
        print_json({"machine": str(info), "operations": operations})
        return
    if operations is None:
        answers().print(f"for {info}; only libraries for {_HOST} are loaded here")
    for operation in operations or ():
        answers().print(operation)


@app.command("run")
def run(
    file: _Library,
    provider: _Provider,
    formula: Annotated[
        str,
        typer.Option(
            metavar="EXPRESSION",
            help="The operation in NumPy: `3 * x + 1`, `np.maximum(x, 0)`; several "
            "outputs with commas between.",
        ),
    ],
    operation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The operation; by default the only one of the package."),
    ] = None,
    input_: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=SHAPE|FILE.npy",
            help="An input: numbers drawn from -4 to 4 of a shape such as `1,1,4,32`, or the real "
            "numbers of a file. Can be repeated, in the order of the node's inputs. By default "
            "`x=1,1,8,64`.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["uint8", "uint16", "float16", "float32"],
        typer.Option(help="Stored type of all tensors; integers are on a grid over their values."),
    ] = "uint16",
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            help="Largest difference, in steps of the output's grid; of floats, in thousandths of "
            "its largest value.",
        ),
    ] = 1.0,
    soc: Annotated[
        str, typer.Option(help="SoC that is emulated.", autocompletion=complete_socs)
    ] = "SM8750",
    json: Json = False,
) -> None:
    """Run one operation of an op package on the emulator, and compare it with a formula.

    The graph of that node is compiled, and loaded and run in a process of its own, as on a device.

    Example: qnnfarm op-package run libX.so --provider XProvider --formula "3 * x"
    """
    package, operations = _registered(file, provider)
    name = _choose(operation, operations)
    inputs = _read_inputs(input_ or ["x=1,1,8,64"])
    result = run_operation(
        package,
        name,
        inputs,
        lambda reals: _compute(formula, reals),
        dtype=dtype,
        soc=find_soc(soc),
    )
    is_good = max(result.steps) <= tolerance
    if json:
        print_json({"operation": name, "steps": list(result.steps), "passed": is_good})
    for number, (steps, output, reference) in enumerate(
        zip(result.steps, result.outputs, result.expected, strict=True)
    ):
        if not json:
            verdict = "ok" if steps <= tolerance else "WRONG"
            answers().print(
                f"{name} output {number} {reference.shape}: {verdict}, up to {steps:.2f} steps "
                f"from {formula}; it is {output.min():.4g} to {output.max():.4g}, and should be "
                f"{reference.min():.4g} to {reference.max():.4g}"
            )
    if not is_good:
        raise typer.Exit(BAD)


def _registered(file: Path, provider: str) -> tuple[OpPackageLibrary, tuple[str, ...]]:
    """Return a package, and the operations that it adds to the backend."""
    package = OpPackageLibrary(absolute_user_path(file), provider)
    machine = read_elf(package.library).machine
    if machine != _HOST:
        raise WrongUseError(f"{file} is for {machine}, and this host loads libraries for {_HOST}")
    operations = OrtQnnToolchain().op_package(package)
    if not operations:
        raise WrongUseError(
            f"{file} registers, but adds no operation: its information lists none under a name "
            "that QNN does not have already"
        )
    return package, operations


def _choose(name: str | None, operations: Sequence[str]) -> str:
    """Return the operation of that name, with or without its package."""
    fitting = [one for one in operations if name in {None, one, one.rpartition("::")[2]}]
    if len(fitting) != 1:
        raise WrongUseError(f"--operation: name one of {', '.join(operations)}")
    return fitting[0]


def _read_inputs(texts: Sequence[str]) -> dict[str, npt.NDArray[np.float64]]:
    random = np.random.default_rng(0)
    inputs = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            if value.endswith(".npy"):
                array = np.load(value, allow_pickle=False).astype(np.float64)
            else:
                shape = tuple(int(size) for size in value.split(","))
                array = random.uniform(-_SPREAD, _SPREAD, shape)
        except (OSError, ValueError) as error:
            raise WrongUseError(f"--input {text}: {error}") from error
        if not name.isidentifier() or name in inputs or not array.size:
            raise WrongUseError(f"--input takes NAME=SHAPE or NAME=FILE.npy, not {text!r}")
        if not np.isfinite(array).all():
            raise WrongUseError(f"--input {text}: not all numbers are finite")
        inputs[name] = array
    return inputs


def _compute(
    formula: str, inputs: Mapping[str, npt.NDArray[np.float64]]
) -> list[npt.NDArray[np.float64]]:
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused below
            value = eval(formula, {"np": np}, dict(inputs))  # noqa: S307 - the user's own code
        outputs = [
            np.asarray(one, np.float64) for one in (value if isinstance(value, tuple) else [value])
        ]
    except Exception as error:
        raise WrongUseError(f"--formula {formula!r}: {error}") from error
    if not all(one.size and np.isfinite(one).all() for one in outputs):
        raise WrongUseError(f"--formula {formula!r}: not all numbers are finite")
    return outputs
