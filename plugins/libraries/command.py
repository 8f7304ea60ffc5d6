"""`qnnfarm libraries`: lists and fetches the Genie libraries for each kind of device."""

from collections.abc import Iterator
from typing import Annotated

import typer

from buildlib.errors import ToolchainMissingError
from buildlib.targets import find_soc
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from harness.cli.arguments import Json
from harness.cli.completion import complete_socs
from harness.console import answers, print_json, print_rows
from harness.errors import GenieMissingError, WrongUseError
from harness.runtimes.bundles.sources import FOLDERS_VARIABLE, fetched_wheel, find_genie
from plugins.libraries.fetch import fetch_wheel
from plugins.libraries.maven import CENTRAL, Artifact, fetch_artifact

app = typer.Typer(
    help="Genie and QNN for devices: what this machine has, and fetching the rest.",
    no_args_is_help=True,
)

_KINDS = (
    ("virtual devices, Linux on x86_64", "x86_64"),
    ("Linux boards", "aarch64"),
    ("Android phones", "arm64-v8a"),
)


@app.command("ls")
def ls(
    soc: Annotated[
        str, typer.Option(help="For devices with this SoC.", autocompletion=complete_socs)
    ] = "SM8750",
    json: Json = False,
) -> None:
    """List where Genie comes from for each kind of device, or how to get it.

    Example: qnnfarm libraries ls
    """
    rows = list(_examine(soc))
    if json:
        print_json(rows)
        return
    print_rows(
        ("devices", "ABI", "Genie"),
        [[row["devices"], row["abi"], row.get("origin") or row["missing"]] for row in rows],
    )


def _examine(soc_name: str) -> Iterator[dict[str, str]]:
    soc = find_soc(soc_name)
    for devices, abi in _KINDS:
        try:
            origin = find_genie(abi, soc).files["libGenie.so"].origin
            yield {"devices": devices, "abi": abi, "origin": origin}
        except GenieMissingError as error:
            yield {"devices": devices, "abi": abi, "missing": error.reason}
        except ToolchainMissingError as error:
            yield {"devices": devices, "abi": abi, "missing": str(error)}


@app.command("fetch")
def fetch(
    maven: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP:NAME:VERSION",
            help="A Maven artifact whose libraries to fetch instead: an .aar or a .jar.",
        ),
    ] = None,
    repository: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Its repository; by default Maven Central."),
    ] = None,
    json: Json = False,
) -> None:
    """Download the libraries for Linux boards from PyPI with pip (87 MB), or a Maven artifact's.

    They are the vendor's, and kept in the cache folder with their license.

    Example: qnnfarm libraries fetch
    """
    if maven is not None:
        _fetch_artifact(maven, repository, json=json)
        return
    if repository is not None:
        raise WrongUseError("--repository goes with --maven")

    version = find_libraries().version
    folder = fetched_wheel(version)
    new = fetch_wheel(version, folder)
    if json:
        print_json({"folder": str(folder), "version": version, "fetched": new})
        return
    state = "fetched into" if new else "there already:"
    answers().print(f"onnxruntime-qnn {version} for aarch64 {state} {folder}")


def _fetch_artifact(maven: str, repository: str | None, *, json: bool) -> None:
    artifact = Artifact.parse(maven)
    new = fetch_artifact(artifact, repository or CENTRAL)
    folder = artifact.folder
    libraries = {
        path.name: sorted(library.name for library in path.glob("*.so"))
        for path in sorted(folder.iterdir())
        if path.is_dir()
    }
    if json:
        print_json({"folder": str(folder), "fetched": new, "libraries": libraries})
        return
    state = "fetched into" if new else "there already:"
    answers().print(f"{artifact} {state} {folder}")
    for abi, names in libraries.items():
        answers().print(f"{abi}: {', '.join(names)}")
    answers().print(f"to use them: export {FOLDERS_VARIABLE}={folder}")
