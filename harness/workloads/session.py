"""A session: one container on one leased device, with a run folder of its own.

A session is the unit of sampling. It begins with a device prepared afresh, and every query in it
is a process of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from buildlib.closeable import Closeable
from buildlib.container.container import GenAIContainer
from harness.deploy.deploy import DEPLOY_TIMEOUT_S
from harness.deploy.deployment import Deployment
from harness.deploy.pipeline import Shown
from harness.devices.base import Device, DeviceProperties
from harness.results import provenance
from harness.results.records import Condition, ContainerInfo, DeviceInfo, Provenance
from harness.runtimes.base import GenerationResult, LogLevel, Runtime
from harness.runtimes.genie.runtime import GenieRuntime
from harness.telemetry.conditions import Conditions, prepared
from harness.telemetry.gate import OnWait
from harness.words import soc_label
from harness.workloads.concurrency import SessionCount

OnRepetition = Callable[[int, int, GenerationResult], None]
"""Called with the repetition's number from 0, the highest possible count, and its result."""
Prepare = Callable[[Device, Deployment], AbstractContextManager[Sequence[Condition]]]
"""Brings a device into its measuring conditions for a block, and records how that went."""


@contextmanager
def meet_conditions(
    conditions: Conditions,
    device: Device,
    deployment: Deployment,
    *,
    on_wait: OnWait | None = None,
) -> Iterator[Sequence[Condition]]:
    """Prepare a device by our scripts on it; with the first argument bound, a `Prepare`.

    Raises:
        ConditionsNotMetError: see `prepared`.
    """
    with prepared(device, deployment.scripts_dir, conditions, on_wait=on_wait) as records:
        yield tuple(asdict(record) for record in records)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of a session, and the callbacks of its progress.

    Attributes:
        timeout_s: for deploying the container, and for a plain command.
        runner_timeout_s: for one process of the runner on the device.
        telemetry_hz: samples a second while the device generates; None for no telemetry.
        prepare: brings the device into its measuring conditions; None measures it as it is.
        folder: what a workload's relative paths are relative to.
        shown: shows the deployment; None deploys silently.
        on_repetition: called after each repetition of a benchmark.
        log_level: of the runtime's own log; None keeps its errors.
        trace: whether runs are kept with a trace of what the runtime did when.
    """

    timeout_s: float = DEPLOY_TIMEOUT_S
    runner_timeout_s: float = 300.0
    telemetry_hz: float | None = None
    prepare: Prepare | None = None
    folder: Path = Path()
    shown: Shown | None = None
    on_repetition: OnRepetition | None = None
    log_level: LogLevel | None = None
    trace: bool = False


class Session(Closeable):
    """One container on one leased device; a context manager that cleans up at the end.

    Nothing is asked of the device before it is needed.

    Attributes:
        count: of the sessions at once on this host, from its first use of the runtime on.

    Args:
        container: None for a plain command.
        properties: of the device, if they are known.
        runtime: runs the container; Genie by default.
    """

    def __init__(
        self,
        device: Device,
        container: GenAIContainer | None = None,
        options: SessionOptions | None = None,
        *,
        properties: DeviceProperties | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.device = device
        self.options = options or SessionOptions()
        self._container = container
        self._properties = properties
        self._runtime = runtime
        self.count = SessionCount()

    def close(self) -> None:
        """Remove the run folder; the content store on the device stays."""
        self.count.leave()
        if self._runtime is not None:
            self._runtime.clean()

    @property
    def container(self) -> GenAIContainer:
        """The container."""
        if self._container is None:
            raise ValueError("this session has no container")
        return self._container

    @property
    def properties(self) -> DeviceProperties:
        """Properties of the device, read once."""
        if self._properties is None:
            self._properties = self.device.properties()
        return self._properties

    @property
    def runtime(self) -> Runtime:
        """Runtime of the container on the device.

        Raises:
            RuntimeChoiceError: the container is not for this device.
            GenieMissingError: this machine has no Genie for it.
        """
        if self._runtime is None:
            self.count.join()
            self._runtime = GenieRuntime(
                self.device,
                self.properties,
                self.container,
                timeout_s=self.options.runner_timeout_s,
                deploy_timeout_s=self.options.timeout_s,
                telemetry_hz=self.options.telemetry_hz,
                shown=self.options.shown,
                log_level=self.options.log_level,
                trace=self.options.trace,
            )
        return self._runtime

    @property
    def tokenizer(self) -> Path:
        """The container's `tokenizer.json`."""
        return self.container.files["tokenizer.json"]

    def resolve(self, path: str) -> Path:
        """Resolve a path of a workload."""
        return self.options.folder / Path(path).expanduser()

    @property
    def device_fields(self) -> Mapping[str, object]:
        """The device in JSON answers."""
        device = self.properties
        return {"device": device.serial, "soc": device.soc, "emulator": device.emulator}

    @property
    def device_label(self) -> str:
        """The device in answers for people: `127.0.0.1:5555 (SM8750 emulator)`."""
        device = self.properties
        kind = soc_label(device.soc, emulator=device.emulator)
        return f"{device.serial} ({kind})" if kind else device.serial

    def records(self) -> tuple[ContainerInfo, DeviceInfo, Provenance]:
        """Describe container, device and host for the results store; asks git."""
        versions = dict(self.container.metadata.toolchain)
        name = versions.pop("toolchain", "unknown")
        return self.container_info, self.device_info, provenance.capture(name, versions)

    @property
    def container_info(self) -> ContainerInfo:
        """The container in the results store."""
        metadata = self.container.metadata
        return ContainerInfo(
            model=metadata.model.name,
            sha256=metadata.container_sha256,
            target=metadata.target.name,
            ars=metadata.graphs.auto_regression_numbers,
            cl=metadata.graphs.context_length,
            n_splits=metadata.graphs.splits,
            precision=self.container.precision,
            size_bytes=metadata.size_bytes,
            parameters=metadata.model.parameters,
        )

    @property
    def device_info(self) -> DeviceInfo:
        """The device in the results store."""
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
            ram_bytes=device.ram_bytes,
            os_build=device.build,
            build_fingerprint=device.fingerprint,
            clocks=device.clocks,
        )
