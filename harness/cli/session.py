"""What commands that run a container have in common: a container on a device."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from buildlib.container.container import GenAIContainer
    from harness.devices.base import Device, DeviceProperties
    from harness.runtimes.genie import GenieRuntime
    from harness.store.records import ContainerInfo, DeviceInfo, Provenance


@dataclass(frozen=True)
class Session:
    """One container on one device."""

    container: "GenAIContainer"
    device: "Device"
    properties: "DeviceProperties"
    runtime: "GenieRuntime"

    @property
    def where(self) -> Mapping[str, object]:
        """The device in an answer for programs."""
        device = self.properties
        return {"device": device.serial, "soc": device.soc, "emulator": device.emulator}

    @property
    def where_in_words(self) -> str:
        """The device in an answer for people: `127.0.0.1:5555 (SM8750 emulator)`."""
        device = self.properties
        return f"{device.serial} ({device.soc}{' emulator' if device.emulator else ''})"

    def records(self) -> tuple["ContainerInfo", "DeviceInfo", "Provenance"]:
        """What the results store keeps of both, and of where the numbers come from."""
        from harness.store import provenance
        from harness.store.records import ContainerInfo, DeviceInfo

        metadata, device = self.container.metadata, self.properties
        container = ContainerInfo(
            model=metadata.model.name,
            sha256=metadata.container_sha256,
            target=metadata.target.name,
            ars=metadata.graphs.auto_regression_numbers,
            cl=metadata.graphs.context_length,
            n_splits=metadata.graphs.splits,
        )
        info = DeviceInfo(
            serial=device.serial,
            soc=device.soc,
            emulator=device.emulator,
            model=device.model,
            manufacturer=device.manufacturer,
            dsp_arch=device.hexagon,
            abi=device.abi,
            android_version=device.android_version,
        )
        versions = dict(metadata.toolchain)
        name = versions.pop("toolchain", "unknown")
        return container, info, provenance.capture(name, versions)


@contextmanager
def open_session(container_dir: Path, serial: str | None) -> Iterator[Session]:
    """Load the container, reach the device, and leave nothing of the run on the device at the end.

    Raises:
        BuildError: the container is not whole.
        HarnessError: no device, or one that cannot run this container.
    """
    from buildlib.container.container import GenAIContainer
    from harness.adb.server import ensure_server
    from harness.devices.discovery import open_device
    from harness.runtimes.genie import GenieRuntime

    container = GenAIContainer.load(container_dir)
    device = open_device(serial, server=ensure_server())
    properties = device.properties()
    runtime = GenieRuntime(device, properties, container)
    try:
        yield Session(container, device, properties, runtime)
    finally:
        runtime.clean()
