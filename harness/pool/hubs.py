"""USB hubs that switch the power of single ports, by `uhubctl`: which device is on which port.

A hub can claim to switch its ports and not do it, or switch several at once. So a mapping is found
by trying: a port goes off, and the device that disappears from the adb server is the one on it.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from buildlib.files import atomic_write_bytes
from harness.devices.adb.client import AdbServer
from harness.errors import (
    HubError,
    LeaseTimeoutError,
    PoolConfigError,
    RequirementError,
    one_line,
)
from harness.pool.config import HubPort, load_config, parse_config
from harness.pool.programs import ProgramError, run_program
from harness.pool.requirement import Requirement
from harness.pool.states import MemberState
from harness.pool.status import OnProgress

if TYPE_CHECKING:
    from harness.pool.pool import Pool
    from harness.pool.status import MemberStatus

_PROGRAM = "uhubctl"
_SWITCHES = "ppps"
_WHY_NOT = {"ganged": "it switches all its ports together (ganged)", "nops": "it switches no power"}
_HUB = re.compile(r"Current status for hub ([0-9][0-9.-]{0,40}) \[([^\n]{0,400})\]\s{0,9}")
_PORT = re.compile(
    r"\s{0,9}Port ([0-9]{1,3}): [0-9a-fA-F]{4}([A-Za-z0-9. ]{0,200})(?:\[([^\n]{0,400})\])?\s{0,9}"
)
_KEY = re.compile(r"""(hubs|"hubs"|'hubs')\s*:""")
_MOST_OUTPUT = 1 << 20
_TIMEOUT_S = 30.0
_OFF_S = 5
_POLL_S = 0.2
_TOGETHER_S = 1.0
"""Seconds that others may take to disappear after the first one."""


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
    r"""Read what `uhubctl` lists.

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
        elif hubs and (found := _PORT.fullmatch(line)) and 1 <= int(found[1]) <= 255:
            location, _, ports = hubs[-1]
            port = HubPort(hub=location, port=int(found[1]))
            ports.append(PortStatus(port, "connect" in found[2].split(), found[3] or ""))
    return [HubStatus(location, kind, tuple(ports)) for location, kind, ports in hubs]


class Uhubctl:
    """The program; all methods raise `HubError` if it cannot be run, or fails."""

    def list(self) -> Sequence[HubStatus]:
        """List all hubs, also those that cannot switch."""
        hubs = parse_hubs(self._run("-f"))
        if not hubs:
            raise HubError("uhubctl finds no USB hub")
        return hubs

    def switch(self, port: HubPort, action: Literal["off", "on"]) -> None:
        """Switch the power of a port."""
        self._run("-l", port.hub, "-p", str(port.port), "-a", action)

    def cycle(self, port: HubPort, timeout_s: float = _TIMEOUT_S) -> None:
        """Switch a port off, and on again after some seconds."""
        words = ("-l", port.hub, "-p", str(port.port), "-a", "cycle", "-d", str(_OFF_S))
        self._run(*words, timeout_s=timeout_s)

    def _run(self, *words: str, timeout_s: float = _TIMEOUT_S) -> str:
        try:
            return run_program([_PROGRAM, *words], timeout_s)
        except ProgramError as error:
            hint = "" if shutil.which(_PROGRAM) else ": install it (https://github.com/mvp/uhubctl)"
            raise HubError(f"{error}{hint}") from None


def cycle_power(port: HubPort, serial: str, others: Iterable[str], timeout_s: float) -> None:
    """Switch a device's port off and on, unless another device was plugged in there since.

    Args:
        others: serials of other devices, of which none may lose its power.

    Raises:
        HubError: the port is not there, has another device, or cannot be switched.
    """
    uhubctl = Uhubctl()
    found = [each for hub in uhubctl.list() for each in hub.ports if each.port == port]
    if not found:
        raise HubError(f"there is no {port}: `qnnfarm pool map-hub` finds where it is now")
    stranger = next((other for other in others if other in found[0].description.split()), None)
    if stranger is not None and stranger != serial:
        raise HubError(f"{port} has {stranger} now: `qnnfarm pool map-hub` finds where it is")
    uhubctl.cycle(port, timeout_s)


