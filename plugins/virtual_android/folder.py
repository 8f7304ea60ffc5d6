"""Folder of a device: its record `device.json`, and its lock.

Version history of the record: 1, the first; 2, `unconfined`.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from buildlib.files import atomic_write
from harness.errors import VirtualDeviceError
from harness.processes import boot_id, has_ended
from plugins.virtual_android.filesystem import DEVICE_FOLDERS
from plugins.virtual_android.linux import process_stat
from plugins.virtual_android.namespace import NamespaceKind

FILE_NAME = "device.json"

_LOCK_NAME = "serving.lock"
_LOG_TAIL_BYTES = 600
_LOCK_PATIENCE_S = 10.0
"""For a process that is just ending."""
_VERSION = 2
_MAX_PORT = 0xFFFF


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """A device, and its process if one was started.

    Attributes:
        serial_number: value of `ro.serialno`; drawn once.
        port: loopback port of the last start.
        pid_started: start time of the process in clock ticks; tells it from a later process
            that got the same pid. `machine_boot` does so across boots of this machine.
        namespace: the kind in which the process runs.
        unconfined: whether the user chose to have it run in none.
    """

    name: str
    soc: str
    serial_number: str
    storage_bytes: int | None = None
    port: int | None = None
    pid: int | None = None
    pid_started: int | None = None
    machine_boot: str | None = None
    namespace: str | None = None
    unconfined: bool = False

    @property
    def running(self) -> bool:
        """True if the recorded process still runs."""
        if self.pid is None or self.pid_started is None or self.machine_boot != boot_id():
            return False
        return not has_ended(self.pid, self.pid_started)

    def with_process(self, pid: int, port: int, namespace: NamespaceKind) -> "DeviceRecord":
        """Return the record of a device that has just been started."""
        process = process_stat(pid)
        return replace(
            self,
            port=port,
            pid=pid,
            pid_started=process.started if process else None,
            machine_boot=boot_id(),
            namespace=namespace.value,
        )

    def stopped(self) -> "DeviceRecord":
        """Return the record without a process."""
        return replace(self, pid=None, pid_started=None, machine_boot=None, namespace=None)


def new_record(
    name: str, soc: str, storage_bytes: int | None, *, unconfined: bool = False
) -> DeviceRecord:
    """Return the record of a new device."""
    number = f"QF{secrets.token_hex(6).upper()}"
    return DeviceRecord(name, soc, number, storage_bytes, unconfined=unconfined)


def load_record(folder: Path) -> DeviceRecord:
    """Read the record in a device's folder.

    Raises:
        FileNotFoundError: the device does not exist.
        VirtualDeviceError: its record is damaged, or written by a newer qnnfarm.
    """
    path = folder / FILE_NAME
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        fault: str | None = str(error)
    else:
        fault = _find_fault(content)
    if fault:
        raise VirtualDeviceError(f"record of a virtual device {path} cannot be used: {fault}")
    return DeviceRecord(**{key: value for key, value in content.items() if key != "version"})


def _find_fault(content: object) -> str | None:
    if not isinstance(content, dict) or not isinstance(content.get("version"), int):
        return "no version in it"
    if content["version"] > _VERSION:
        return "written by a newer qnnfarm"
    hints = {"version": int, **get_type_hints(DeviceRecord)}
    for key, value in content.items():
        if key not in hints or type(value) not in (get_args(hints[key]) or (hints[key],)):
            return f"unusable value of {key!r}"
    if not 0 < (content.get("port") or 1) <= _MAX_PORT:
        return "unusable value of 'port'"
    if content.get("namespace") not in {None, *NamespaceKind}:
        return "unusable value of 'namespace'"
    needed = [field.name for field in fields(DeviceRecord) if field.default is MISSING]
    absent = [key for key in needed if key not in content]
    return f"no {absent[0]!r} in it" if absent else None


def save_record(folder: Path, record: DeviceRecord) -> None:
    """Write the record atomically."""
    text = json.dumps({"version": _VERSION, **asdict(record)}, indent=2) + "\n"
    with atomic_write(folder / FILE_NAME) as file:
        file.write(text.encode())


def make_folders(folder: Path) -> None:
    """Make the folder of a device, and those of its files."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in DEVICE_FOLDERS:
        (folder / "root" / name).mkdir(parents=True, exist_ok=True)


def log_tail(path: Path) -> str:
    """Return the end of the log of a device's process; empty without a log."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
    return ""


def lock_folder(folder: Path) -> int:
    """Lock the folder of a device for the one process that serves it.

    Returns a descriptor; the lock ends with it, hence with its process at the latest.
    """
    lock = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, lock)
        _lock(lock, folder)
        on_failure.pop_all()
    return lock


def _lock(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                reason = "another process serves this device"
                raise OSError(errno.EBUSY, reason, str(folder)) from None
        else:
            return
        time.sleep(0.05)
