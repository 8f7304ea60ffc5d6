"""`qnnfarm devices`: lists devices with model, state and holder."""

import dataclasses
from typing import Annotated, Any

import typer
from rich.text import Text

from harness.cli.arguments import Json
from harness.cli.completion import complete_devices
from harness.console import answers, print_json, print_remark, print_rows
from harness.devices import inventory
from harness.devices.base import Battery
from harness.devices.inventory import Sighting
from harness.devices.spec import DeviceSpec, device_types
from harness.errors import BAD, HarnessError
from harness.pool.pool import Pool, host_devices

Specs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DEVICE",
        help="SERIAL, SERIAL@HOST, linux:[USER@]HOST, virtual:NAME or local; "
        "by default all devices of the adb server.",
        show_default=False,
        autocompletion=complete_devices,
    ),
]

_HEADINGS = (
    "device",
    "serial",
    "state",
    "held by",
    "SoC",
    "system",
    "ABI",
    "free",
    "battery",
    "model",
)
_NONE = (
    "no devices: plug a phone in with USB debugging on, or start a virtual one with "
    "`qnnfarm device start NAME`"
)


def devices(specs: Specs = None, json: Json = False) -> None:
    """List devices: model, SoC, system, free space, battery, state and holder.

    Exits 1 where one that was named does not answer.

    Example: qnnfarm devices
    """
    selection = [DeviceSpec.parse(text) for text in specs or ()]
    with host_devices() as host:
        sightings = inventory.named(host, selection) if specs else inventory.all_of(host)
    holders = _holders(sightings)
    if json:
        print_json([_row(one, holders) for one in sightings])
    elif sightings:
        _print(sightings, holders)
    else:
        answers().print(_NONE)
    for one in sightings if not json else ():
        if one.spec and (remark := device_types()[one.spec.type].preview(one.spec).remark):
            print_remark(remark)
    if specs and any(one.error for one in sightings):
        raise typer.Exit(BAD)


def _holders(sightings: list[Sighting]) -> dict[str, str]:
    """Return holders by device spec; empty where the ledger cannot be read.

    Devices that did not answer are not asked again, which would start a virtual one.
    """
    holders: dict[str, str] = {}
    try:
        for probe in (True, False):
            specs = {one.spec for one in sightings if one.spec and bool(one.properties) == probe}
            if specs:
                with Pool.of(list(specs), probe=probe) as pool:
                    holders |= {str(member.spec): member.holder for member in pool.members()}
    except HarnessError as error:
        print_remark(f"who holds them cannot be told: {error}")
    return holders


def _row(one: Sighting, holders: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "device": str(one.spec) if one.spec else None,
        "state": one.state,
        "holder": holders.get(str(one.spec), ""),
    }
    if one.properties is not None:
        row |= dataclasses.asdict(one.properties)
    return row | {"serial": one.serial} | ({"error": one.error} if one.error else {})


def _print(sightings: list[Sighting], holders: dict[str, str]) -> None:
    """Print a table without empty columns, and the errors below it."""
    rows = [_cells(one, holders.get(str(one.spec), "")) for one in sightings]
    columns = [number for number in range(len(_HEADINGS)) if any(row[number] for row in rows)]
    print_rows(
        [_HEADINGS[number] for number in columns],
        [[row[number] for number in columns] for row in rows],
    )
    for one in sightings:
        if one.error:
            answers().print(Text(f"{_name(one)}: {one.error}"))


def _cells(one: Sighting, holder: str) -> list[str]:
    """Return a device's cells by heading."""
    name = _name(one)
    cells = [name, "" if one.serial in name else one.serial, one.state, holder]
    properties = one.properties
    if properties is None:
        return cells + [""] * (len(_HEADINGS) - len(cells))
    free = "" if properties.free_bytes is None else f"{properties.free_bytes / 2**30:.1f} GiB"
    soc = " ".join(word for word in (properties.soc, properties.hexagon) if word)
    model = f"{properties.model} (emulator)" if properties.emulator else properties.model
    return [
        *cells,
        soc,
        properties.system,
        properties.abi,
        free,
        _battery(properties.battery),
        model,
    ]


def _name(one: Sighting) -> str:
    """Return a device's name, as commands take it."""
    if one.spec is None:
        return one.serial
    return one.spec.identifier if one.spec.type == "android" else str(one.spec)


def _battery(battery: Battery | None) -> str:
    """Format charge and temperature: `84 % 31.7 °C`, with a `+` while it charges."""
    if battery is None:
        return ""
    words = []
    if battery.level_percent is not None:
        words.append(f"{battery.level_percent:.0f} %{'+' if battery.charging else ''}")
    if battery.temperature_c is not None:
        words.append(f"{battery.temperature_c:.1f} °C")
    return " ".join(words)