@dataclass(slots=True)
class HubMapper:
    """Finds the ports of devices by switching ports, one at a time.

    Attributes:
        names: of the devices that may lose their power, by serial.
        gone_s: how long a device may take to disappear.
        back_s: how long it may take to come back.
        mapped: the ports that were found, by name.
    """

    server: AdbServer
    names: Mapping[str, str]
    on_progress: OnProgress
    uhubctl: Uhubctl = field(default_factory=Uhubctl)
    gone_s: float = 10.0
    back_s: float = 60.0
    mapped: dict[str, HubPort] = field(default_factory=dict)

    def run(self, locations: Collection[str] = ()) -> None:
        """Switch the ports that name one of the devices, or all in use of the hubs at `locations`.

        Raises:
            HubError: a device did not come back.
        """
        hubs = self.uhubctl.list()
        for hub in hubs:
            ports = [port for port in hub.ports if self._may_switch(hub, port, locations)]
            if ports and hub.kind != _SWITCHES:
                reason = _WHY_NOT.get(hub.kind, "it cannot switch single ports")
                told = ", ".join(filter(None, map(self._named, ports)))
                self.on_progress(
                    f"hub {hub.location}: {reason}{f', so not {told}' if told else ''}"
                )
                continue
            for port in ports:
                if not self._try(port):
                    break

    def _may_switch(self, hub: HubStatus, port: PortStatus, locations: Collection[str]) -> bool:
        if not port.connected:
            return False
        return hub.location in locations if locations else bool(self._named(port))

    def _named(self, port: PortStatus) -> str:
        """Return the device that a port's description names; empty if it names none."""
        words = port.description.split()
        return next((name for serial, name in self.names.items() if serial in words), "")

    def _try(self, status: PortStatus) -> bool:
        """Switch one port; return whether the hub's other ports are worth trying."""
        port = status.port
        self.on_progress(f"{port}: off, to see who goes")
        gone = self._switch_off_and_on(port)
        names = sorted(self.names.get(serial, serial) for serial in gone)
        if len(names) == 1 and gone <= self.names.keys():
            self.mapped[names[0]] = port
            self.on_progress(f"{port}: {names[0]} went and came back")
        elif names:
            self.on_progress(f"{port}: {' and '.join(names)} went together: the hub is ganged")
            return False
        elif named := self._named(status):
            self.on_progress(f"{port}: {named} stayed: the hub does not cut the power")
        else:
            self.on_progress(f"{port}: nobody went")
        return True

    def _switch_off_and_on(self, port: HubPort) -> frozenset[str]:
        """Return the serials that disappeared meanwhile; all of them are back."""
        before = self._present()
        gone: frozenset[str] = frozenset()
        try:
            self.uhubctl.switch(port, "off")
            if self._wait(lambda: not before <= self._present(), self.gone_s):
                time.sleep(_TOGETHER_S)
                gone = before - self._present()
        finally:
            self.uhubctl.switch(port, "on")
        if not self._wait(lambda: gone <= self._present(), self.back_s):
            lost = " and ".join(sorted(gone - self._present()))
            raise HubError(f"{lost} did not come back {self.back_s:g} s after {port} was on again")
        return gone

    def _present(self) -> frozenset[str]:
        return frozenset(entry.serial for entry in self.server.devices() if entry.usable)

    @staticmethod
    def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True


