"""`qnnfarm device`: virtual Android devices, each its own process behind the real adb server."""

from typing import Annotated

import typer
from rich.table import Table

from harness.cli.console import answers, print_json, remarks

app = typer.Typer(
    help="Virtual Android devices: start, list, stop and remove them.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Name of the virtual device, e.g. `alpha`.")]
Json = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]


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
    table = Table("name", "serial", "SoC", "state", "pid", box=None, header_style="bold")
    for device in found:
        table.add_row(device.name, device.serial, device.soc, device.state, str(device.pid or ""))
    answers().print(
        table if found else "no virtual devices; start one with `qnnfarm device start NAME`"
    )


@app.command("stop")
def stop(name: Name) -> None:
    """Stop a virtual device and all that runs on it. Its files stay."""
    from harness.virtual import manager

    manager.stop(name)
    remarks().print(f"stopped {name}")


@app.command("rm")
def rm(name: Name) -> None:
    """Stop a virtual device and delete its files."""
    from harness.virtual import manager

    manager.remove(name)
    remarks().print(f"removed {name}")
