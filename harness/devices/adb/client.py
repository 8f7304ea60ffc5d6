"""Client of a running adb server: its devices, their states and connections."""

import re
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from filelock import BaseFileLock, Timeout

from buildlib.paths import default_cache_root
from harness.clock import Deadline, DeadlineExceeded
from harness.devices.adb.connection import ServerAddress, query
from harness.devices.base import USB_PORT, FailReply, ServerUnreachable, StreamClosed
from harness.errors import (
    AdbServerError,
    DeviceConnectError,
    DeviceTimeoutError,
    DeviceUnauthorizedError,
)
from harness.paths import private_lock

_QUERY_TIMEOUT_S = 10.0
_CONNECTED = re.compile(r"(already )?connected to ")
_REFUSED_KEY = re.compile(r"(failed to authenticate|unauthorized)", re.IGNORECASE)
_TRANSIENT = re.compile(r"offline|connecting|authorizing|not found")
_RELEASE = re.compile(r"\*([\x01-\x20])([\d.]+)")
_POLL_S = 0.1
TCP_SERIAL = re.compile(r"(?!usb:).+:\d{1,5}")
"""Serial of a device to which an adb server connects over TCP."""
_STATES = (
    "authorizing|bootloader|connecting|detached|device|host|no permissions|offline|recovery|rescue|"
    "sideload|unauthorized"
)
_ENTRY = re.compile(
    rf"(\S(?:.{{0,250}}?\S)?)\s+({_STATES})(\s*|\s*[(;].*|\s+\w+:.*)|(\S+)\s+(\S+)(.*)"
)
"""Serial, state, details. Serials have blanks: `(no serial number)`, `adb-X (2)._adb-tls-...`."""


@dataclass(frozen=True, slots=True)
class AdbDeviceInfo:
    """A line of `adb devices -l`.

    Attributes:
        serial: its name for adb's `-s`: the serial; its USB port, e.g. `usb:1-4`, if others at this
            server have the same.
        state: `device` when usable, else `offline`, `unauthorized`, `recovery`, ...
        details: `usb`, `product`, `model`, `device`, `transport_id`, as far as known.
        shared_serial: its serial, if others have it too.
    """

    serial: str
    state: str
    details: dict[str, str] = field(default_factory=dict, hash=False)
    shared_serial: str = ""

    @property
    def usable(self) -> bool:
        """True if commands can be run on it."""
        return self.state == "device"

    def is_named(self, name: str) -> bool:
        """Return whether a device can be asked for by that name: its serial, or its USB port."""
        return name in (self.serial, f"{USB_PORT}{self.details.get('usb')}")


