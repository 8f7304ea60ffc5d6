"""Debian packages that the tests run through: OpenSSH, PostgreSQL, Chromium, Android's shell.

Standard library only: `tools.test` reads it before anything is installed.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bash": ("bash",),
        "binutils": ("readelf",),
        "chromium": ("chromium",),
        "chromium-driver": ("chromedriver",),
        "dash": ("dash", "sh"),
        "gcc": ("gcc",),
        "git": ("git",),
        "iproute2": ("ip",),
        "libatomic1": ("libatomic.so.1",),  # the QNN libraries load it
        "libc6-dev": ("libc.so",),  # gcc only recommends the headers
        "make": ("make",),
        "mksh": ("mksh",),
        "openssh-client": ("ssh", "ssh-keygen"),
        "openssh-server": ("sshd",),
        "openssl": ("openssl",),
        "postgresql": ("initdb", "postgres"),
        "procps": ("ps",),
        "systemd": ("systemd-analyze",),
        "toybox": ("toybox",),
        "util-linux": ("nsenter", "setpriv", "unshare"),
    }
)
"""Debian package -> its programs and libraries that tests run."""

_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")


def find_program(name: str) -> Path | None:
    """Find a program on PATH, among the system's own, or where Debian keeps PostgreSQL's."""
    system = "/usr/local/sbin:/usr/sbin:/sbin"
    if found := shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{system}"):
        return Path(found)
    folders = Path("/usr/lib/postgresql").glob(f"[0-9]*/bin/{name}")
    return max(folders, key=lambda path: float(path.parts[-3]), default=None)


def missing_packages() -> list[str]:
    """List the packages of which something is not installed here."""
    return sorted(package for package in PACKAGES if not is_installed(package))


def is_installed(package: str) -> bool:
    """Whether all that tests run of a package is here."""
    return all(
        _has_library(name) if ".so" in name else find_program(name) for name in PACKAGES[package]
    )


def _has_library(name: str) -> bool:
    """Whether a shared library is where Debian and Ubuntu keep them."""
    patterns = (name, f"*-linux-gnu*/{name}")
    return any(
        any(Path(folder).glob(pattern)) for folder in _LIBRARY_FOLDERS for pattern in patterns
    )
