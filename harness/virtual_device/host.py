"""Many devices in one process: `python -m harness.virtual_device.host FOLDER --count 50`.

For farms of hundreds. Each device has a port, a folder `FOLDER/NAME`, properties, faults and heat
of its own; none has a namespace, so `$TMPDIR` names its writable folder and all see the processes
of the host. They start and stop as one. Prints `NAME SERIAL`, a line a device, when all listen.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from buildlib.targets import find_soc
from harness.errors import VirtualHostError
from harness.virtual_device.auth import user_key_files
from harness.virtual_device.control import DeviceControl
from harness.virtual_device.daemon import set_up_logging
from harness.virtual_device.device import Device
from harness.virtual_device.filesystem import DEVICE_FOLDERS
from harness.virtual_device.folder import DeviceRecord, Handles, load_record, save_record
from harness.virtual_device.processes import ProcessTable, ProcessTracker, kill_leftovers, kill_tree

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
    tracker = ProcessTracker()
    tracker.install()
    key_files = user_key_files(os.environ, Path.home())
    devices: list[Device] = []
    ready: list[asyncio.Future[int]] = []
    loop = asyncio.get_running_loop()
    records = [load_record(folder) for folder in folders]
    handles = [Handles.open(folder) for folder in folders]
    kill_leftovers(folders)
    async with asyncio.TaskGroup() as running:
        for folder, record, opened in zip(folders, records, handles, strict=True):
            device = Device(
                record,
                folder / "root",
                in_namespace=False,
                key_files=key_files,
                processes=ProcessTable(tracker, folder, alone=False),
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
    await tracker.kill(tracker.all)  # with those that shed the mark of their device


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


_START_PATIENCE_S = 120.0
_STOP_PATIENCE_S = 30.0
_TAIL_BYTES = 600

_Host = subprocess.Popen[bytes]


@contextlib.contextmanager
def hosted_devices(
    count: int,
    soc: str,
    folder: Path,
    *,
    processes: int = 2,
    storage_bytes: int | None = None,
) -> Iterator[list[str]]:
    """Run devices in few processes; gives their serials, ends them all and what runs on them.

    Files stay in `folder`, for the next time. They end with this process too, even if it is
    killed. `hosted_control` has their switches.

    Args:
        processes: how many processes share the devices.
        storage_bytes: limit for the `/data` of each.

    Raises:
        VirtualHostError: they did not all come up; none is left.
        UnknownSocError: the catalog has no such SoC.
    """
    find_soc(soc)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as stack:
        hosts: list[tuple[_Host, int, Path]] = []
        first = 0
        for index in range(min(processes, count)):
            share = count // processes + (index < count % processes)
            log_path = folder / f"host-{index}.log"
            host = _start(folder, soc, first, share, storage_bytes, log_path)
            stack.callback(_stop, host)
            hosts.append((host, share, log_path))
            first += share
        deadline = time.monotonic() + _START_PATIENCE_S
        serials = [
            serial for host, share, log in hosts for serial in _serials(host, share, deadline, log)
        ]
        yield serials
        for host, _, _ in hosts:
            _end(host)  # all at once; then each is waited for


def hosted_control(folder: Path, number: int) -> DeviceControl:
    """The switches of the device with that index among the serials."""
    name = device_name(number)
    return DeviceControl(name, folder / name)


def _start(
    folder: Path, soc: str, first: int, count: int, storage_bytes: int | None, log_path: Path
) -> _Host:
    command = [sys.executable, "-P", "-m", "harness.virtual_device.host", str(folder.absolute())]
    command += ["--count", str(count), "--first", str(first), "--soc", soc, "--until-eof"]
    if storage_bytes is not None:
        command += ["--storage", str(storage_bytes)]
    log_path.unlink(missing_ok=True)
    with log_path.open("ab") as log:  # its process shortens it, for which it must append
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # a Ctrl-C is ours, and they end in order
        )


def _serials(host: _Host, count: int, deadline: float, log_path: Path) -> list[str]:
    assert host.stdout is not None  # noqa: S101 - asked for in _start
    descriptor = host.stdout.fileno()
    received = b""
    while received.count(b"\n") < count:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise VirtualHostError(f"no answer within {_START_PATIENCE_S:g} s", str(log_path))
        part = host.stdout.read1()  # type: ignore[attr-defined]
        if not part:
            tail = log_path.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
            raise VirtualHostError(f"their process ended: {tail}", str(log_path))
        received += part
    return [line.split()[1] for line in received.decode().splitlines()]


def _end(host: _Host) -> None:
    if host.stdin is not None:
        host.stdin.close()


def _stop(host: _Host) -> None:
    with host:
        _end(host)
        try:
            host.wait(_STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            kill_tree(host.pid)


if __name__ == "__main__":
    sys.exit(main())
