"""The process of one virtual device: `python -m harness.virtual_device.daemon FOLDER --ready-fd N`.

It detaches from its starter, serves, and once it listens writes its pid and port to the descriptor,
as one JSON line. With a namespace it is two processes: the outer one, which the record names,
passes signals on; the inner one is the device, and dies with the outer one.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from harness.virtual_device.auth import user_key_files
from harness.virtual_device.device import Device
from harness.virtual_device.filesystem import NAMESPACE_ROOT
from harness.virtual_device.folder import DeviceRecord, OpenFolder, load_record
from harness.virtual_device.linux import set_parent_death_signal
from harness.virtual_device.namespace import NamespaceKind, enter_device_root, unshare
from harness.virtual_device.processes import ProcessTable, ProcessTracker

log = logging.getLogger(__name__)

_UMASK = 0o022
_LOG_FORMAT = "%(asctime)s %(name)s: %(message)s"
_MAX_LOG_BYTES = 4 * 1024 * 1024
_KEPT_LOG_BYTES = _MAX_LOG_BYTES // 2


def main() -> int:
    """Run the device and return the exit status of its process."""
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
    record = load_record(options.folder)
    opened = OpenFolder.open(options.folder)
    daemon_pid = os.getpid()

    def on_ready(port: int) -> None:
        os.write(options.ready_fd, json.dumps({"pid": daemon_pid, "port": port}).encode() + b"\n")
        os.close(options.ready_fd)

    in_namespace = options.namespace is not NamespaceKind.NONE
    root = options.folder / "root"
    if in_namespace:
        unshare(options.namespace)
        inner = os.fork()
        if inner:
            os.close(options.ready_fd)
            opened.control.close()
            return _supervise(inner)
        set_parent_death_signal(signal.SIGKILL)
        enter_device_root(root, options.folder / "mnt")
        root = NAMESPACE_ROOT
    asyncio.run(_serve(options.folder, record, root, opened, on_ready, in_namespace=in_namespace))
    return 0


async def _serve(
    folder: Path,
    record: DeviceRecord,
    root: Path,
    opened: OpenFolder,
    on_ready: Callable[[int], None],
    *,
    in_namespace: bool,
) -> None:
    os.chdir("/")
    tracker = ProcessTracker()
    tracker.install()
    device = Device(
        record,
        root,
        in_namespace=in_namespace,
        key_files=user_key_files(os.environ, Path.home()),
        processes=ProcessTable(tracker, folder, exclusive=True),
        folder=opened,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, device.shut_down)
    await device.run(on_ready)


def _supervise(inner: int) -> int:
    """Forward signals to the device until it exits."""

    def forward(number: int, _frame: object) -> None:
        os.kill(inner, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    _, status = os.waitpid(inner, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def set_up_logging(level: int) -> None:
    """Log to standard error, and keep only the last megabytes of it."""
    handler = BoundedHandler(sys.stderr)
    logging.basicConfig(level=level, format=_LOG_FORMAT, handlers=[handler])


class BoundedHandler(logging.StreamHandler):  # type: ignore[type-arg]  # no parameter at run time
    """Handler for a file opened for appending; drops its older half when it is too large."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        super().emit(record)
        try:
            _shorten(self.stream.fileno())
        except OSError:
            self.handleError(record)


def _shorten(descriptor: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= _MAX_LOG_BYTES:
        return
    # It is open for writing only, and in a namespace its path may be hidden.
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # noqa: PTH123 - no path
        file.seek(-_KEPT_LOG_BYTES, os.SEEK_END)
        kept = file.read()
    os.ftruncate(descriptor, 0)
    os.write(descriptor, kept[kept.find(b"\n") + 1 :])


if __name__ == "__main__":
    sys.exit(main())
