"""Virtual devices as a type of device, registered in the entry-point group of device types."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from buildlib.toolchains.base import host_fault
from harness.devices.device import Device
from harness.devices.spec import DeviceSpec, DeviceType, Preview, State
from harness.errors import (
    DeviceConnectError,
    DeviceUnauthorizedError,
    HarnessError,
    UnknownVirtualDeviceError,
    VirtualDeviceConfinementError,
    VirtualDeviceError,
)
from plugins.virtual_android.namespace import probe_namespace

if TYPE_CHECKING:
    from harness.devices.adb.client import AdbServer
    from harness.devices.devices import Devices
    from plugins.virtual_android.manager import VirtualDevice


class VirtualType(DeviceType):
    """Virtual Android devices of this user, opened by name."""

    identifier = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
    identifier_form = "a name of up to 40 letters, digits, '-' and '_'"
    emulated = True

    def open(self, devices: "Devices", spec: DeviceSpec, *, start: bool, soc: str | None) -> Device:
        """Connect the adb server to a device, which is started or made if `start` says so.

        Raises:
            UnknownVirtualDeviceError: there is none of that name, and it cannot be made.
            VirtualDeviceError: it has another SoC.
            DeviceConnectError: it does not run.
        """
        from harness.devices.adb.transport import AdbTransport
        from plugins.virtual_android import manager

        name, server = spec.identifier, devices.adb_server()
        try:
            device = manager.get(name)
        except UnknownVirtualDeviceError:
            if soc is None or not start:
                raise
            device = manager.start(name, soc)
        if soc is not None and device.soc != soc:
            raise manager.mismatch_error(name, "SoC", device.soc, soc)
        if device.state != "running":
            if not start:
                raise _not_running(spec, device.state)
            device = manager.start(name, device.soc)
        if server.state(device.serial) != "device":
            connect(server, device)
        return Device(AdbTransport(server, device.serial, shown=str(spec), type="virtual"))

    def check(self, devices: "Devices", spec: DeviceSpec) -> None:  # noqa: ARG002
        """Raise if there is no virtual device of that name, or it does not run.

        Commands neither start nor stop a device by themselves; only pools do.
        """
        from plugins.virtual_android import manager

        state = manager.get(spec.identifier).state
        if state != "running":
            raise _not_running(spec, state)

    def discover(self, devices: "Devices", host: str | None) -> Sequence[DeviceSpec]:  # noqa: ARG002
        """List the virtual devices of this user."""
        return self.on_record()

    def on_record(self) -> Sequence[DeviceSpec]:
        """List the virtual devices of this user."""
        from plugins.virtual_android import manager

        return [DeviceSpec("virtual", device.name) for device in manager.list_devices()]

    def examine_host(self) -> tuple[State, str, str] | None:
        """Tell whether devices can be confined here; None where they cannot run at all."""
        if host_fault():
            return None
        from plugins.virtual_android.manager import list_devices

        support = probe_namespace()
        if support.kind == "none":
            advice = (
                "`qnnfarm device start NAME --unconfined` starts one whose shell may do here all "
                "that you may, and has $TMPDIR for /data/local/tmp"
            )
            return "note", f"no namespace: {support.reason}", advice
        detail = f"confined to their own files, processes and network ({support.kind} namespace)"
        unconfined = [d.name for d in list_devices() if d.state == "running" and not d.confined]
        if unconfined:
            return "note", f"{detail}, but unconfined by choice: {', '.join(unconfined)}", ""
        return "ok", detail, ""

    def preview(self, spec: DeviceSpec) -> Preview:
        """Read the device's record."""
        from plugins.virtual_android import manager

        try:
            device = manager.get(spec.identifier)
        except UnknownVirtualDeviceError:
            return Preview(exists=False, obstacle="not there", adb_serial="")
        except VirtualDeviceError:
            return Preview(exists=False, obstacle="damaged", adb_serial="")
        obstacle = "" if device.state == "running" else device.state
        remark = "" if obstacle or device.confined else unconfined_remark(device.name)
        return Preview(
            exists=True,
            obstacle=obstacle,
            soc=device.soc,
            adb_serial=device.serial,
            remark=remark,
        )

    def power_cycle(self, spec: DeviceSpec) -> None:
        """Stop the device and start it again."""
        from plugins.virtual_android import manager

        device = manager.stop(spec.identifier)
        manager.start(device.name, device.soc)

    @contextmanager
    def running(
        self, name: str, soc: str, server: "AdbServer", tell: Callable[[str], None]
    ) -> Iterator[str]:
        """See `DeviceType.running`; where there is no namespace it runs unconfined."""
        from plugins.virtual_android import manager

        serial = ""
        try:
            try:
                device = manager.start(name, soc, unconfined=False)
            except VirtualDeviceConfinementError as error:
                tell(f"no namespace here ({error.reason}): {name} runs unconfined")
                device = manager.start(name, soc, unconfined=True)
            serial = device.serial
            connect(server, device)
            yield serial
        finally:
            with suppress(HarnessError):
                if serial:
                    server.disconnect(serial)
            with suppress(HarnessError):
                manager.stop(name)


def unconfined_remark(name: str) -> str:
    """Warn that a virtual device is not confined."""
    return f"virtual:{name} is unconfined: its shell may do on this host all that you may"


def connect(server: "AdbServer", device: "VirtualDevice") -> None:
    """Make an adb server connect to a device that runs."""
    try:
        server.connect(device.serial)
    except DeviceUnauthorizedError:
        whose = server.owner or "you"
        advice = (
            f"the server at {server.shown} was started by {whose} with a key that the device does "
            f"not know; copy its `adbkey.pub` (it lies in ~/.android of {whose}), then "
            f"`qnnfarm device stop {device.name}` and `ADB_VENDOR_KEYS=COPY qnnfarm device start "
            f"{device.name}`, where COPY is the name of that file without `.pub`"
        )
        raise DeviceUnauthorizedError(device.serial, advice) from None


def _not_running(spec: DeviceSpec, state: str) -> HarnessError:
    start = f"`qnnfarm device start {spec.identifier}` starts it"
    return DeviceConnectError(str(spec), f"it is {state}; {start}")


VIRTUAL = VirtualType()
