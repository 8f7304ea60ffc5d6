"""Android userland of a device: system properties, commands in `/system/bin`, shell environment.

All commands other than the device's own are the host's.
"""

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from buildlib.files import atomic_write
from harness.errors import one_line
from plugins.virtual_android.events import LoggedEvent
from plugins.virtual_android.filesystem import DeviceFilesystem
from plugins.virtual_android.storage import SYNCED_NAME

_COMMANDS = Path(__file__).parent / "commands"
"""Shell scripts of the device's own commands; `$root` is the folder of its files."""
_LOG_TAG = "virtual_device"
_MAX_LOG = 256 * 1024
_MAX_LOG_LINE = 1000
_HOST_PATH = "/usr/local/bin:/usr/bin:/bin"
"""Without `sbin`: a device has no use for the host's administration."""


def own_commands() -> dict[str, str]:
    """Return the scripts of a device's own commands by name; a confined device cannot read them.

    `python3` runs the interpreter behind this one's virtual environment, without its packages.
    """
    commands = {file.name: file.read_text(encoding="utf-8") for file in _COMMANDS.iterdir()}
    interpreter = shlex.quote(str(Path(sys.executable).resolve()))
    return commands | {"python3": f'#!/bin/sh\nexec {interpreter} -s -S "$@"\n'}


def boot_properties(folder: Path, properties: Mapping[str, str]) -> None:
    """Drop all but the `persist.` properties, one file each, and set those of this boot."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if not file.name.startswith("persist."):
            file.unlink()
    for key, value in properties.items():
        set_property(folder, key, value)


def set_property(folder: Path, key: str, value: str) -> None:
    """Set one property atomically."""
    with atomic_write(folder / key, sync=False) as file:
        file.write((value.replace("\n", " ") + "\n").encode())


def device_properties(*, name: str, soc: str, serial_number: str, abi: str) -> dict[str, str]:
    """Return the properties of an Android device with that SoC at boot.

    `ro.kernel.qemu=1` marks it as virtual, as Android's own emulator does. Numbers that only
    hardware could give are left out.
    """
    product = f"qnnfarm_{soc.lower()}"
    build = f"qnnfarm/{product}/{product}:15/virtual/{name}:userdebug/test-keys"
    return {
        "ro.boot.hardware": "qnnfarm",
        "ro.boot.qemu": "1",
        "ro.boot.serialno": serial_number,
        "ro.build.characteristics": "emulator",
        "ro.build.display.id": f"{product}-userdebug 15 virtual",
        "ro.build.fingerprint": build,
        "ro.build.type": "userdebug",
        "ro.build.version.release": "15",
        "ro.build.version.sdk": "35",
        "ro.debuggable": "1",
        "ro.hardware": "qnnfarm",
        "ro.kernel.qemu": "1",
        "ro.product.board": "qnnfarm",
        "ro.product.brand": "qnnfarm",
        "ro.product.cpu.abi": abi,
        "ro.product.cpu.abilist": abi,
        "ro.product.cpu.abilist64": abi,
        "ro.product.device": product,
        "ro.product.manufacturer": "qnnfarm",
        "ro.product.model": f"qnnfarm virtual {soc}",
        "ro.product.name": product,
        "ro.serialno": serial_number,
        "ro.soc.manufacturer": "QTI",
        "ro.soc.model": soc,
    }


def banner(properties: Mapping[str, str], features: tuple[str, ...]) -> str:
    """Return the banner that a device sends when an adb server connects."""
    keys = ("ro.product.name", "ro.product.model", "ro.product.device")
    parts = [f"{key}={properties[key]}" for key in keys]
    return f"device::{';'.join(parts)};features={','.join(features)}"


@dataclass(frozen=True, slots=True)
class Userland:
    """Commands and environment of a device's shell."""

    filesystem: DeviceFilesystem
    host_name: str
    commands: Mapping[str, str]

    def boot(self) -> None:
        """Write the commands, and delete state that ends with a boot."""
        root = self.filesystem.root
        state = root / "state"
        state.mkdir(exist_ok=True)
        for file in state.iterdir():
            file.unlink()
        (state / SYNCED_NAME).touch()  # all files present were read from the disk
        folder = root / "system" / "bin"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, script in self.commands.items():
            shebang, text = script.split("\n", 1)
            assignment = f"root={shlex.quote(str(root))}"
            _write_script(folder / name, f"{shebang}\n{assignment}\n{text}")
        (folder / "sh").symlink_to("/bin/sh")
        if toybox := shutil.which("toybox"):
            (folder / "toybox").symlink_to(toybox)

    def log(self, event: LoggedEvent) -> None:
        """Append an event to the log that `logcat` prints, which holds at least the last 128 KiB.

        The log begins anew with each boot, as a phone's does. On a full disk a line is lost.
        """
        moment = datetime.fromtimestamp(event.at, UTC).astimezone()
        priority = "W" if event.kind in {"struck", "off"} else "I"
        text = one_line(f"{event.kind} {event.fault} {event.detail}", _MAX_LOG_LINE)
        line = (
            f"{event.at:.3f} {moment:%m-%d %H:%M:%S}.{moment.microsecond // 1000:03} "
            f"{os.getpid()} {os.getpid()} {priority} {_LOG_TAG} {text}\n"
        )
        file = self.filesystem.root / "state" / "log"
        with contextlib.suppress(OSError):
            if file.exists() and file.stat().st_size > _MAX_LOG:
                tail = file.read_bytes()[-_MAX_LOG // 2 :]
                file.write_bytes(tail[tail.find(b"\n") + 1 :])
            with file.open("a", encoding="utf-8") as log:
                log.write(line)

    def write_limit(self, limit_bytes: int | None) -> None:
        """Write the limit of `/data` that `df` shows, or `None`."""
        file = self.filesystem.root / "state" / "storage_kib"
        if limit_bytes is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(f"{limit_bytes // 1024}\n", encoding="ascii")

    def environment(self, term: str) -> dict[str, str]:
        """Return all variables of a shell; none come from the daemon's own environment."""
        temporary = self.filesystem.temporary
        boot_id = {"QNNFARM_BOOT_ID": str(self.filesystem.root / "boot_id")}
        return {
            **({} if self.filesystem.in_namespace else boot_id),  # `/proc` is the host's there
            "ANDROID_DATA": str(self.filesystem.data),
            "ANDROID_ROOT": self.filesystem.tools.removesuffix("/bin"),
            "HOME": temporary,
            "HOSTNAME": self.host_name,
            "LANG": "C.UTF-8",
            "LOGNAME": "shell",
            "PATH": f"{self.filesystem.tools}:{_HOST_PATH}",
            "QNNFARM_SYS_ROOT": str(self.filesystem.sys),
            "SHELL": "/bin/sh",
            "TERM": term,
            "TMPDIR": temporary,
            "USER": "shell",
        }


def _write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
