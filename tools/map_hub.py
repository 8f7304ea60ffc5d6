"""Finds which phone of this host is on which port of a USB hub: `python -m tools.map_hub`.

    python -m tools.map_hub [--pool FILE] [--hub LOCATION] [--wait SECONDS]

A hub can claim to switch its ports and not do it, or switch several at once. So a mapping is found
by trying: a port goes off, and the phone that disappears from the adb server is the one on it. Only
phones that nobody holds lose their power: they are leased meanwhile. What is found is printed as
the key `hubs` of a `pool.yaml`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.devices.adb.client import AdbServer
from harness.devices.adb.server import ensure_server
from harness.errors import HarnessError, LeaseTimeoutError, PoolError, RequirementError, one_line
from harness.pool.config import HubPort
from harness.pool.hubs import HubStatus, PortStatus, Uhubctl
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from harness.pool.states import MemberState
from harness.pool.status import MemberStatus, OnProgress

_SWITCHES = "ppps"
_WHY_NOT = {"ganged": "it switches all its ports together (ganged)", "nops": "it switches no power"}
_POLL_S = 0.2
_TOGETHER_S = 1.0
"""Seconds that others may take to disappear after the first one."""


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
            PoolError: a device did not come back.
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
        self.on_progress(f"{port}: off; the device on it disappears")
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
            self.on_progress(f"{port}: no device disappeared")
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
            raise PoolError(f"{lost} did not come back {self.back_s:g} s after {port} was on again")
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
    pool: Pool,
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
        PoolError: there is no such hub, it cannot be switched, or a device is not free that might
            be switched.
    """
    known = {hub.location for hub in Uhubctl().list()}  # before anybody waits for devices
    if strange := sorted(set(locations) - known):
        raise PoolError(f"there is no hub {strange[0]}, but {', '.join(sorted(known))}")
    with _leased(pool, on_progress, wait_s) as names:
        present = {entry.serial for entry in server.devices() if entry.usable}
        if locations and (others := sorted(present - names.keys())):
            raise PoolError(
                f"{', '.join(others)} might lose power, and this does not hold it: free it, or "
                "leave --hub out"
            )
        here = {serial: name for serial, name in names.items() if serial in present}
        if not here:
            raise PoolError("no device of the pool is free and at this host's adb server")
        mapper = HubMapper(server, here, on_progress)
        mapper.run(locations)
        for name in here.values():
            if name not in mapper.mapped:
                on_progress(f"{name} is on no port that was switched")
        return mapper.mapped


@contextmanager
def _leased(pool: Pool, on_progress: OnProgress, wait_s: float) -> Iterator[dict[str, str]]:
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
def _lease(pool: Pool, member: MemberStatus, wait_s: float) -> Iterator[None]:
    held = member.state is MemberState.LEASED
    requirement = Requirement(name=member.name)
    with pool.acquire(requirement, timeout_s=wait_s if held else 0.0, purpose="mapping hubs"):
        yield


def main(arguments: list[str] | None = None) -> int:
    """Print the ports; return 1 if none was found, 2 if a hub or a device cannot be used."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--pool", type=Path, help="pool.yaml, as for `qnnfarm pool`")
    parser.add_argument(
        "--hub", action="append", default=[], help="try all ports in use of the hub at a location"
    )
    parser.add_argument("--wait", type=float, default=0.0, help="seconds, for devices in use")
    options = parser.parse_args(arguments)

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    try:
        with Pool.open(options.pool, on_progress=tell) as pool:
            server = ensure_server()
            ports = map_hub_ports(pool, server, tell, locations=options.hub, wait_s=options.wait)
    except HarnessError as error:
        tell(f"error: {one_line(str(error))}")
        return 2
    if ports:
        print("hubs:")
    else:
        tell("no port was found: a device whose hub cannot be switched needs a `power_cycle`")
    for name, port in sorted(ports.items()):
        print(f"  {json.dumps(name)}: {{hub: {json.dumps(port.hub)}, port: {port.port}}}")
    return 0 if ports else 1


if __name__ == "__main__":
    sys.exit(main())
