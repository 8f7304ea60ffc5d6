"""`qnnfarm device`: virtual Android devices, each its own process behind the real adb server."""

from contextlib import suppress
from typing import Annotated

import typer
from rich.table import Table

from harness.cli.arguments import Json
from harness.cli.console import answers, print_json, remarks

app = typer.Typer(
    help="Virtual Android devices: start, list, stop and remove them.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Name of the virtual device, e.g. `alpha`.")]


@app.command("start")
def start(
    name: Name,
    soc: Annotated[str, typer.Option(help="SoC it stands for, e.g. SM8750.")] = "SM8750",
    json: Json = False,
) -> None:
    """Start a virtual device and connect it to the adb server. The last line is its serial."""
    from harness.adb.server import ensure_server
    from harness.virtual import manager

    virtual = manager.start(name, soc)
    ensure_server().connect(virtual.serial)
    if json:
        print_json(
            {"name": virtual.name, "serial": virtual.serial, "soc": virtual.soc, "pid": virtual.pid}
        )
        return
    remarks().print(
        f"started {virtual.name} ({virtual.soc}), files in {virtual.root}", soft_wrap=True
    )
    answers().print(virtual.serial)


@app.command("ls")
def ls(json: Json = False) -> None:
    """List the virtual devices of this user, running or not."""
    from harness.virtual import manager

    found = manager.list_devices()
    if json:
        print_json(
            [
                {"name": d.name, "serial": d.serial, "soc": d.soc, "state": d.state, "pid": d.pid}
                for d in found
            ]
        )
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("name", "serial", "SoC", "state", "pid"):
        table.add_column(heading, no_wrap=True)
    for device in found:
        table.add_row(device.name, device.serial, device.soc, device.state, str(device.pid or ""))
    answers().print(
        table if found else "no virtual devices; start one with `qnnfarm device start NAME`"
    )


@app.command("stop")
def stop(name: Name) -> None:
    """Stop a virtual device and all that runs on it. Its files stay."""
    from harness.virtual import manager

    _disconnect(manager.stop(name).serial)
    remarks().print(f"stopped {name}")


@app.command("rm")
def rm(name: Name) -> None:
    """Stop a virtual device and delete its files."""
    from harness.virtual import manager

    serial = next((d.serial for d in manager.list_devices() if d.name == name), "")
    manager.remove(name)
    _disconnect(serial)
    remarks().print(f"removed {name}")


def _disconnect(serial: str) -> None:
    """Let an adb server that runs forget the device; where none runs there is nothing to forget."""
    from harness.adb.server import resolve_server
    from harness.errors import AdbServerError

    with suppress(AdbServerError):
        if serial:
            resolve_server().disconnect(serial)
