"""`qnnfarm devices`: what the adb server knows."""

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.table import Table

from harness.cli.arguments import Json
from harness.cli.console import answers, print_json

if TYPE_CHECKING:
    from harness.devices.discovery import DeviceEntry


def devices(json: Json = False) -> None:
    """List the devices of the adb server: model, SoC, Android version, free space, state."""
    from harness.adb.server import ensure_server
    from harness.devices.discovery import list_devices

    server = ensure_server()
    rows = [_describe(entry) for entry in list_devices(server)]
    if json:
        print_json(rows)
        return
    if not rows:
        answers().print(
            "no devices: plug a phone in with USB debugging on, or start a virtual one with "
            "`qnnfarm device start NAME`"
        )
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("serial", "state", "SoC", "Android", "ABI", "free"):
        table.add_column(heading, no_wrap=True)
    table.add_column("model", overflow="fold")
    for row in rows:
        free = row.get("free_bytes")
        model = str(row.get("model") or row.get("error") or "")
        table.add_row(
            row["serial"],
            row["state"],
            " ".join(str(row[key]) for key in ("soc", "hexagon") if row.get(key)),
            str(row.get("android_version") or ""),
            str(row.get("abi") or ""),
            "" if free is None else f"{free / 2**30:.1f} GiB",
            f"{model} (emulator)" if row.get("emulator") else model,
        )
    answers().print(table)


def _describe(entry: "DeviceEntry") -> dict[str, Any]:
    """One row: what the server says, and what the device itself says when it can be asked."""
    from harness.devices.discovery import open_device
    from harness.errors import DeviceError

    row: dict[str, Any] = {"serial": entry.serial, "state": entry.state}
    if entry.state != "device":
        return row
    try:
        return row | dataclasses.asdict(open_device(entry.serial).properties(timeout_s=10.0))
    except DeviceError as error:
        return row | {"error": str(error)}
