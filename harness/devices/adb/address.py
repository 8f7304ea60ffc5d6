"""Which adb server the environment names.

The variables, strongest first: `ADB_SERVER_SOCKET` (adb's own, `tcp:HOST:PORT` or `tcp:PORT`),
`ANDROID_ADB_SERVER_ADDRESS` (adb's own, a host) or `ANDROID_ADB_SERVER_HOST` (what Python clients
read), and `ANDROID_ADB_SERVER_PORT`.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import AdbAddressError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 5037

_TCP = re.compile(r"tcp:(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+):)?(?P<port>\d+)")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where an adb server listens, or should; `str()` gives `host:port`."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT

    @property
    def local(self) -> bool:
        """Whether it is on this host's loopback: only there may a server be started."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def address_from(environ: Mapping[str, str]) -> ServerAddress:
    """The address that `environ` names, or adb's default.

    Raises:
        AdbAddressError: a variable has a form that cannot be used.
    """
    if spec := environ.get("ADB_SERVER_SOCKET"):
        return _parse_socket(spec)
    host = (
        environ.get("ANDROID_ADB_SERVER_ADDRESS")
        or environ.get("ANDROID_ADB_SERVER_HOST")
        or DEFAULT_HOST
    )
    port = environ.get("ANDROID_ADB_SERVER_PORT")
    return ServerAddress(
        host, _parse_port("ANDROID_ADB_SERVER_PORT", port) if port else DEFAULT_PORT
    )


def _parse_socket(spec: str) -> ServerAddress:
    name = "ADB_SERVER_SOCKET"
    match = _TCP.fullmatch(spec)
    if match is None:
        raise AdbAddressError(name, spec, "only tcp:HOST:PORT and tcp:PORT are supported")
    host = (match["host"] or DEFAULT_HOST).strip("[]")
    return ServerAddress(host, _parse_port(name, match["port"], spec))


def _parse_port(variable: str, text: str, value: str | None = None) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536 and len(text) < 7):
        raise AdbAddressError(variable, value or text, "the port is a number from 1 to 65535")
    return int(text)
