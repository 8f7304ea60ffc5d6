"""`qnnfarm devices`: lists devices with model, state and holder."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from harness.cli.arguments import Json
from harness.console import Row, answers, print_json, print_rows, tell
from harness.exit_codes import BAD

if TYPE_CHECKING:
    from harness.devices.base import Battery
    from harness.devices.inventory import Sighting
    from harness.devices.spec import DeviceSpec

Specs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[DEVICE]...",
        help="SERIAL, SERIAL@HOST, linux:[USER@]HOST, virtual:NAME or local; "
        "by default all devices of the adb server.",
        show_default=False,
    ),
]

_HEADINGS = ("serial", "state", "held by", "SoC", "system", "ABI", "free", "battery", "model")
_NONE = (
    "no devices: plug a phone in with USB debugging on, or start a virtual one with "
    "`qnnfarm device start NAME`"
)


def devices(specs: Specs = None, json: Json = False) -> None:
    """List devices: model, SoC, system, free space, battery, state and holder.

    Exits 1 where one that was named does not answer.
    """
    from harness.devices import inventory
    from harness.devices.adb.server import ensure_server
    from harness.devices.devices import Devices
    from harness.devices.spec import DeviceSpec

    if specs:
        wanted = [DeviceSpec.parse(text) for text in specs]
        with Devices() as opened:
            found = inventory.named(opened, wanted)
    else:
        found = inventory.all_of(ensure_server())
    holders = _holders([one.spec for one in found if one.spec is not None])
    if json:
        print_json([_row(one, holders) for one in found])
    elif found:
        _print(found, holders)
    else:
        answers().print(_NONE)
    if not json:
        _tell_unconfined({one.spec.serial for one in found if one.spec is not None})
    if specs and any(one.error for one in found):
        raise typer.Exit(BAD)


def _tell_unconfined(serials: set[str]) -> None:
    from harness.virtual_device.manager import list_devices

    for device in list_devices():
        if device.state == "running" and not device.confined and device.serial in serials:
            tell(
                f"virtual device {device.name} ({device.serial}) is unconfined: its shell may do "
                "on this host whatever you may"
            )


def _holders(specs: "list[DeviceSpec]") -> dict[str, str]:
    """Return holders by device spec; empty where the ledger cannot be read."""
    from harness.errors import HarnessError
    from harness.pool.pool import Pool

    if not specs:
        return {}
    try:
        with Pool.of(specs) as pool:
            return {str(member.spec): member.holder for member in pool.members()}
    except HarnessError as error:
        tell(f"who holds them cannot be told: {error}")
        return {}


def _row(one: "Sighting", holders: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "serial": one.serial,
        "device": str(one.spec) if one.spec else None,
        "state": one.state,
        "holder": holders.get(str(one.spec), ""),
    }
    if one.properties is not None:
        row |= dataclasses.asdict(one.properties)
    return row | ({"error": one.error} if one.error else {})


def _print(found: "list[Sighting]", holders: dict[str, str]) -> None:
    """Print a table without empty columns, and the errors below it."""
    rows = [_cells(one, holders.get(str(one.spec), "")) for one in found]
    kept = [number for number in range(len(_HEADINGS)) if any(row[number] for row in rows)]
    print_rows(
        [_HEADINGS[number] for number in kept],
        [Row([row[number] for number in kept]) for row in rows],
    )
    for one in found:
        if one.error:
            answers().print(Text(f"{one.serial}: {one.error}"))


def _cells(one: "Sighting", holder: str) -> list[str]:
    """Return a device's cells by heading."""
    cells = [one.serial, one.state, holder]
    said = one.properties
    if said is None:
        return cells + [""] * (len(_HEADINGS) - len(cells))
    free = "" if said.free_bytes is None else f"{said.free_bytes / 2**30:.1f} GiB"
    soc = " ".join(word for word in (said.soc, said.hexagon) if word)
    model = f"{said.model} (emulator)" if said.emulator else said.model
    return [*cells, soc, said.system, said.abi, free, _battery(said.battery), model]


def _battery(battery: "Battery | None") -> str:
    """Format charge and temperature: `84 % 31.7 °C`, with a `+` while it charges."""
    if battery is None:
        return ""
    words = []
    if battery.level_percent is not None:
        words.append(f"{battery.level_percent:.0f} %{'+' if battery.charging else ''}")
    if battery.temperature_c is not None:
        words.append(f"{battery.temperature_c:.1f} °C")
    return " ".join(words)
