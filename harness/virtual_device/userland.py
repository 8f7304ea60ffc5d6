"""The device's own commands in `/system/bin`, and the environment of its shells.

All other commands come from the host.
"""

import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.virtual_device.android_scripts import SCRIPTS
from harness.virtual_device.filesystem import DeviceFilesystem
from harness.virtual_device.power import SYNCED_NAME

_HOST_PATH = "/usr/local/bin:/usr/bin:/bin"
"""No `sbin`: what administers the host has no business on a device."""


@dataclass(frozen=True, slots=True)
class Userland:
    """The commands and the environment of a device's shell."""

    filesystem: DeviceFilesystem
    host_name: str

    def boot(self) -> None:
        """Write the commands anew, and forget the state that ends with a boot."""
        root = self.filesystem.root
        state = root / "state"
        state.mkdir(exist_ok=True)
        for file in state.iterdir():
            file.unlink()
        (state / SYNCED_NAME).touch()  # what is there now was read from the disk
        folder = root / "system" / "bin"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        places = {
            "properties": root / "properties",
            "state": state,
            "settings": root / "settings",
            "sys": self.filesystem.sys,
            "data": root / "data",
            "requests": self.filesystem.requests,
        }
        quoted = {name: shlex.quote(str(path)) for name, path in places.items()}
        for name, text in SCRIPTS.items():
            _write_script(folder / name, text.format_map(quoted))
        interpreter = shlex.quote(sys.executable)
        _write_script(folder / "python3", f'#!/bin/sh\nexec {interpreter} -s -S "$@"\n')
        (folder / "sh").symlink_to("/bin/sh")
        if toybox := shutil.which("toybox"):
            (folder / "toybox").symlink_to(toybox)

    def show_limit(self, limit_bytes: int | None) -> None:
        """Let `df` tell of a limit for `/data`, or of none."""
        file = self.filesystem.root / "state" / "storage_kib"
        if limit_bytes is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(f"{limit_bytes // 1024}\n", encoding="ascii")

    def environment(self, term: str) -> dict[str, str]:
        """All variables of a shell. Nothing comes from the daemon's own environment."""
        temporary = self.filesystem.temporary
        return {
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
