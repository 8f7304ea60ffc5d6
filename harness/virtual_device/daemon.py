"""The process of one virtual device: `python -m harness.virtual_device.daemon FOLDER --ready-fd N`.

It detaches from whoever started it, tells its pid and then its port through the descriptor, a
JSON line each, and serves. With a namespace it is two processes: the outer one, which the record
names, passes signals on; the inner one is the device, and dies with the outer one.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import stat
import sys
from pathlib import Path

from harness.virtual_device.auth import user_key_files
from harness.virtual_device.filesystem import NAMESPACE_ROOT
from harness.virtual_device.folder import DeviceRecord, Handles, load_record
from harness.virtual_device.linux import set_parent_death_signal
from harness.virtual_device.namespace import NamespaceKind, enter_device_root, unshare
from harness.virtual_device.processes import ProcessTable, Reaper, kill_leftovers, prepare_loop

log = logging.getLogger(__name__)

_UMASK = 0o022


def main() -> int:
    """Run the device; the exit status of its process."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.virtual_device.daemon", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--namespace", type=NamespaceKind, default=NamespaceKind.NONE)
    options = parser.parse_args()
    if os.fork():
        os._exit(0)
    os.setsid()
    os.umask(_UMASK)
    set_up_logging(logging.INFO)
    _tell(options.ready_fd, {"pid": os.getpid()})
    record = load_record(options.folder)
    root = options.folder / "root"
    handles = Handles.open(options.folder)
    kill_leftovers({record.serial_number})
    if options.namespace is NamespaceKind.NONE:
        return _serve(record, root, handles, options.ready_fd, in_namespace=False)
    unshare(options.namespace)
    inner = os.fork()
    if inner:
        os.close(options.ready_fd)
        handles.control.close()
        return _supervise(inner)
    set_parent_death_signal(signal.SIGKILL)
    enter_device_root(root, options.folder / "mnt")
    return _serve(record, NAMESPACE_ROOT, handles, options.ready_fd, in_namespace=True)


def _serve(
    record: DeviceRecord, root: Path, handles: Handles, ready_fd: int, *, in_namespace: bool
) -> int:
    from harness.virtual_device.device import Device

    def on_ready(port: int) -> None:
        _tell(ready_fd, {"port": port})
        os.close(ready_fd)

    async def serve() -> None:
        reaper = Reaper()
        prepare_loop(reaper)
        device = Device(
            record,
            root,
            in_namespace=in_namespace,
            key_files=user_key_files(os.environ, Path.home()),
            processes=ProcessTable(reaper, record.serial_number, alone=True),
            handles=handles,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, device.shut_down)
        await device.run(on_ready)

    os.chdir("/")
    asyncio.run(serve())
    return 0


def _supervise(inner: int) -> int:
    """Pass signals on to the device until it ends."""

    def forward(number: int, _frame: object) -> None:
        os.kill(inner, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    _, status = os.waitpid(inner, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _tell(descriptor: int, what: dict[str, int]) -> None:
    os.write(descriptor, json.dumps(what).encode() + b"\n")


_FORMAT = "%(asctime)s %(name)s: %(message)s"
_MAX_BYTES = 4 * 1024 * 1024
_KEPT_BYTES = _MAX_BYTES // 2


def set_up_logging(level: int) -> None:
    """Log to standard error from now on, and keep the last megabytes of it alone."""
    handler = BoundedHandler(sys.stderr)
    logging.basicConfig(level=level, format=_FORMAT, handlers=[handler])


class BoundedHandler(logging.StreamHandler):  # type: ignore[type-arg]  # no parameter at run time
    """Drops the older half of a file that is open for appending once it is too large."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        super().emit(record)
        try:
            _shorten(self.stream.fileno())
        except OSError:
            self.handleError(record)


def _shorten(descriptor: int) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size <= _MAX_BYTES:
        return
    # It was opened for writing, and where the device lives it may have no name any more.
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # noqa: PTH123 - no path
        file.seek(-_KEPT_BYTES, os.SEEK_END)
        kept = file.read()
    os.ftruncate(descriptor, 0)
    os.write(descriptor, kept[kept.find(b"\n") + 1 :])


if __name__ == "__main__":
    sys.exit(main())
