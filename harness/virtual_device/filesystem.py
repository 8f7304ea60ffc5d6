"""Where the paths of a device lie."""

import os
import posixpath
from dataclasses import dataclass
from pathlib import Path

DEVICE_FOLDERS = ("data", "sdcard", "system")
"""Top-level folders that a device has of its own; all others are the host's."""
NAMESPACE_ROOT = Path("/.device")
"""Where a namespace shows the folder that holds them, whatever hides its path on the host."""


@dataclass(frozen=True, slots=True)
class DeviceFilesystem:
    """Maps paths as clients name them to paths that this process can open.

    Attributes:
        root: folder, as this process sees it, that holds the device's own top-level folders.
        in_namespace: whether the process has them mounted at `/`; then no path needs mapping.
            Otherwise paths are mapped by name, and absolute symbolic links on the device that
            name `/data` lead nowhere.
    """

    root: Path
    in_namespace: bool

    @property
    def data(self) -> Path:
        """The device's `/data`."""
        return Path("/data") if self.in_namespace else self.root / "data"

    @property
    def temporary(self) -> str:
        """The writable folder that `$TMPDIR` names in the device's shell."""
        return str(self.data / "local" / "tmp")

    @property
    def tools(self) -> str:
        """The device's `/system/bin`, as its shell sees it."""
        return "/system/bin" if self.in_namespace else str(self.root / "system" / "bin")

    @property
    def sys(self) -> Path:
        """Folder with what a phone has in `/sys`; `$QNNFARM_SYS_ROOT` names it."""
        return self.root / "sys"

    @property
    def requests(self) -> Path:
        """The FIFO by which commands on the device ask its process for something."""
        return self.root / "requests"

    def resolve(self, path: str) -> str:
        """The path to open for a path of the device, which is taken from `/` if relative."""
        absolute = posixpath.join("/", path)
        if self.in_namespace:
            return absolute
        plain = "/" + posixpath.normpath(absolute).lstrip("/")
        if plain.split("/", 2)[1] in DEVICE_FOLDERS:
            trailing = "/" if absolute.endswith("/") else ""
            return str(self.root) + plain + trailing
        return absolute

    def owns(self, path: str) -> bool:
        """Whether an opened path lies in the device's `/data`, links followed."""
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.data))
