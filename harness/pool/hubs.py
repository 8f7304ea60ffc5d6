"""USB hubs that switch the power of single ports, by `uhubctl`."""

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.errors import PoolError
from harness.pool.config import HubPort
from harness.pool.programs import run_program

_PROGRAM = "uhubctl"
_HUB = re.compile(r"Current status for hub ([0-9][0-9.-]{0,40}) \[([^\n]{0,400})\]\s{0,9}")
_PORT = re.compile(
    r"\s{0,9}Port ([0-9]{1,3}): [0-9a-fA-F]{4}([A-Za-z0-9. ]{0,200})(?:\[([^\n]{0,400})\])?\s{0,9}"
)
_MOST_OUTPUT = 1 << 20
_TIMEOUT_S = 30.0
_OFF_S = 5


@dataclass(frozen=True, slots=True)
class PortStatus:
    """A port as `uhubctl` lists it.

    Attributes:
        description: of the device on it, mostly with its serial; empty if none is connected.
    """

    port: HubPort
    connected: bool
    description: str = ""


@dataclass(frozen=True, slots=True)
class HubStatus:
    """A hub; `kind` is `ppps` if each port is switched by itself, `ganged` or `nops`."""

    location: str
    kind: str
    ports: tuple[PortStatus, ...]


def parse_hubs(output: str) -> list[HubStatus]:
    r"""Read the output of `uhubctl`.

    >>> parse_hubs(
    ...     "Current status for hub 1-1 [2109:2813 VIA, USB 2.10, 4 ports, ppps]\n"
    ...     "  Port 2: 0503 power highspeed enable connect [18d1:4ee7 Google Pixel 9 R5CX12]\n"
    ... )[0].ports[0].description
    '18d1:4ee7 Google Pixel 9 R5CX12'
    """
    hubs: list[tuple[str, str, list[PortStatus]]] = []
    for line in output[:_MOST_OUTPUT].splitlines():
        if hub := _HUB.fullmatch(line):
            hubs.append((hub[1], hub[2].rpartition(",")[2].strip(), []))
        elif hubs and (match := _PORT.fullmatch(line)) and 1 <= int(match[1]) <= 255:
            location, _, ports = hubs[-1]
            port = HubPort(hub=location, port=int(match[1]))
            ports.append(PortStatus(port, "connect" in match[2].split(), match[3] or ""))
    return [HubStatus(location, kind, tuple(ports)) for location, kind, ports in hubs]


class Uhubctl:
    """The program; all methods raise `PoolError` if it cannot be run, or fails."""

    def list(self) -> Sequence[HubStatus]:
        """List all hubs, also those that cannot switch."""
        hubs = parse_hubs(self._run("-f"))
        if not hubs:
            raise PoolError("uhubctl finds no USB hub")
        return hubs

    def switch(self, port: HubPort, action: Literal["off", "on"]) -> None:
        """Switch the power of a port."""
        self._run("-l", port.hub, "-p", str(port.port), "-a", action)

    def cycle(self, port: HubPort, timeout_s: float) -> None:
        """Switch a port off, and on again after some seconds."""
        words = ("-l", port.hub, "-p", str(port.port), "-a", "cycle", "-d", str(_OFF_S))
        self._run(*words, timeout_s=timeout_s)

    def _run(self, *words: str, timeout_s: float = _TIMEOUT_S) -> str:
        try:
            return run_program([_PROGRAM, *words], timeout_s)
        except PoolError as error:
            hint = "" if shutil.which(_PROGRAM) else ": install it (https://github.com/mvp/uhubctl)"
            raise PoolError(f"{error}{hint}") from None


def cycle_power(port: HubPort, serial: str, others: Iterable[str], timeout_s: float) -> None:
    """Switch a device's port off and on, unless another device was plugged in there since.

    Args:
        others: serials of other devices, of which none may lose its power.
    """
    uhubctl = Uhubctl()
    status = next((one for hub in uhubctl.list() for one in hub.ports if one.port == port), None)
    if status is None:
        raise PoolError(f"there is no {port}: `python -m tools.map_hub` finds where it is now")
    stranger = next((other for other in others if other in status.description.split()), None)
    if stranger is not None and stranger != serial:
        raise PoolError(f"{port} has {stranger} now: `python -m tools.map_hub` finds where it is")
    uhubctl.cycle(port, timeout_s)
