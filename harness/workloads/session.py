"""A session: one model on one leased device, with a run folder of its own.

A session is the unit of sampling. It begins with a device prepared afresh, and every query in it
is a process of its own.

Sessions that share a host slow each other down: they share its processors on the emulator, and the
USB hubs on phones. Each holds a locked file in `sessions` beside the pool's ledger. A session that
begins counts the locked files and writes the count into each of them where it is higher, so that
every session ends with the highest count that it was part of. A dead process holds no lock.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

from buildlib.closeable import Closeable
from buildlib.container.container import GenAIContainer
from harness.deploy.deployment import Deployment
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.paths import state_dir
from harness.results.records import (
    GENIE,
    RUNTIME,
    Condition,
    ContainerInfo,
    DeviceInfo,
    Provenance,
)
from harness.runtimes.base import (
    GenerationResult,
    Model,
    Need,
    Runtime,
    RuntimeOptions,
    require,
)
from harness.runtimes.container_model import container_of
from harness.words import soc_label, stand_in

_FOLDER = "sessions"
_GATE = ".lock"


class SessionCount:
    """Membership of one session in the count of its host; None once it cannot be counted.

    Args:
        folder: of the locked files; by default beside the pool's ledger.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = state_dir() / _FOLDER if folder is None else folder
        self._file: int | None = None
        self._path: Path | None = None

    @property
    def highest(self) -> int | None:
        """Most sessions at once since this one joined, itself included."""
        return None if self._file is None else _read(self._file)

    def join(self) -> None:
        """Begin to count; a folder that cannot be used means that nothing is known."""
        if self._file is not None:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _gate(self._folder):
                path = self._folder / secrets.token_hex(8)
                self._file = _open(path, os.O_CREAT | os.O_EXCL)
                self._path = path
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                others = _live(self._folder, path)
                for file in (self._file, *others):
                    _write(file, max(_read(file) or 0, len(others) + 1))
                for file in others:
                    os.close(file)

    def leave(self) -> None:
        """End the membership."""
        if self._file is not None and self._path is not None:
            os.close(self._file)
            self._file = None
            with contextlib.suppress(OSError):
                self._path.unlink()


def _live(folder: Path, own: Path) -> list[int]:
    """Open the files of the other sessions; those of dead processes are removed."""
    files = []
    for path in folder.glob("[0-9a-f]*"):
        if path == own:
            continue
        try:
            file = _open(path)
        except OSError:  # it ended meanwhile
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            files.append(file)
        else:
            path.unlink(missing_ok=True)
            os.close(file)
    return files


@contextmanager
def _gate(folder: Path) -> Iterator[None]:
    gate = _open(folder / _GATE, os.O_CREAT)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield
    finally:
        os.close(gate)


def _open(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)


def _read(file: int) -> int | None:
    text = os.pread(file, 16, 0).strip()
    return int(text) if text.isdigit() else None


def _write(file: int, count: int) -> None:
    os.pwrite(file, f"{count:<8}".encode(), 0)


_Capability = TypeVar("_Capability")
OnRows = Callable[[int, int], None]
"""Called with the number of a task's rows that are done, and of all."""
OnRepetition = Callable[[int, int, GenerationResult], None]
"""Called with the repetition's number from 0, the highest possible count, and its result."""
Prepare = Callable[[Device, Deployment], AbstractContextManager[Sequence[Condition]]]
"""Brings a device into its measuring conditions for a block, and records how that went."""


class DeviceSource(Protocol):
    """Leases the device of a session for a block."""

    def __call__(self, number: int, soc: str, model: str = "", /) -> AbstractContextManager[Device]:
        """Lease the device of a session.

        Args:
            number: of the session, from 0.
            model: SHA-256 of the model, so that the pool can tell a bad one from a bad device.
        """
        ...


@dataclass(frozen=True, slots=True)
class SessionOptions(RuntimeOptions):
    """Options of a session, and the callbacks of its progress; `timeout_s` is a command's, too.

    Attributes:
        prepare: brings the device into its measuring conditions; None measures it as it is.
        folder: base of a workload's relative paths.
        on_repetition: called after each repetition of a benchmark.
        on_rows: called after some rows of a task.
    """

    prepare: Prepare | None = None
    folder: Path = Path()
    on_repetition: OnRepetition | None = None
    on_rows: OnRows | None = None


class Session(Closeable):
    """One model on one leased device; a context manager that cleans up at the end.

    Nothing is asked of the device before it is needed.

    Attributes:
        count: of the sessions at once on this host, from its first use of the runtime on.

    Args:
        model: None for a plain command.
        properties: of the device, if they are known.
        runtime: of the model; by default, it starts one.
    """

    def __init__(
        self,
        device: Device,
        model: Model | None = None,
        options: SessionOptions | None = None,
        *,
        properties: DeviceProperties | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.device = device
        self.options = options or SessionOptions()
        self._model = model
        self._properties = properties
        self._runtime = runtime
        self.count = SessionCount()

    def close(self) -> None:
        """Remove the run folder; the content store on the device stays."""
        self.count.leave()
        if self._runtime is not None:
            self._runtime.clean()

    @property
    def model(self) -> Model:
        """The model."""
        if self._model is None:
            raise ValueError("this session has no model")
        return self._model

    @property
    def container(self) -> GenAIContainer:
        """The container that the model is."""
        return container_of(self.model)

    @property
    def properties(self) -> DeviceProperties:
        """Properties of the device, read once."""
        if self._properties is None:
            self._properties = self.device.properties()
        return self._properties

    @property
    def runtime(self) -> Runtime:
        """Runtime of the model on the device.

        Raises:
            RuntimeChoiceError: the model is not for this device.
            GenieMissingError: this machine has no Genie for it.
        """
        if self._runtime is None:
            self.count.join()
            self._runtime = self.model.start(self.device, self.properties, self.options)
        return self._runtime

    def require(self, capability: type[_Capability]) -> _Capability:
        """Return the runtime as one that has a capability: `session.require(Scores)`."""
        runtime = self.runtime
        if not isinstance(runtime, capability):
            require(type(runtime), [cast("Need", capability)])
        return cast("_Capability", runtime)

    def resolve(self, path: str) -> Path:
        """Resolve a path of a workload."""
        return self.options.folder / Path(path).expanduser()

    @property
    def device_fields(self) -> Mapping[str, object]:
        """The device in JSON answers."""
        device = self.properties
        virtual = stand_in(self.model.runtime.name)
        return {
            "device": device.serial,
            "soc": device.soc,
            "emulator": device.emulator,
            "processor": virtual if device.emulator else "hardware",
        }

    @property
    def device_label(self) -> str:
        """The device in answers for people: `127.0.0.1:5555 (SM8750 emulator)`."""
        device = self.properties
        kind = soc_label(device.soc, emulator=device.emulator, runtime=self.model.runtime.name)
        return f"{device.serial} ({kind})" if kind else device.serial

    def records(self) -> tuple[ContainerInfo, DeviceInfo, Provenance]:
        """Describe model, device and host for the results store; asks git."""
        from harness.results import provenance

        versions = dict(self.model.toolchain)
        name = versions.pop("toolchain", "unknown")
        return self.container_info, self.device_info, provenance.capture(name, versions)

    @property
    def container_info(self) -> ContainerInfo:
        """The model in the results store."""
        return self.model.info

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of runs in the store: the runtime, if it is not Genie."""
        name = self.model.runtime.name
        return {} if name == GENIE else {RUNTIME: name}

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
