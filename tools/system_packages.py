"""Debian packages that the tests run through: OpenSSH, PostgreSQL, Chromium, Android's shell.

Standard library only: `tools.test` reads it before anything is installed.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

PROGRAMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "chromium": ("chromium",),
        "chromium-driver": ("chromedriver",),
        "git": ("git",),
        "make": ("make",),
        "mksh": ("mksh",),
        "openssh-client": ("ssh", "ssh-keygen"),
        "openssh-server": ("sshd",),
        "postgresql": ("initdb", "postgres"),
        "procps": ("ps",),
        "systemd": ("systemd-analyze",),
        "toybox": ("toybox",),
        "util-linux": ("setpriv", "unshare"),
    }
)
"""Debian package -> its programs that tests run."""

LIBRARIES: Mapping[str, str] = MappingProxyType({"libatomic1": "libatomic.so.1"})
"""Debian package -> its library that the QNN libraries load."""

_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")


def find_program(name: str) -> Path | None:
    """Find a program on PATH, among the system's own, or where Debian keeps PostgreSQL's."""
    system = "/usr/local/sbin:/usr/sbin:/sbin"
    if found := shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{system}"):
        return Path(found)
    folders = Path("/usr/lib/postgresql").glob(f"[0-9]*/bin/{name}")
    return max(folders, key=lambda path: float(path.parts[-3]), default=None)


def find_library(name: str) -> Path | None:
    """Find a shared library where Debian and Ubuntu keep them."""
    for folder in _LIBRARY_FOLDERS:
        for pattern in (name, f"*-linux-gnu*/{name}"):
            if found := next(Path(folder).glob(pattern), None):
                return found
    return None


def missing_packages() -> list[str]:
    """List the packages of which something is not installed here."""
    lacking = {package for package, names in PROGRAMS.items() if not all(map(find_program, names))}
    lacking |= {package for package, name in LIBRARIES.items() if find_library(name) is None}
    return sorted(lacking)
