"""`qnnfarm bundle`: what a runtime needs on a device, before any of it is pushed."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.arguments import DEFAULT_RUNTIME, ContainerDir, DeviceName, Json, Push, Runtime
from harness.console import Row, answers, print_json, print_remark, print_rows
from harness.errors import WrongUseError
from harness.exit_codes import BAD
from harness.words import pluralize

if TYPE_CHECKING:
    from buildlib.container.container import GenAIContainer
    from buildlib.toolchains.base import BinaryInfo
    from harness.runtimes.base import Model
    from harness.runtimes.bundles.bundle import Bundle, BundleRecord

app = typer.Typer(help="What a runtime needs on a device.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make `show` a command of a group, though it is the only one."""


@app.command("show")
def show(
    container_dir: ContainerDir,
    device: DeviceName = None,
    abi: Annotated[
        str | None,
        typer.Option(
            help="Without a device: the ABI of devices, x86_64, aarch64 or arm64-v8a; by default "
            "by the container's target."
        ),
    ] = None,
    push: Push = None,
    runtime: Runtime = DEFAULT_RUNTIME,
    json: Json = False,
) -> None:
    """List the files that a run would push, each with its origin and digest.

    Nothing is pushed. What a device would refuse, or what would fail there, is listed after them;
    then the exit code is 1.
    """
    from harness.devices.devices import Devices
    from harness.devices.spec import DeviceSpec
    from harness.runtimes.base import RuntimeOptions
    from harness.runtimes.bundles.bundle import ENVIRONMENT, pushed_files
    from harness.runtimes.bundles.checks import find_faults, libraries_on
    from harness.runtimes.container_model import ContainerModel
    from harness.runtimes.deployed import DeployedRuntime
    from harness.runtimes.registry import open_model

    if device is not None and abi is not None:
        raise WrongUseError("--device and --abi: give one of them, not both")
    model = open_model(container_dir, runtime)
    pushed = pushed_files(push or ())
    container = model.container if isinstance(model, ContainerModel) else None
    binaries = {} if container is None else _inspect(container)
    if device is None:
        bundle = _bundle_for(model, abi).add(pushed)
        faults = find_faults(bundle, container=container, binaries=binaries)
    else:
        with Devices() as devices:
            opened = devices.open(devices.resolve(DeviceSpec.parse(device)))
            properties = opened.properties()
            model.check_fit(properties)
            started = model.start(opened, properties, RuntimeOptions(push=pushed))
            if not isinstance(started, DeployedRuntime):
                raise WrongUseError(f"the runtime {runtime} does not say what it pushes")
            bundle = started.bundle
            present = libraries_on(opened)
            faults = find_faults(bundle, properties, container, present, binaries)
    records = bundle.records()
    if json:
        print_json(
            {
                "abi": bundle.abi,
                "soc": bundle.soc and bundle.soc.name,
                "files": [asdict(record) for record in records],
                "environment": dict(ENVIRONMENT),
                "faults": list(faults),
            }
        )
    else:
        _print(bundle, records, faults)
    if faults:
        raise typer.Exit(BAD)


def _bundle_for(model: "Model", abi: str | None) -> "Bundle":
    """Return what a runtime needs with a container on devices of an ABI."""
    from harness.runtimes.bundles.sources import ANDROID, EMULATOR
    from harness.runtimes.container_model import ContainerModel
    from harness.runtimes.files import target_of

    if not isinstance(model, ContainerModel):
        raise WrongUseError(f"the runtime {model.runtime.name} needs a device: give --device")
    target = target_of(model.container)
    if abi is not None and (abi == EMULATOR) != target.emulator:
        raise WrongUseError(f"--abi {abi}: the container is for {target}")
    return model.bundle(abi or (EMULATOR if target.emulator else ANDROID))


def _inspect(container: "GenAIContainer") -> "dict[str, BinaryInfo]":
    from buildlib.errors import ToolchainMissingError
    from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

    kinds = {name: record.kind for name, record in container.metadata.files.items()}
    names = [name for name, kind in kinds.items() if kind == "binary"]
    try:
        return {name: OrtQnnToolchain().inspect(container.files[name]) for name in names}
    except ToolchainMissingError as error:
        print_remark(f"the binaries are not read: {error}")
        return {}


def _print(bundle: "Bundle", records: "Sequence[BundleRecord]", faults: Sequence[str]) -> None:
    from buildlib.cache.sizes import size_text
    from harness.runtimes.bundles.bundle import ENVIRONMENT

    rows = [
        Row([record.name, size_text(record.size), record.sha256[:16], record.origin])
        for record in records
    ]
    print_rows(("file", "size", "SHA-256", "from"), rows)
    kind = f"{bundle.soc.name} ({bundle.abi})" if bundle.soc else bundle.abi
    size = size_text(sum({record.sha256: record.size for record in records}.values()))
    answers().print(f"{pluralize(len(rows), 'file')}, {size}, for {kind}")
    answers().print(" ".join(f"{name}={value}" for name, value in ENVIRONMENT.items()))
    for fault in faults:
        answers().print(fault)
