"""Opener that discovers and opens the devices of a pool, and prober that identifies them."""

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

from harness.deploy.scripts import action_named
from harness.devices.base import USB_PORT
from harness.devices.device import Device
from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec, device_types
from harness.errors import HarnessError, PoolError, one_line
from harness.pool.config import DeviceEntry, HostConfig, PoolConfig
from harness.pool.ledger import Ledger
from harness.pool.members import Member, Members
from harness.pool.records import Facts

_SERIAL = re.compile(r"[A-Za-z0-9._:-]{4,64}")
_PLACEHOLDER_SERIALS = {"unknown", "0123456789ABCDEF", "0123456789abcdef", "00000000", "12345678"}
_BY_HARDWARE = "hardware:"
_RESTART_S = 60.0
_SLOW_S = 2.0
_ANSWER_S = 30.0
_MAX_THREADS = 16
_MAX_NAMES = 6


@dataclass(frozen=True, slots=True)
class ReachedDevice:
    """A device that answered.

    Attributes:
        key: its key in the ledger, which stays when its address changes.
    """

    key: str
    device: Device
    facts: Facts


def devices_of(config: PoolConfig) -> Devices:
    """Make the connections to adb servers and hosts that a configuration describes."""
    return Devices(
        adb_ports={name: host.adb_port for name, host in config.hosts.items() if host.adb_port},
        trusted_users=config.adb_server.trusted_users,
    )


class Opener:
    """Discovers and opens devices of every type, with the hosts of a configuration."""

    def __init__(self, config: PoolConfig, devices: Devices | None = None) -> None:
        """Create an opener without connections.

        Args:
            devices: connections to use as well; closed with this.
        """
        self._config = config
        self._devices = devices or devices_of(config)

    def discover(self, entry: DeviceEntry) -> Sequence[DeviceSpec]:
        """Return the devices that an entry of the configuration stands for now."""
        name = "android" if entry.discover == "adb" else str(entry.discover)
        return device_types()[name].discover(self._devices, entry.host)

    def open(self, member: Member) -> Device:
        """Open a device; it need not answer yet."""
        return self._devices.open(member.spec, start=True, soc=member.soc)

    def forget(self, member: Member) -> None:
        """Forget the connection to a device, so that it is opened again."""
        self._devices.forget(member.spec)

    def restart_server(self, member: Member) -> None:
        """Restart the adb server of a device's host, if it is ours."""
        name = member.spec.host if member.spec.type == "android" else None
        if name is None:
            raise PoolError("not taken: it hangs on no adb server")
        host = self._config.hosts.get(name, HostConfig())
        if not host.adb_server_ours:
            raise PoolError("not taken: the configuration does not say that it is ours")
        port = self._devices.hosts().adb(name).port
        shell_host = self._devices.open(DeviceSpec("linux", name))
        for action in ("kill-server", "start-server"):
            shell_host.shell(["adb", "-P", str(port), action], timeout_s=_RESTART_S)

    def close(self) -> None:
        """Close all connections."""
        self._devices.close()


def identify(member: Member, device: Device, ledger: Ledger, *, timeout_s: float) -> ReachedDevice:
    """Ask a device for its identity and its facts."""
    with action_named("asking it who it is"):
        properties = device.properties(timeout_s=timeout_s)
    serial = properties.hardware_serial
    unique = _SERIAL.fullmatch(serial) and serial not in _PLACEHOLDER_SERIALS
    # Devices at USB ports are named so because they share a serial.
    unique = unique and not member.spec.serial.startswith(USB_PORT)
    key = f"{_BY_HARDWARE}{serial}" if unique else ledger.address(str(member.spec))
    facts = Facts(properties.soc, properties.hexagon or "", properties.free_bytes)
    return ReachedDevice(key, device, facts)


class Prober:
    """Identifies devices, and records their answers.

    Args:
        on_progress: called with the names of slow devices, once probing takes two seconds.
    """

    def __init__(
        self,
        members: Members,
        ledger: Ledger,
        opener: Opener,
        on_progress: Callable[[str], None],
    ) -> None:
        self._members = members
        self._ledger = ledger
        self._opener = opener
        self._on_progress = on_progress
        self._keys: dict[str, str] = {}
        self._lock = threading.Lock()

    def probe(self, members: Sequence[Member]) -> None:
        """Ask each device; one that does not answer is absent."""
        if not members:
            return
        with ThreadPoolExecutor(min(len(members), _MAX_THREADS)) as threads:
            keys = {member.name: threads.submit(self._probe_one, member) for member in members}
            try:
                wait(keys.values(), timeout=_SLOW_S)
                if slow := [name for name, key in keys.items() if not key.done()]:
                    self._on_progress(_slow_notice(slow))
                for name, key in keys.items():
                    self._members.set_key(name, key.result())
            finally:  # after Ctrl-C, devices that were not asked yet stay unasked
                threads.shutdown(wait=False, cancel_futures=True)

    def _probe_one(self, member: Member) -> str:
        """Probe a device and return its key in the ledger."""
        spec = str(member.spec)
        try:
            device = self._opener.open(member)
            reached = identify(member, device, self._ledger, timeout_s=_ANSWER_S)
            twin = self._twin_of(member, reached)
        except HarnessError as error:
            return self._ledger.record_absent(member.name, spec, one_line(str(error)))
        if twin is None:
            self._ledger.record_found(reached.key, member.name, spec, reached.facts)
            return reached.key
        if self._members.key_of(member.name) == reached.key:  # which is the twin's alone
            self._ledger.record_found(self._ledger.address(spec), member.name, spec, reached.facts)
        serial = reached.key.removeprefix(_BY_HARDWARE)
        reason = (
            f"its serial number {serial} is also that of {twin.name}, so a lease cannot tell them "
            "apart: name phones on USB by their port (`usb:1-4`), or give one another number"
        )
        return self._ledger.record_absent(member.name, spec, one_line(reason))

    def _twin_of(self, member: Member, reached: ReachedDevice) -> Member | None:
        """Return another device of the pool with the same serial number; the first one keeps it."""
        with self._lock:
            self._keys[member.name] = reached.key
            keys = dict(self._keys)
        if not reached.key.startswith(_BY_HARDWARE):
            return None
        first = self._members.key_of(member.name) == reached.key
        for name, other in self._members.by_name.items():
            key = self._members.key_of(name)
            key = key if first else keys.get(name, key)
            if name == member.name or key != reached.key:
                continue
            with suppress(HarnessError):  # it is not there, so this may be the same one
                device = self._opener.open(other)  # one with two addresses has booted once
                same = identify(other, device, self._ledger, timeout_s=_ANSWER_S).key == reached.key
                boots = {end.boot_id(timeout_s=_ANSWER_S) for end in (device, reached.device)}
                if same and len(boots) > 1:
                    return other
        return None


def _slow_notice(slow: Sequence[str]) -> str:
    names = ", ".join(one_line(name, 80) for name in slow[:_MAX_NAMES])
    more = f" and {len(slow) - _MAX_NAMES} more" if len(slow) > _MAX_NAMES else ""
    return f"looking for {names}{more}: a device has {_ANSWER_S:g} s to answer"
