"""Paths of a device, and files that arrive on it: whole under their name, or not at all."""

import contextlib
import os
import posixpath
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEVICE_FOLDERS = ("data", "sdcard", "system")
"""Top-level folders of the device's own."""
NAMESPACE_ROOT = Path("/.device")
"""Path in a namespace of the folder that holds them; its path on the host is hidden there."""

PARTIAL_PREFIX = ".adb-push-"
"""Prefix of unfinished files; those of a killed device are removed at boot."""
_PERMISSIONS = 0o777
_FOLDER_MODE = 0o775
_MAX_VECTORS = 1024


@dataclass(frozen=True, slots=True)
class DeviceFilesystem:
    """Maps paths as clients name them to paths that this process can open.

    Attributes:
        root: folder, as this process sees it, that holds the device's own top-level folders.
        in_namespace: whether the process has them mounted at `/`; then no path needs mapping.
            Otherwise paths are mapped by name, all others are the host's, and absolute symbolic
            links on the device that name `/data` lead nowhere.
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
        """Folder with the files of a phone's `/sys`; `$QNNFARM_SYS_ROOT` names it."""
        return self.root / "sys"

    def resolve(self, path: str) -> str:
        """Return the path to open for a path of the device; a relative one starts at `/`."""
        absolute = posixpath.join("/", path)
        if self.in_namespace:
            return absolute
        plain = "/" + posixpath.normpath(absolute).lstrip("/")
        if plain.split("/", 2)[1] in DEVICE_FOLDERS:
            trailing = "/" if absolute.endswith("/") else ""
            return str(self.root) + plain + trailing
        return absolute

    def owns(self, path: str) -> bool:
        """Check whether an opened path lies in the device's `/data`, following links."""
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.data))


class IncomingFile:
    """A file being received, under a temporary name beside its destination until `commit`.

    A destination that is a link is followed, as adbd does; one that is neither a file nor a link
    (`/dev/null`, a FIFO) is written to directly. It is opened by the first `write`.
    """

    def __init__(self, path: str) -> None:
        self._name = path
        self._path = Path()
        self._partial: Path | None = None
        self._descriptor = -1

    def write(self, parts: Sequence[memoryview]) -> None:
        """Append all parts."""
        if self._descriptor < 0:
            self._path = Path(os.path.realpath(self._name))
            self._descriptor = self._open()
        rest = [part for part in parts if part]
        while rest:
            count = os.writev(self._descriptor, rest[:_MAX_VECTORS])
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]

    def flip(self, flips: Sequence[tuple[int, int]]) -> None:
        """Flip bits, given as offsets and masks, as bad memory does."""
        if self._partial is None:
            return
        for offset, mask in flips:
            byte = os.pread(self._descriptor, 1, offset)
            os.pwrite(self._descriptor, bytes([byte[0] ^ mask]), offset)

    def commit(self, mode: int, mtime: int) -> None:
        """Set its permissions and time, and give it its name."""
        if self._partial is None:
            self._close()
            return
        os.fchmod(self._descriptor, mode & _PERMISSIONS)
        os.utime(self._descriptor, (mtime, mtime))
        self._close()
        self._partial.replace(self._path)
        self._partial = None

    def abort(self) -> None:
        """Delete the temporary file; without effect after `commit`."""
        self._close()
        if self._partial is not None:
            with contextlib.suppress(OSError):
                self._partial.unlink()
            self._partial = None

    def _open(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            kind = stat.S_IFMT(self._path.lstat().st_mode)
            if kind not in {stat.S_IFREG, stat.S_IFLNK}:
                return os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        _make_parents(self._path)
        self._partial = _partial_name(self._path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._partial, flags, 0o600)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def make_link(path: Path, target: bytes, mtime: int) -> None:
    """Create or replace a symbolic link."""
    _make_parents(path)
    partial = _partial_name(path)
    partial.symlink_to(os.fsdecode(target))
    try:
        os.utime(partial, (mtime, mtime), follow_symlinks=False)
        partial.replace(path)
    except OSError:
        partial.unlink()
        raise


def _make_parents(path: Path) -> None:
    path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)


def _partial_name(path: Path) -> Path:
    return path.parent / f"{PARTIAL_PREFIX}{secrets.token_hex(8)}"


def remove_partials(folder: Path) -> None:
    """Remove the temporary files of interrupted pushes below a folder."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.startswith(PARTIAL_PREFIX):
                with contextlib.suppress(OSError):
                    Path(parent, name).unlink()