@dataclass(frozen=True, slots=True)
class AdbServer:
    """An adb server that answered; all methods raise `AdbServerError` when it does no more.

    Attributes:
        address: where it listens.
        version: its protocol version: 41 for adb 1.0.41.
        owner: the user of its process, if it is another than ours.
        adb_path: the program that it was started with, if we started it.
        name: its name for people, where its address says nothing to them.
    """

    address: ServerAddress
    version: int
    owner: str = ""
    started_by_us: bool = False
    adb_path: Path | None = None
    name: str = ""

    @property
    def shown(self) -> str:
        """Its name, or address, for people."""
        return self.name or str(self.address)

    def devices(self) -> list[AdbDeviceInfo]:
        """Return all devices it knows, in any state."""
        try:
            return parse_devices(self._ask("host:devices-l"))
        except FailReply as error:
            raise AdbServerError(self.shown, f"lists no devices: {error}") from None

    def connect(self, serial: str, *, timeout_s: float = 15.0) -> None:
        """Make it connect to the TCP device `host:port`, and wait until that is usable.

        A connection that it has already, but that has gone bad, is made anew. One process of this
        user does so at a time: a connection in the making looks bad to the others.

        Raises:
            DeviceUnauthorizedError: the device does not accept the server's key.
            DeviceConnectError: nothing answers there, or no device does.
            DeviceTimeoutError: it took too long.
        """
        deadline = Deadline(timeout_s)
        try:
            with self._connecting(serial, deadline):
                self._connect(serial, deadline)
        except (DeadlineExceeded, Timeout):
            raise DeviceTimeoutError(serial, "connecting", timeout_s) from None

    def _connecting(self, serial: str, deadline: Deadline) -> BaseFileLock:
        folder = default_cache_root() / "adb-connect"
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.-]", "_", f"{self.address}-{serial}")
        return private_lock(folder / f"{name[-200:]}.lock", deadline.remaining())

    def _connect(self, serial: str, deadline: Deadline) -> None:
        while True:
            answer = self._ask_to_connect(serial, deadline.remaining())
            state = self.state(serial)
            is_old = answer.startswith("already")
            # A server of adb 28.0.1 signs nothing on a connection that it has made anew by itself.
            if state == "unauthorized" and not is_old:
                raise self.unauthorized(serial)
            if state != "unauthorized" and not _TRANSIENT.search(state):
                return
            if is_old:
                self.disconnect(serial)
            time.sleep(min(_POLL_S, deadline.remaining()))

    def _ask_to_connect(self, serial: str, timeout_s: float) -> str:
        try:
            answer = self._ask(f"host:connect:{serial}", timeout_s)
        except FailReply as error:
            answer = str(error)
        if _REFUSED_KEY.search(answer):
            raise self.unauthorized(serial)
        if not _CONNECTED.match(answer):
            raise DeviceConnectError(serial, answer)
        return answer

    def release(self) -> str:
        """Return the version of its program, such as 36.0.0; empty before adb 35, which tells none.

        AOSP `packages/modules/adb/proto/adb_host.proto`, `AdbServerStatus`: field 5 is a text.
        """
        try:
            match = _RELEASE.search(self._ask("host:server-status"))
        except FailReply:
            return ""
        return match[2][: ord(match[1])] if match else ""

    def unauthorized(self, shown: str) -> DeviceUnauthorizedError:
        """Return the error of a device that does not accept the server's key."""
        if not self.owner:
            return DeviceUnauthorizedError(shown)
        advice = (
            f"confirm the dialog for the key of {self.owner}, who runs the server, on its screen"
        )
        return DeviceUnauthorizedError(shown, advice)

    def disconnect(self, serial: str) -> bool:
        """Make it forget a TCP device; gives whether it knew it."""
        try:
            self._ask(f"host:disconnect:{serial}")
        except FailReply:
            return False
        return True

    def state(self, serial: str) -> str:
        """Return `device`, `offline`, `unauthorized`, ..., or why there is none, in its words."""
        try:
            return self._ask(f"host-serial:{serial}:get-state")
        except FailReply as error:
            reason = str(error)
            return "unauthorized" if reason.startswith("device unauthorized") else reason

    def _ask(self, service: str, timeout_s: float = _QUERY_TIMEOUT_S) -> str:
        """Return the answer to a host service; only a connect may time out innocently."""
        try:
            return query(self.address, service, Deadline(timeout_s))
        except (StreamClosed, ServerUnreachable) as error:
            raise AdbServerError(self.shown, f"went away: {error}") from None
        except DeadlineExceeded:
            if service.startswith("host:connect:"):
                raise
            reason = f"does not answer within {timeout_s:g} s"
            raise AdbServerError(self.shown, reason) from None


def parse_devices(answer: str) -> list[AdbDeviceInfo]:
    """Return the entries of an answer to `host:devices-l`; lines that are none are left out.

    >>> parse_devices("127.0.0.1:5555 device product:x model:Pixel_9 transport_id:1")[0].state
    'device'
    """
    entries = []
    for line in answer.splitlines():
        match = _ENTRY.fullmatch(line.strip())
        if match:
            serial, state, details = match.groups()[:3] if match[1] else match.groups()[3:]
            pairs = re.findall(r"(?:^|\s)(\w+):(\S+)", details)
            entries.append(AdbDeviceInfo(serial, state, dict(pairs)))
    counts = Counter(entry.serial for entry in entries)
    return [
        replace(entry, serial=f"{USB_PORT}{entry.details['usb']}", shared_serial=entry.serial)
        if (counts[entry.serial] > 1 or " " in entry.serial) and "usb" in entry.details
        else entry
        for entry in entries
    ]


def device_features(server: AdbServer, serial: str, deadline: Deadline) -> frozenset[str]:
    """Return the features of both device and server, e.g. `shell_v2`, `stat_v2`.

    Raises the bare failures of `harness.devices.adb.connection`.
    """
    answer = query(server.address, f"host-serial:{serial}:features", deadline)
    return frozenset(answer.split(","))
