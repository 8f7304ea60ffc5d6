"""Virtual devices of this user: start, list, stop, remove.

Each lies in a folder of its own, `devices/NAME` in the state folder: `device.json` (the record),
`daemon.log`, and `root`, the files of the device. Changes to a device hold its lock, so that two
commands at once do one thing after the other.

Functions that take the name of a device raise `VirtualDeviceError` for an invalid name,
`UnknownVirtualDeviceError` if it does not exist, and `VirtualDeviceError` if its record cannot be
read, or another command holds its lock for minutes.
"""

import contextlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from filelock import Timeout

from buildlib.targets import find_soc
from harness.errors import (
    UnknownVirtualDeviceError,
    VirtualDeviceConfinementError,
    VirtualDeviceError,
    one_line,
)
from harness.paths import make_state_dir, private_lock, state_dir
from plugins.virtual_android.control import DeviceControl
from plugins.virtual_android.faults import InjectedFault
from plugins.virtual_android.folder import (
    FILE_NAME,
    DeviceRecord,
    load_record,
    log_tail,
    make_folders,
    new_record,
    save_record,
)
from plugins.virtual_android.namespace import (
    FORCE_VARIABLE,
    NamespaceKind,
    expected_namespace,
    probe_namespace,
)
from plugins.virtual_android.processes import MARK_VARIABLE, kill_leftovers, kill_tree

DeviceState = Literal["running", "stopped", "damaged"]

