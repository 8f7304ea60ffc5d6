"""One container on one device, with what the results store keeps of both."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from buildlib.container.container import GenAIContainer
from harness.deploy.pipeline import Shown
from harness.devices.base import Device, DeviceProperties
from harness.results import provenance
from harness.results.records import ContainerInfo, DeviceInfo, Provenance
from harness.runtimes.genie import GenieRuntime
from harness.words import soc_in_words

DeviceSource = Callable[[int], AbstractContextManager[Device]]
"""Gives the device of a session, by the session's number, for as long as the block lasts."""


@dataclass(frozen=True, slots=True)
class Target:
    """A container that is ready to run on a device."""

    container: GenAIContainer
    device: Device
    properties: DeviceProperties
    runtime: GenieRuntime

    @property
    def where(self) -> Mapping[str, object]:
        """The device in an answer for programs."""
        device = self.properties
        return {"device": device.serial, "soc": device.soc, "emulator": device.emulator}

    @property
    def where_in_words(self) -> str:
        """The device in an answer for people: `127.0.0.1:5555 (SM8750 emulator)`."""
        device = self.properties
        kind = soc_in_words(device.soc, emulator=device.emulator)
        return f"{device.serial} ({kind})" if kind else device.serial

    @property
    def tokenizer(self) -> Path:
        """The container's `tokenizer.json`."""
        return self.container.files["tokenizer.json"]

    def records(self) -> tuple[ContainerInfo, DeviceInfo, Provenance]:
        """What the results store keeps of both, and of where the numbers come from: it asks git."""
        versions = dict(self.container.metadata.toolchain)
        name = versions.pop("toolchain", "unknown")
        return self.container_info, self.device_info, provenance.capture(name, versions)

    @property
    def container_info(self) -> ContainerInfo:
        """What the results store keeps of the container."""
        metadata = self.container.metadata
        return ContainerInfo(
            model=metadata.model.name,
            sha256=metadata.container_sha256,
            target=metadata.target.name,
            ars=metadata.graphs.auto_regression_numbers,
            cl=metadata.graphs.context_length,
            n_splits=metadata.graphs.splits,
            precision=self.container.precision,
        )

    @property
    def device_info(self) -> DeviceInfo:
        """What the results store keeps of the device."""
        device = self.properties
        return DeviceInfo(
            serial=device.serial,
            soc=device.soc,
            emulator=device.emulator,
            model=device.model,
            manufacturer=device.manufacturer,
            dsp_arch=device.hexagon,
            abi=device.abi,
            android_version=device.android_version,
        )


@contextmanager
def target_on(
    device: Device,
    container: GenAIContainer,
    *,
    telemetry_hz: float | None = None,
    shown: Shown | None = None,
) -> Iterator[Target]:
    """A run folder of its own for this block; nothing of the run stays on the device.

    Args:
        telemetry_hz: samples a second of each query; None: no telemetry.
        shown: shows the deployment; None: it goes on in silence.

    Raises:
        HarnessError: the device cannot be asked, or cannot run this container.
    """
    properties = device.properties()
    runtime = GenieRuntime(device, properties, container, telemetry_hz=telemetry_hz, shown=shown)
    try:
        yield Target(container, device, properties, runtime)
    finally:
        runtime.clean()
