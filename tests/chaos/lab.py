"""A worker's own surroundings: an adb server, farms of virtual devices, pools that name them."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.devices.adb.server import ensure_server
from harness.devices.adb.transport import AdbTransport
from harness.devices.device import Device
from harness.pool.database import default_path
from harness.pool.pool import Pool
from plugins.virtual_android.control import DeviceControl
from plugins.virtual_android.host import hosted_control, hosted_devices
from suites.models import tiny_llama
from tests.builders import builder_for
from tests.chaos.drawing import DEVICES
from tests.private_adb import free_port, private_environment

SOC = "SM8750"
_TTL_S = 4.0
_HOLDER_S = 0.4
_SMALL_BYTES = 48 << 20


@dataclass(frozen=True, slots=True)
class Farm:
    """Devices in one process, and the pool of them.

    Attributes:
        folder: of the devices' own folders.
    """

    folder: Path
    serials: tuple[str, ...]
    pool_file: Path

    def commands(self, number: int) -> DeviceControl:
        """The switches of a device."""
        return hosted_control(self.folder, number)

    def member(self, number: int) -> str:
        """By which the pool knows it."""
        return f"d{number}"

    def work_root(self, number: int) -> Path:
        """The device's work root, as this host sees it."""
        folder: Path = self.commands(number).folder
        return folder / "root" / "data" / "local" / "tmp" / "qnnfarm"

    def mark(self, number: int) -> bytes:
        """What is in the environment of every process of the device, and of no other."""
        return f"QNNFARM_DEVICE={self.commands(number).folder}\0".encode()

    def take_back(self, number: int) -> bool:
        """Take a device from its next holder, as a person does; whether one came soon."""
        deadline = time.monotonic() + _HOLDER_S
        with Pool.open(self.pool_file, probe=False) as pool:
            while not (taken := pool.admin.release(self.member(number))):
                if time.monotonic() > deadline:
                    break
                time.sleep(_HOLDER_S / 20)
        return taken

    def device(self, number: int) -> Device:
        """The device without a lease; a new adb server may not know it yet."""
        server = ensure_server()
        server.connect(self.serials[number])
        return Device(AdbTransport(server, self.serials[number]))


@dataclass
class Lab:
    """What the cases of one worker share.

    Attributes:
        small: devices with little room, for pushes, commands and leases.
        texts: what a right container answers.
        emptied: contents on devices, with their mtime, that lost power cost their bytes.
        build_cache: where the reference model's container is found, or built.
    """

    folder: Path
    port: int
    small: Farm
    build_cache: Path
    stack: contextlib.ExitStack
    _roomy: Farm | None = None
    _container: Path | None = None
    texts: dict[str, str] = field(default_factory=dict)
    emptied: set[tuple[Path, int]] = field(default_factory=set)

    @property
    def ledger(self) -> Path:
        """The file of all leases."""
        return default_path()

    @property
    def roomy(self) -> Farm:
        """Devices that hold a container with its libraries; started when first asked for."""
        if self._roomy is None:
            self._roomy = self.stack.enter_context(_farm(self.folder / "roomy", None))
        return self._roomy

    @property
    def container(self) -> Path:
        """The reference model's container for the emulator."""
        if self._container is None:
            builder = builder_for(tiny_llama.folder(), self.build_cache, splits=2)
            self._container = builder.plan().outputs().container
        return self._container

    def kill_adb(self) -> None:
        """`kill -9` of this lab's adb server, if it runs."""
        end_adb(self.port)


def patient(seconds: float) -> float:
    """So long may something take: `$QNNFARM_CHAOS_PATIENCE` times what it takes on a fast machine.

    Where nothing hangs, nobody waits for it.
    """
    return seconds * float(os.environ.get("QNNFARM_CHAOS_PATIENCE", "1"))


def end_adb(port: int) -> None:
    """Kill the adb server that was started for a port."""
    wanted = f"tcp:localhost:{port}".encode()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().split(b"\0")
            if wanted in words and b"nodaemon" in words:
                os.kill(int(file.parent.name), signal.SIGKILL)


@contextlib.contextmanager
def opened(folder: Path, build_cache: Path) -> Iterator[Lab]:
    """A lab in `folder`, whose environment is this process's until the end."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    (folder / "adb-port").write_text(str(port))
    with contextlib.ExitStack() as stack:
        stack.enter_context(private_environment(folder, port))
        ensure_server()
        stack.callback(end_adb, port)
        small = stack.enter_context(_farm(folder / "small", _SMALL_BYTES))
        yield Lab(folder, port, small, build_cache, stack)


@contextlib.contextmanager
def _farm(folder: Path, storage_bytes: int | None) -> Iterator[Farm]:
    with hosted_devices(
        DEVICES, SOC, folder, processes=1, storage_bytes=storage_bytes, unconfined=True
    ) as serials:
        server = ensure_server()
        for serial in serials:
            server.connect(serial)
        pool_file = folder / "pool.yaml"
        pool_file.write_text(json.dumps(_pool(folder, serials)))  # JSON is YAML
        yield Farm(folder, tuple(serials), pool_file)


def _pool(folder: Path, serials: list[str]) -> dict[str, object]:
    """Impatient, so that cases are short; all steps of recovery are allowed."""
    power = [sys.executable, "-m", "tests.chaos.power", str(folder)]
    devices = [
        {
            "name": f"d{number}",
            "type": "android",
            "identifier": serial,
            "power_cycle": [*power, str(number)],
        }
        for number, serial in enumerate(serials)
    ]
    recovery_s = {"backoff_s": 0.2, "max_backoff_s": 1}
    return {
        "devices": devices,
        "adb_server": {"ours": True},
        "recovery": recovery_s | {"return_timeout_s": patient(3), "reboot_timeout_s": patient(15)},
        "quarantine": recovery_s,
        "lease": {"ttl_s": patient(_TTL_S), "claim_timeout_s": patient(10)},
    }