_DAEMON = "from plugins.virtual_android.daemon import run; run()"
_LOG_NAME = "daemon.log"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_DAEMON_VARIABLES = frozenset(
    ("ADB_VENDOR_KEYS", "ANDROID_USER_HOME", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH")
)
_START_PATIENCE_S = 120.0
_LOCK_PATIENCE_S = 300.0  # longer than a start may take
_STOP_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class VirtualDevice:
    """A virtual device and its state.

    Attributes:
        serial: how the adb server knows it, `127.0.0.1:PORT`; empty if it never ran.
        pid: its process while it runs.
        root: folder on the host with the device's own `data`, `sdcard` and `system`.
        soc: part number of the SoC it represents.
        storage_bytes: limit of its `/data`; `None` for none but the host's.
        namespace: kind of namespace it runs in; `None` while it is stopped.
        unconfined: whether it runs, or was last started, without one by its user's choice.
        just_started: whether the call that returned it started it.
        log_path: log of its process.
    """

    name: str
    state: DeviceState
    root: Path
    log_path: Path
    serial: str = ""
    pid: int | None = None
    soc: str = ""
    storage_bytes: int | None = None
    namespace: NamespaceKind | None = None
    unconfined: bool = False
    just_started: bool = field(default=False, compare=False)

    @property
    def confined(self) -> bool:
        """True if its processes see nothing of the host; while it is stopped, they will."""
        return not self.unconfined and self.namespace is not NamespaceKind.NONE


def start(
    name: str,
    soc: str,
    *,
    storage_bytes: int | None = None,
    unconfined: bool | None = None,
    faults: Sequence[InjectedFault] = (),
) -> VirtualDevice:
    """Start a device, new or with its files; a running one is left alone.

    Args:
        name: up to 40 letters, digits, `-` and `_`.
        soc: part number of a SoC in the catalog.
        storage_bytes: limit for its `/data`; by default an existing device keeps its own.
        unconfined: whether its processes have all permissions of the user on this host; by
            default an existing device stays as it is, and a new one is confined.
        faults: injected once it listens, also into a device that ran already.

    Raises:
        VirtualDeviceError: the name cannot be used, it exists with another SoC, runs with another
            limit or confinement, or its process did not start.
        BuildError: the catalog has no such SoC.
        VirtualDeviceConfinementError: this machine grants no namespace to confine it in.
    """
    folder = _folder(name)
    part = find_soc(soc).name
    with _locked(name):
        record = _updated_record(folder, name, part, storage_bytes, unconfined=unconfined)
        if record.running:
            DeviceControl(name, folder).inject(*faults)
            return _view(folder, record)
        kind = NamespaceKind.NONE if record.unconfined else expected_namespace()
        kind = kind or _confinement(name)
        kill_leftovers({folder})
        make_folders(folder)
        (folder / "mnt").mkdir(exist_ok=True)
        is_new = not (folder / FILE_NAME).exists()
        save_record(folder, record.stopped())
        try:
            pid, port, kind = _launch_in(name, folder, kind)
        except VirtualDeviceConfinementError:
            if is_new:
                _delete_tree(folder)
            raise
        record = record.with_process(pid, port, kind)
        save_record(folder, record)
        DeviceControl(name, folder).inject(*faults)
        return replace(_view(folder, record), just_started=True)


def list_devices() -> list[VirtualDevice]:
    """List all devices by name; one with an unreadable record is `damaged`."""
    devices: list[VirtualDevice] = []
    for file in sorted(_devices_dir().glob(f"*/{FILE_NAME}")):
        folder = file.parent
        if not _NAME.fullmatch(folder.name):
            continue
        try:
            devices.append(_view(folder, load_record(folder)))
        except FileNotFoundError:
            continue
        except VirtualDeviceError:
            devices.append(
                VirtualDevice(folder.name, "damaged", folder / "root", folder / _LOG_NAME)
            )
    return devices


def get(name: str) -> VirtualDevice:
    """Return one device."""
    return _view(_folder(name), _load(name))


def stop(name: str) -> VirtualDevice:
    """Stop a device and every process on it; its files stay. It may be stopped already."""
    folder = _folder(name)
    _load(name)  # before the lock, which would make folders for an unknown device
    with _locked(name):
        record = _load(name)
        _terminate(record)
        kill_leftovers({folder})
        record = record.stopped()
        save_record(folder, record)
        return _view(folder, record)


def remove(name: str) -> None:
    """Stop a device, which may be damaged, and delete its files."""
    folder = _folder(name)
    if not folder.is_dir():
        raise UnknownVirtualDeviceError(name, _names())
    with _locked(name):
        with contextlib.suppress(FileNotFoundError, VirtualDeviceError):
            _terminate(load_record(folder))
        kill_leftovers({folder})
        trash = folder.with_name(f".{name}.{secrets.token_hex(4)}.removed")
        folder.rename(trash)
        _delete_tree(trash)


def control(name: str) -> DeviceControl:
    """Return the control of a device, which need not run."""
    _load(name)
    return DeviceControl(name, _folder(name))


def _confinement(name: str) -> NamespaceKind:
    support = probe_namespace()
    if support.kind is NamespaceKind.NONE and not support.forced:
        raise VirtualDeviceConfinementError(name, support.reason)
    return support.kind


def mismatch_error(name: str, what: str, made_with: str, wanted: str) -> VirtualDeviceError:
    """Return the error of a device that exists with another property than is wanted."""
    return VirtualDeviceError(
        f"virtual device {name} exists with {what} {made_with}, not {wanted}: choose another name, "
        f"or `qnnfarm device rm {name}` first"
    )


def _updated_record(
    folder: Path, name: str, soc: str, storage_bytes: int | None, *, unconfined: bool | None
) -> DeviceRecord:
    try:
        record = load_record(folder)
    except FileNotFoundError:
        return new_record(name, soc, storage_bytes, unconfined=bool(unconfined))
    if record.soc != soc:
        raise mismatch_error(name, "SoC", record.soc, soc)
    if unconfined is not None:
        now = record.namespace == NamespaceKind.NONE if record.running else unconfined
        if now != unconfined and os.environ.get(FORCE_VARIABLE) != NamespaceKind.NONE:
            words = ("on", "off")
            raise mismatch_error(name, "confinement", words[now], words[unconfined])
        record = replace(record, unconfined=unconfined)
    if storage_bytes is None or storage_bytes == record.storage_bytes:
        return record
    if record.running:
        old, new = f"{record.storage_bytes} bytes", f"{storage_bytes} bytes"
        raise mismatch_error(name, "storage", old, new)
    return replace(record, storage_bytes=storage_bytes)


def _launch_in(name: str, folder: Path, kind: NamespaceKind) -> tuple[int, int, NamespaceKind]:
    """Launch in a namespace of this kind, or of the best that is granted if it is not."""
    # A probe takes as long as a launch, so there is one only after a launch has failed.
    try:
        return *_launch(name, folder, kind), kind
    except VirtualDeviceError:
        best = kind if kind is NamespaceKind.NONE else _confinement(name)
        if best is kind:
            raise
    return *_launch(name, folder, best), best


def _launch(name: str, folder: Path, kind: NamespaceKind) -> tuple[int, int]:
    """Start the daemon of a device, wait until it listens, and return its pid and port."""
    log_path = folder / _LOG_NAME
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as ready:
        try:
            _spawn(folder, kind, write_end, log_path)
            in_time = True
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            os.close(write_end)
        in_time = in_time and bool(select.select([ready], [], [], _START_PATIENCE_S)[0])
        line = ready.readline() if in_time else b""
    if line:
        answer = json.loads(line)
        return answer["pid"], answer["port"]
    kill_leftovers({folder})
    reason = "its process ended" if in_time else f"no answer within {_START_PATIENCE_S:g} s"
    tail = one_line(log_tail(log_path))
    end_of_log = f": {tail}" if tail else ""
    raise VirtualDeviceError(
        f"virtual device {name} did not start: {reason}{end_of_log} (log {log_path})"
    )


def _spawn(folder: Path, kind: NamespaceKind, ready_fd: int, log_path: Path) -> None:
    """Run the daemon until it has detached itself."""
    command = [sys.executable, "-P", "-c", _DAEMON, str(folder)]
    command += ["--ready-fd", str(ready_fd), "--namespace", kind.value]
    with log_path.open("ab") as log:
        subprocess.run(
            command,
            env={**_daemon_environment(), MARK_VARIABLE: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[ready_fd],
            cwd="/",
            check=False,
            timeout=_START_PATIENCE_S,
        )


def _daemon_environment() -> dict[str, str]:
    """Return the variables that a daemon needs: the others may hold secrets of the user's."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _DAEMON_VARIABLES or name.startswith("PYTHON")
    }


def _terminate(record: DeviceRecord) -> None:
    if record.pid is None or not record.running:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_PATIENCE_S
    while record.running:
        if time.monotonic() > deadline:
            kill_tree(record.pid)
        time.sleep(0.02)


def _devices_dir() -> Path:
    return state_dir().absolute() / "devices"


def _folder(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise VirtualDeviceError(
            f"a virtual device cannot be named {name!r}: use up to 40 letters, digits, `-` "
            "and `_`, with a letter or digit first"
        )
    return _devices_dir() / name


def _names() -> tuple[str, ...]:
    return tuple(device.name for device in list_devices())


def _load(name: str) -> DeviceRecord:
    try:
        return load_record(_folder(name))
    except FileNotFoundError:
        raise UnknownVirtualDeviceError(name, _names()) from None


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    make_state_dir()
    _devices_dir().mkdir(exist_ok=True, mode=0o700)
    lock = private_lock(_devices_dir() / f".{name}.lock")
    try:
        lock.acquire(timeout=_LOCK_PATIENCE_S)
    except Timeout:
        raise VirtualDeviceError(
            f"virtual device {name}: another command has held it for {_LOCK_PATIENCE_S:g} "
            "s: try again once that is done"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _view(folder: Path, record: DeviceRecord) -> VirtualDevice:
    is_running = record.running
    return VirtualDevice(
        name=record.name,
        state="running" if is_running else "stopped",
        root=folder / "root",
        log_path=folder / _LOG_NAME,
        serial=f"127.0.0.1:{record.port}" if record.port else "",
        pid=record.pid if is_running else None,
        soc=record.soc,
        storage_bytes=record.storage_bytes,
        namespace=NamespaceKind(record.namespace) if is_running and record.namespace else None,
        unconfined=record.unconfined,
    )


def _delete_tree(folder: Path) -> None:
    """Delete a folder even where the device's users made parts of it unreadable."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(folder)
