"""`qnnfarm bundle`: the files that a runtime needs on a device, before one is pushed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from buildlib.sizes import size_text
from harness.cli.arguments import DEFAULT_RUNTIME, ContainerDir, Json, Push, Runtime
from harness.cli.completion import complete_devices
from harness.cli.tensors import read_binaries
from harness.console import answers, print_json, print_rows
from harness.deploy.deployment import DeployFile
from harness.devices.spec import DeviceSpec
from harness.errors import BAD, WrongUseError
from harness.pool.pool import host_devices
from harness.runtimes.base import Model, RuntimeOptions
from harness.runtimes.bundles.bundle import ENVIRONMENT, Bundle, BundleRecord, pushed_files
from harness.runtimes.bundles.checks import find_faults, libraries_on
from harness.runtimes.bundles.sources import ANDROID, EMULATOR
from harness.runtimes.container_model import ContainerModel, target_of
from harness.runtimes.deployed import DeployedRuntime
from harness.runtimes.registry import open_model
from harness.words import pluralize

app = typer.Typer(help="The files that a runtime needs on a device.", no_args_is_help=True)


@app.command("show")
def show(
    container_dir: ContainerDir,
    device: Annotated[
        str | None,
        typer.Option(
            help="The device: SERIAL, SERIAL@HOST, linux:HOST or virtual:NAME.",
            autocompletion=complete_devices,
        ),
    ] = None,
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

    Nothing is pushed. Files that a device would refuse, or that would fail there, are named after
    them; then the exit code is 1.

    Example: qnnfarm bundle show CONTAINER_DIR --device SERIAL
    """
    if device is not None and abi is not None:
        raise WrongUseError("--device and --abi: give one of them, not both")
    model, own_files = open_model(container_dir, runtime), pushed_files(push or ())
    if device is None:
        bundle, faults = _for_target(model, abi, own_files)
    else:
        bundle, faults = bundle_for_device(model, device, own_files)
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


def _for_target(
    model: Model, abi: str | None, pushed: Mapping[str, DeployFile]
) -> tuple[Bundle, tuple[str, ...]]:
    """Return the bundle of a container for devices of its target, and its faults."""
    if not isinstance(model, ContainerModel):
        raise WrongUseError(f"the runtime {model.runtime.name} needs a device: give --device")
    container = model.container
    target = target_of(container)
    if abi is not None and (abi == EMULATOR) != target.emulator:
        raise WrongUseError(f"--abi {abi}: the container is for {target}")
    bundle = model.bundle(abi or (EMULATOR if target.emulator else ANDROID)).add(pushed)
    return bundle, find_faults(bundle, container=container, binaries=read_binaries(container))


def bundle_for_device(
    model: Model, name: str, pushed: Mapping[str, DeployFile]
) -> tuple[Bundle, tuple[str, ...]]:
    """Return the bundle of a model for a device, and its faults."""
    with host_devices() as devices:
        device = devices.open(devices.resolve(DeviceSpec.parse(name)))
        properties = device.properties()
        model.check_fit(properties)
        runtime = model.start(device, properties, RuntimeOptions(push=pushed))
        if not isinstance(runtime, DeployedRuntime):
            raise WrongUseError(f"the runtime {runtime.name} does not say what it pushes")
        container = model.container if isinstance(model, ContainerModel) else None
        present = libraries_on(device)
        binaries = {} if container is None else read_binaries(container)
        faults = find_faults(runtime.bundle, properties, container, present, binaries)
    return runtime.bundle, faults


def _print(bundle: Bundle, records: Sequence[BundleRecord], faults: Sequence[str]) -> None:
    rows = [
        [record.name, size_text(record.size), record.sha256[:16], record.origin]
        for record in records
    ]
    print_rows(("file", "size", "SHA-256", "from"), rows)
    kind = f"{bundle.soc.name} ({bundle.abi})" if bundle.soc else bundle.abi
    size = size_text(sum({record.sha256: record.size for record in records}.values()))
    answers().print(f"{pluralize(len(rows), 'file')}, {size}, for {kind}")
    answers().print(" ".join(f"{name}={value}" for name, value in ENVIRONMENT.items()))
    for fault in faults:
        answers().print(fault)
