"""Control socket of a device: one JSON line each way over a UNIX socket.

The socket lies in the device's folder with mode 0600. Processes on the device are refused though
they belong to the same user, and so is `adb forward`: a phone cannot reach the lab's switches.
"""

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import HarnessError, VirtualDeviceError
from plugins.virtual_android.events import LoggedEvent, read_events
from plugins.virtual_android.faults import InjectedFault, parse_fault
from plugins.virtual_android.heat.simulation import HeatReading, HeatSimulation
from plugins.virtual_android.heat.thermal import check_changes
from plugins.virtual_android.linux import process_stat
from plugins.virtual_android.power import PowerAction, PowerCommand, PowerQueue

if TYPE_CHECKING:
    from plugins.virtual_android.injection import Injector

CONTROL_NAME = "control.sock"

Answer = dict[str, Any]
Handler = Callable[[Mapping[str, Any]], Answer]

_PEER = struct.Struct("3i")
_MAX_LINE = 64 * 1024
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class DeviceControl:
    """Client of one device's control socket; all but `events` raise `VirtualDeviceError`.

    Attributes:
        folder: the device's own, with its control socket.
    """

    name: str
    folder: Path

    def inject(self, *faults: InjectedFault) -> None:
        """Arm faults."""
        if faults:
            self._ask("inject", faults=[str(fault) for fault in faults])

    def faults(self) -> tuple[InjectedFault, ...]:
        """Return the faults that can still strike."""
        return tuple(map(parse_fault, self._ask("faults")["faults"]))

    def clear(self) -> None:
        """End every fault; destroyed files stay destroyed, and power that is off stays off."""
        self._ask("clear")

    def power_on(self) -> None:
        """Restore the power of a device that was cut off with `off=inf`."""
        self._ask("power-on")

    def events(self) -> tuple[LoggedEvent, ...]:
        """Return the device's events, oldest first, whether or not it runs."""
        return read_events(self.folder)

    def heat(self, **changes: float) -> HeatReading | None:
        """Change settings of the heat model, and read it; `None` while it is off.

        Args:
            changes: fields of `HeatSettings`, `temperature_c` (of SoC and body) and `battery` (0
                to 1). The first change switches the model on.
        """
        check_changes(changes)
        reading = self._ask("heat", changes=changes)["reading"]
        return None if reading is None else HeatReading(**reading)

    def heat_off(self) -> None:
        """Switch the heat model off; thermal zones, clocks and the battery vanish."""
        self._ask("heat-off")

    def _ask(self, command: str, **arguments: object) -> Answer:
        return ask(self.name, self.folder, {"do": command, **arguments})


@dataclass(frozen=True, slots=True)
class ControlHandler:
    """The device's side: carries out the commands of `DeviceControl`."""

    injector: "Injector"
    heat: HeatSimulation
    power: PowerQueue

    def handle(self, request: Mapping[str, Any]) -> Answer:
        """Carry out one command."""
        match request.get("do"):
            case "inject":
                for fault in [parse_fault(str(text)) for text in request["faults"]]:
                    self.injector.arm(fault)
            case "faults":
                return {"faults": [str(fault) for fault in self.injector.faults]}
            case "clear":
                self.injector.clear()
            case "heat":
                return self._heat(dict(request["changes"]))
            case "heat-off":
                self.heat.switch_off()
            case "power-on":
                self.power.put(PowerCommand(PowerAction.RESTORE))
            case _:
                raise ValueError("a command of another version of qnnfarm")
        return {}

    def _heat(self, changes: dict[str, Any]) -> Answer:
        if not all(type(value) in {float, int, bool} for value in changes.values()):
            raise ValueError("heat settings are numbers")
        reading = self.heat.change(changes) if changes else self.heat.reading()
        return {"reading": asdict(reading) if reading else None}


def open_control(folder: Path) -> socket.socket:
    """Return a listening socket in a device's folder, for its user alone; the caller closes it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _socket_path(folder) as name:
            Path(name).unlink(missing_ok=True)
            os.fchmod(listener.fileno(), 0o600)  # bind gives the file this mode, less the umask
            listener.bind(name)
            Path(name).chmod(0o600)
        listener.listen()
        listener.setblocking(False)  # noqa: FBT003 - the standard library's signature
    except OSError:
        listener.close()
        raise
    return listener


async def serve_control(listener: socket.socket, handle: Handler) -> asyncio.AbstractServer:
    """Start to answer commands; the server owns the socket."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not _is_outside(writer.get_extra_info("socket")):
                return
            line = await asyncio.wait_for(reader.readline(), _TIMEOUT_S)
            writer.write(json.dumps(_handle(handle, line)).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, TimeoutError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    options: dict[str, Any] = {}
    if sys.version_info >= (3, 13):  # it would look for the name of `_socket_path`, which is over
        options["cleanup_socket"] = False
    return await asyncio.start_unix_server(answer, sock=listener, limit=_MAX_LINE, **options)


def ask(name: str, folder: Path, request: Mapping[str, Any]) -> Answer:
    """Send a command to the device in `folder` and wait for its answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            with _socket_path(folder) as path:
                connection.connect(path)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline(_MAX_LINE)
        answer: Any = json.loads(line)
    except (FileNotFoundError, ConnectionError):
        raise VirtualDeviceError(
            f"virtual device {name}: it does not run: start it first"
        ) from None
    except (OSError, RecursionError, ValueError) as error:
        reason = f"its process does not answer ({error}): stop and start it"
        raise VirtualDeviceError(f"virtual device {name}: {reason}") from None
    if not isinstance(answer, dict) or "error" in answer:
        reason = str(answer["error"]) if isinstance(answer, dict) else "its answer is garbage"
        raise VirtualDeviceError(f"virtual device {name}: {reason}")
    return answer


def _handle(handle: Handler, line: bytes) -> Answer:
    try:
        request: Any = json.loads(line)
        if not isinstance(request, dict):
            return {"error": "not a command"}
        return handle(request)
    except (HarnessError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        return {"error": str(error) or type(error).__name__}


def _is_outside(connection: socket.socket) -> bool:
    """Check that the peer is of this user or root, and is neither this process nor below it."""
    # A peer outside our PID namespace has pid 0 here. No process of a confined device is root's.
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(credentials)
    if uid not in {0, os.geteuid()}:
        return False
    while pid > 0:
        process = None if pid == os.getpid() else process_stat(pid)
        if process is None:
            return False
        pid = process.parent
    return True


@contextlib.contextmanager
def _socket_path(folder: Path) -> Iterator[str]:
    """Yield a path to the socket that fits into an address (108 bytes), in any folder."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{CONTROL_NAME}"
    finally:
        os.close(descriptor)