def map_hub_ports(
    pool: "Pool",
    server: AdbServer,
    on_progress: OnProgress,
    *,
    locations: Collection[str] = (),
    wait_s: float = 0.0,
) -> dict[str, HubPort]:
    """Find the hub port of each Android device of this host, under a lease of each.

    Args:
        locations: hubs whose ports are all tried, whatever they say of the devices on them; only
            while no other device of the adb server could lose its power.
        wait_s: how long to wait for each device that somebody holds.

    Raises:
        HubError: there is no such hub, it cannot be switched, or a device is not free that might
            be switched.
    """
    known = {hub.location for hub in Uhubctl().list()}  # before anybody waits for devices
    if strange := sorted(set(locations) - known):
        raise HubError(f"there is no hub {strange[0]}, but {', '.join(sorted(known))}")
    with _leased(pool, on_progress, wait_s) as names:
        present = {entry.serial for entry in server.devices() if entry.usable}
        if locations and (others := sorted(present - names.keys())):
            raise HubError(
                f"{', '.join(others)} might lose power, and map-hub does not hold it: free it, or "
                "leave --hub out"
            )
        here = {serial: name for serial, name in names.items() if serial in present}
        if not here:
            raise HubError("no device of the pool is free and at this host's adb server")
        mapper = HubMapper(server, here, on_progress)
        mapper.run(locations)
        for name in here.values():
            if name not in mapper.mapped:
                on_progress(f"{name} is on no port that was switched")
        return mapper.mapped


@contextmanager
def _leased(pool: "Pool", on_progress: OnProgress, wait_s: float) -> Iterator[dict[str, str]]:
    """Lease what is free of the Android devices of this host: their names by serial."""
    members = [m for m in pool.members() if m.spec.type == "android" and m.spec.host is None]
    with ExitStack() as leases:
        names = {}
        for member in members:
            try:
                leases.enter_context(_lease(pool, member, wait_s))
            except (LeaseTimeoutError, RequirementError) as error:
                on_progress(f"{member.name} is left out: {one_line(error.reason)}")
            else:
                names[member.spec.serial] = member.name
        yield names


@contextmanager
def _lease(pool: "Pool", member: "MemberStatus", wait_s: float) -> Iterator[None]:
    held = member.state is MemberState.LEASED
    requirement = Requirement(name=member.name)
    with pool.acquire(requirement, timeout_s=wait_s if held else 0.0, purpose="mapping hubs"):
        yield


def as_yaml(hubs: Mapping[str, HubPort]) -> str:
    """Format ports as the key `hubs` of a `pool.yaml`."""
    lines = (
        f"  {json.dumps(name)}: {{hub: {json.dumps(port.hub)}, port: {port.port}}}\n"
        for name, port in sorted(hubs.items())
    )
    return "hubs:\n" + "".join(lines)


def write_hubs(path: Path, found: Mapping[str, HubPort]) -> None:
    """Write ports into a `pool.yaml`, in place of its key `hubs`; all else stays as it is.

    What is known of devices that were not found now stays, unless another device has their port.

    Raises:
        PoolConfigError: the file cannot be read, or has a form in which this would break it.
        OSError: it cannot be written.
    """
    known = load_config(path).hubs
    kept = {name: port for name, port in known.items() if port not in found.values()}
    wanted = {**kept, **found}
    text = _replace_hubs(path.read_text(encoding="utf-8"), as_yaml(wanted))
    if parse_config(text, str(path)).hubs != wanted:
        raise PoolConfigError(str(path), None, "hubs", "it is not a block of lines: write it there")
    atomic_write_bytes(path, text.encode())


def _replace_hubs(text: str, block: str) -> str:
    lines = text.splitlines(keepends=True)
    start = next((n for n, line in enumerate(lines) if _KEY.match(line)), None)
    if start is None:
        end = "" if text.endswith("\n") or not text else "\n"
        return f"{text}{end}{block}"
    rest = lines[start + 1 :]
    inside = next((n for n, line in enumerate(rest) if line[:1] not in " \t\r\n"), len(rest))
    return "".join([*lines[:start], block, *rest[inside:]])
