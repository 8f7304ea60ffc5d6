"""Many devices in one process: `python -m harness.virtual_device.host FOLDER --count 50`.

For farms of hundreds. Each device has a port, a folder `FOLDER/NAME`, properties, faults and heat
of its own; none has a namespace, so `$TMPDIR` names its writable folder and all see the processes
of the host. They start and stop as one. Prints `NAME SERIAL`, a line a device, when all listen.
"""

import argparse
import asyncio
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from buildlib.targets import find_soc
from harness.virtual_device.auth import user_key_files
from harness.virtual_device.device import Device
from harness.virtual_device.filesystem import DEVICE_FOLDERS
from harness.virtual_device.handles import Handles
from harness.virtual_device.logs import set_up_logging
from harness.virtual_device.processes import ProcessTable, kill_descendants, kill_leftovers
from harness.virtual_device.reaper import Reaper, prepare_loop
from harness.virtual_device.record import DeviceRecord, load_record, save_record

log = logging.getLogger(__name__)

_UMASK = 0o022


def main() -> int:
    """Host devices until SIGTERM or SIGINT; the exit status of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.virtual_device.host", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first device")
    parser.add_argument("--soc", default="SM8750")
    parser.add_argument("--storage", type=int, default=None, help="bytes of each device's /data")
    parser.add_argument("--until-eof", action="store_true", help="end when stdin does")
    options = parser.parse_args()
    os.umask(_UMASK)
    set_up_logging(logging.WARNING)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder = options.folder.absolute()
    soc = find_soc(options.soc).name
    numbers = range(options.first, options.first + options.count)
    folders = [_prepared(folder / device_name(n), soc, options.storage) for n in numbers]
    os.chdir("/")
    asyncio.run(_serve(folders, until_eof=options.until_eof))
    return 0


def device_name(number: int) -> str:
    """The name of a hosted device, and of its folder."""
    return f"h{number:03}"


async def _serve(folders: list[Path], *, until_eof: bool) -> None:
    reaper = Reaper()
    prepare_loop(reaper)
    key_files = user_key_files(os.environ, Path.home())
    devices: list[Device] = []
    ready: list[asyncio.Future[int]] = []
    loop = asyncio.get_running_loop()
    records = [load_record(folder) for folder in folders]
    handles = [Handles.open(folder) for folder in folders]
    kill_leftovers({record.serial_number for record in records})
    async with asyncio.TaskGroup() as running:
        for folder, record, opened in zip(folders, records, handles, strict=True):
            device = Device(
                record,
                folder / "root",
                in_namespace=False,
                key_files=key_files,
                processes=ProcessTable(reaper, record.serial_number, alone=False),
                handles=opened,
            )
            listening: asyncio.Future[int] = loop.create_future()
            running.create_task(_run(folder.name, device, listening))
            devices.append(device)
            ready.append(listening)

        def shut_down() -> None:
            for device in devices:
                device.shut_down()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, shut_down)
        if until_eof:
            loop.add_reader(sys.stdin.fileno(), _on_input, loop, shut_down)
        for folder, listening in zip(folders, ready, strict=True):
            port = await listening
            save_record(folder, replace(load_record(folder), port=port))
            sys.stdout.write(f"{folder.name} 127.0.0.1:{port}\n")
        sys.stdout.flush()
    await kill_descendants(reaper)  # with those that shed the mark of their device


async def _run(name: str, device: Device, listening: asyncio.Future[int]) -> None:
    """Run a device; its neighbours outlive it, unless it does not even come up."""
    try:
        await device.run(listening.set_result)
    except OSError:
        if not listening.done():
            raise
        log.exception("%s has failed", name)


def _on_input(loop: asyncio.AbstractEventLoop, shut_down: Callable[[], None]) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        shut_down()


def _prepared(folder: Path, soc: str, storage_bytes: int | None) -> Path:
    """The folder of a device, made or found."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for own in DEVICE_FOLDERS:
        (folder / "root" / own).mkdir(parents=True, exist_ok=True)
    try:
        record = replace(load_record(folder), soc=soc, storage_bytes=storage_bytes)
    except FileNotFoundError:
        number = f"QF{secrets.token_hex(6).upper()}"
        record = DeviceRecord(folder.name, soc, number, storage_bytes)
    save_record(folder, record)
    return folder


if __name__ == "__main__":
    sys.exit(main())
