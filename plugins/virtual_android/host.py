"""Many devices in one process: `python -m plugins.virtual_android.host FOLDER --count 50 ...`.

For tests of farms of hundreds. Each device has a port, a folder `FOLDER/NAME`, properties, faults
and heat of its own. None is confined: their shells have all permissions of the user on the host, so
this has to be asked for (`--unconfined`), and `$TMPDIR` names a device's writable folder. They
start and stop as one. Prints `NAME SERIAL`, a line a device, when all listen.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from buildlib.targets import find_soc
from harness.errors import VirtualDeviceError
from plugins.virtual_android.control import DeviceControl
from plugins.virtual_android.device import DeviceDaemon, DeviceSockets
from plugins.virtual_android.folder import (
    load_record,
    lock_folder,
    log_tail,
    make_folders,
    new_record,
    save_record,
)
from plugins.virtual_android.outside import DirectOutside, set_up_logging
from plugins.virtual_android.processes import (
    ProcessTable,
    ProcessTracker,
    kill_leftovers,
    kill_tree,
)
from plugins.virtual_android.userland import own_commands

log = logging.getLogger(__name__)

_UMASK = 0o022
_START_PATIENCE_S = 120.0
_STOP_PATIENCE_S = 30.0


@contextlib.contextmanager
def hosted_devices(
    count: int,
    soc: str,
    folder: Path,
    *,
    unconfined: bool = False,
    processes: int = 2,
    storage_bytes: int | None = None,
) -> Iterator[list[str]]:
    """Run devices in few processes for a `with` block that gets their serials; ends all at its end.

    Files stay in `folder`, for the next time. The devices end with this process too, even if it is
    killed. `hosted_control` commands them.

    Args:
        unconfined: must be true, because these devices cannot be confined: their shells have all
            permissions of the user on this host.
        processes: how many processes share the devices.
        storage_bytes: limit for the `/data` of each.

    Raises:
        VirtualDeviceError: not all came up; none is left.
        BuildError: the catalog has no such SoC.
    """
    find_soc(soc)
    if not unconfined:
        raise VirtualDeviceError(
            "virtual devices did not start: many in one process are not confined: say "
            "`unconfined=True`"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as stack:
        hosts: list[_Host] = []
        first = 0
        for index in range(min(processes, count)):
            share = count // processes + (index < count % processes)
            options = ["--unconfined", "--count", str(share), "--first", str(first), "--soc", soc]
            if storage_bytes is not None:
                options += ["--storage", str(storage_bytes)]
            hosts.append(_Host(folder, options, share, folder / f"host-{index}.log"))
            stack.callback(hosts[-1].stop)
            first += share
        deadline = time.monotonic() + _START_PATIENCE_S
        yield [serial for host in hosts for serial in host.serials(deadline)]
        for host in hosts:
            host.end()  # all at once; the exit stack then waits for each


def hosted_control(folder: Path, number: int) -> DeviceControl:
    """Return the control of the device with that index among the serials."""
    name = _device_name(number)
    return DeviceControl(name, folder.absolute() / name)


class _Host:
    """One process of `hosted_devices`."""

    def __init__(self, folder: Path, options: list[str], count: int, log_path: Path) -> None:
        command = [sys.executable, "-P", "-m", "plugins.virtual_android.host"]
        command += [str(folder.absolute()), *options, "--until-eof"]
        self._count = count
        self._log_path = log_path
        log_path.unlink(missing_ok=True)
        with log_path.open("ab") as log:  # it must append, for its process shortens it
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C does not reach it, so it shuts down in order
            )

    def serials(self, deadline: float) -> list[str]:
        """Wait until all its devices listen."""
        output = self._process.stdout
        assert output is not None  # noqa: S101 - a pipe
        left_s = max(0.0, deadline - time.monotonic())
        if not select.select([output], [], [], left_s)[0]:
            raise VirtualDeviceError(
                f"virtual devices did not start: no answer within {_START_PATIENCE_S:g} s (log "
                f"{self._log_path})"
            )
        lines = [output.readline() for _ in range(self._count)]
        if not all(lines):
            raise VirtualDeviceError(
                "virtual devices did not start: their process ended: "
                f"{log_tail(self._log_path)} (log {self._log_path})"
            )
        return [line.split()[1].decode() for line in lines]

    def end(self) -> None:
        """Let its devices shut down."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self) -> None:
        """Let its devices shut down and wait for them; kill them if that takes too long."""
        with self._process:
            self.end()
            try:
                self._process.wait(_STOP_PATIENCE_S)
            except subprocess.TimeoutExpired:
                kill_tree(self._process.pid)


def _device_name(number: int) -> str:
    return f"h{number:03}"


def main() -> int:
    """Host devices until SIGTERM or SIGINT, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m plugins.virtual_android.host", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument(
        "--unconfined",
        action="store_true",
        required=True,
        help="their shells may do on this host whatever you may; they cannot be confined",
    )
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
    folders = [_prepared(folder / _device_name(n), soc, options.storage) for n in numbers]
    os.chdir("/")
    asyncio.run(_serve(folders, until_eof=options.until_eof))
    return 0


async def _serve(folders: list[Path], *, until_eof: bool) -> None:
    tracker = ProcessTracker()
    tracker.install()
    commands = own_commands()
    devices: list[DeviceDaemon] = []
    ready: list[asyncio.Future[int]] = []
    loop = asyncio.get_running_loop()
    records = [load_record(folder) for folder in folders]
    locks = [lock_folder(folder) for folder in folders]
    kill_leftovers(folders)
    async with asyncio.TaskGroup() as group:
        for folder, record, lock in zip(folders, records, locks, strict=True):
            files = DirectOutside(folder, os.environ)
            device = DeviceDaemon(
                record,
                folder / "root",
                commands=commands,
                outside=files,
                sockets=DeviceSockets.open(folder, record.port),
                processes=ProcessTable(tracker, folder, exclusive=False),
            )
            listening: asyncio.Future[int] = loop.create_future()
            group.create_task(_run(folder.name, device, listening, files, lock))
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
    await tracker.kill(tracker.all)  # also processes that dropped their device's mark


async def _run(
    name: str, device: DeviceDaemon, listening: asyncio.Future[int], files: DirectOutside, lock: int
) -> None:
    """Run a device; a failure after it came up does not end its neighbours."""
    try:
        await device.run(listening.set_result)
    except OSError:
        if not listening.done():
            raise
        log.exception("%s has failed", name)
    finally:
        files.close()
        os.close(lock)


def _on_input(loop: asyncio.AbstractEventLoop, shut_down: Callable[[], None]) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        shut_down()


def _prepared(folder: Path, soc: str, storage_bytes: int | None) -> Path:
    make_folders(folder)
    try:
        record = replace(load_record(folder), soc=soc, storage_bytes=storage_bytes)
    except FileNotFoundError:
        record = new_record(folder.name, soc, storage_bytes)
    save_record(folder, record)
    return folder


if __name__ == "__main__":
    sys.exit(main())
