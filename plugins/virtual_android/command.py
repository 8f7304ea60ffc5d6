"""`qnnfarm device`: virtual Android devices, each its own process behind the real adb server."""

import os
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from harness.cli.arguments import Json
from harness.cli.completion import complete_socs, offering
from harness.console import answers, print_json, print_remark, print_rows
from harness.devices.adb.connection import ServerAddress, address_from
from harness.devices.adb.server import ensure_server, resolve_server
from harness.devices.spec import DeviceSpec
from harness.errors import AdbServerError, PoolError, WrongUseError
from plugins.virtual_android import manager
from plugins.virtual_android.device_type import connect, unconfined_remark
from plugins.virtual_android.events import LoggedEvent
from plugins.virtual_android.faults import parse_fault

app = typer.Typer(
    help="Virtual Android devices: start, list, stop and remove them, make them fail or hot.",
    no_args_is_help=True,
)

_complete = offering(lambda: [(one.name, one.state) for one in manager.list_devices()])
Name = Annotated[
    str,
    typer.Argument(help="Name of the virtual device, e.g. `alpha`.", autocompletion=_complete),
]


@app.command("start")
def start(
    name: Name,
    soc: Annotated[
        str, typer.Option(help="SoC it represents, e.g. SM8750.", autocompletion=complete_socs)
    ] = "SM8750",
    fault: Annotated[
        list[str] | None, typer.Option(help="Fault to inject, e.g. `drop:bytes=100000`.")
    ] = None,
    unconfined: Annotated[
        bool | None,
        typer.Option(
            "--unconfined/--confined",
            help="Let its shell do on this host all that you may; by default it sees its own files "
            "alone.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Start a virtual device and connect it to the adb server; the last line is its serial.

    Example: qnnfarm device start alpha --soc SM8750
    """
    faults = [parse_fault(text) for text in fault or []]
    from harness.pool.pool import trusted_users  # as slow to import as all the rest, for `ls`

    server = ensure_server(trusted_users=trusted_users())
    virtual = manager.start(name, soc, unconfined=unconfined, faults=faults)
    connect(server, virtual)
    if json:
        print_json(_fields(virtual) | {"started": virtual.just_started})
        return
    label = f"{virtual.name} ({virtual.soc})"
    what = f"started {label}" if virtual.just_started else f"{label} is already running"
    print_remark(f"{what}, files in {virtual.root}")
    if address_from(os.environ) != server.address and server.address != ServerAddress():
        print_remark(f"for adb itself: export ADB_SERVER_SOCKET={server.address.spec}")
    if not virtual.confined:
        print_remark(unconfined_remark(virtual.name))
    answers().print(virtual.serial)


@app.command("ls")
def ls(json: Json = False) -> None:
    """List the virtual devices of this user, running or not.

    Example: qnnfarm device ls
    """
    devices = manager.list_devices()
    if json:
        print_json([_fields(device) for device in devices])
        return
    if not devices:
        answers().print("no virtual devices; start one with `qnnfarm device start NAME`")
        return
    print_rows(
        ("name", "serial", "SoC", "state", "pid", "confined"),
        [
            [d.name, d.serial, d.soc, d.state, str(d.pid or ""), "yes" if d.confined else "NO"]
            for d in devices
        ],
    )


def _fields(device: manager.VirtualDevice) -> dict[str, object]:
    names = ("name", "serial", "soc", "state", "pid", "confined")
    return {name: getattr(device, name) for name in names}


Force = Annotated[
    bool, typer.Option("--force", help="Do it although somebody holds a lease on it.")
]


@app.command("stop")
def stop(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Names of virtual devices.",
            autocompletion=_complete,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All that run.")] = False,
    force: Force = False,
) -> None:
    """Stop virtual devices and all that runs on them. Their files stay.

    If one of them is held or unknown, none is stopped.

    Example: qnnfarm device stop --all
    """
    if bool(names) == every:
        raise WrongUseError("name the devices to stop, or stop all with --all")
    runs = (device.name for device in manager.list_devices() if device.state == "running")
    targets = list(dict.fromkeys(names or runs))
    for name in targets:
        _refuse_where_held(name, force=force)
    for name in targets:
        _disconnect(manager.stop(name).serial)
        print_remark(f"stopped {name}")
    if not targets:
        print_remark("no virtual device runs")


@app.command("rm")
def rm(name: Name, force: Force = False) -> None:
    """Stop a virtual device and delete its files.

    Example: qnnfarm device rm alpha
    """
    _refuse_where_held(name, force=force)
    serial = next((d.serial for d in manager.list_devices() if d.name == name), "")
    manager.remove(name)
    _disconnect(serial)
    print_remark(f"removed {name}")


@app.command("fault")
def fault(
    name: Name,
    faults: Annotated[
        list[str] | None, typer.Argument(help="Faults, e.g. `stall:seconds=5 reboot:when=run`.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="End all faults first.")] = False,
    events: Annotated[
        bool, typer.Option("--events", help="List past events with their times.")
    ] = False,
    json: Json = False,
) -> None:
    """Inject faults into a running virtual device; without any, list the pending ones.

    Kinds: drop, stall, corrupt, full, reboot, power, throttle, runner, slow.

    Example: qnnfarm device fault alpha drop:bytes=100000
    """
    new = [parse_fault(text) for text in faults or []]
    control = manager.control(name)
    if events:
        _print_events(control.events(), json=json)
        return
    if clear:
        control.clear()
    control.inject(*new)
    texts = [str(fault) for fault in control.faults()]
    if json:
        print_json(texts)
    elif texts:
        answers().print("\n".join(texts))
    else:
        print_remark(f"no fault can still strike {name}")


@app.command("power")
def power(name: Name) -> None:
    """Restore the power of a virtual device that lost it (`power:off=inf`).

    Example: qnnfarm device power alpha
    """
    manager.control(name).power_on()
    print_remark(f"{name} has power")


@app.command("heat")
def heat(
    name: Name,
    ambient: Annotated[
        float | None, typer.Option(help="Temperature of its surroundings, in °C.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Set SoC and body to this temperature, in °C.")
    ] = None,
    load: Annotated[float | None, typer.Option(help="Power besides its own work, in W.")] = None,
    battery: Annotated[
        float | None, typer.Option(min=0, max=100, help="Charge of the battery, in percent.")
    ] = None,
    charging: Annotated[
        bool | None, typer.Option("--charging/--no-charging", help="A charger is plugged in.")
    ] = None,
    time_scale: Annotated[float | None, typer.Option(help="Model seconds per second.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Switch the heat model off.")] = False,
    json: Json = False,
) -> None:
    """Model the heat of a running virtual device, or print its state. A model, not hardware.

    Example: qnnfarm device heat alpha --ambient 35
    """
    if off:
        manager.control(name).heat_off()
        print_remark(f"the heat model of {name} is off")
        return
    changes = {
        "ambient_c": ambient,
        "temperature_c": temperature,
        "load_w": load,
        "battery": None if battery is None else battery / 100,
        "charging": charging,
        "time_scale": time_scale,
    }
    settings = {key: value for key, value in changes.items() if value is not None}
    reading = manager.control(name).heat(**settings)
    if json:
        print_json(None if reading is None else asdict(reading))
    elif reading is None:
        print_remark(f"the heat model of {name} is off; switch it on with --ambient 25")
    else:
        answers().print(
            f"SoC {reading.soc_c:.1f} °C, body {reading.body_c:.1f} °C, clocks at"
            f" {reading.speed:.0%}, thermal status {reading.status}, {reading.power_w:.2f} W,"
            f" battery {reading.battery:.0%}"
        )


def _print_events(events: tuple[LoggedEvent, ...], *, json: bool) -> None:
    if json:
        print_json([asdict(event) for event in events])
        return
    for event in events:
        at = datetime.fromtimestamp(event.at, tz=UTC).isoformat(timespec="milliseconds")
        text = " ".join(part for part in (at, event.kind, event.fault, event.detail) if part)
        answers().print(text)


def _refuse_where_held(name: str, *, force: bool) -> None:
    device = manager.get(name)
    if force or device.state != "running":
        return
    from harness.pool.pool import Pool

    with Pool.of([DeviceSpec("virtual", name), DeviceSpec("android", device.serial)]) as pool:
        holders = [member.holder for member in pool.members() if member.holder]
    if holders:
        raise PoolError(f"{name} is held by {holders[0]}: --force takes it all the same")


def _disconnect(serial: str) -> None:
    from harness.pool.pool import trusted_users

    with suppress(AdbServerError):
        if serial:
            resolve_server(trusted_users=trusted_users()).disconnect(serial)
