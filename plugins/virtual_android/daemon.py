"""The process of one virtual device, which `plugins.virtual_android.manager` starts.

It detaches from its starter, serves, and once it listens writes its pid and port to the descriptor,
as one JSON line. A confined device is two processes: the outer one, which the record names, reads
and writes the host's files; the inner one is the device, and dies with the outer one.
"""

import argparse
import asyncio
import functools
import gc
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from plugins.virtual_android.device import DeviceDaemon, DeviceSockets
from plugins.virtual_android.filesystem import NAMESPACE_ROOT
from plugins.virtual_android.folder import load_record, lock_folder
from plugins.virtual_android.namespace import Confinement, NamespaceKind
from plugins.virtual_android.outside import (
    DirectOutside,
    Outside,
    SupervisedOutside,
    set_up_logging,
    supervise,
)
from plugins.virtual_android.processes import ProcessTable, ProcessTracker
from plugins.virtual_android.userland import own_commands

_UMASK = 0o022


def run() -> None:
    """Be the process of a device, and end with its exit status."""
    status = main()
    logging.shutdown()
    os._exit(status)  # to free each object first takes longer than all the rest of a shutdown


def main() -> int:
    """Run the device and return the exit status of its process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--namespace", type=NamespaceKind, default=NamespaceKind.NONE)
    options = parser.parse_args()
    gc.freeze()  # or each process of the device would copy what its collector looks at
    if os.fork():
        os._exit(0)
    os.setsid()
    os.umask(_UMASK)
    set_up_logging(logging.INFO)
    folder: Path = options.folder
    record = load_record(folder)
    lock = lock_folder(folder)
    sockets = DeviceSockets.open(folder, record.port)
    files = DirectOutside(folder, os.environ)
    commands = own_commands()
    daemon_pid = os.getpid()

    def on_ready(port: int) -> None:
        os.write(options.ready_fd, json.dumps({"pid": daemon_pid, "port": port}).encode() + b"\n")
        os.close(options.ready_fd)

    def serve(root: Path, outside: Outside) -> None:
        os.chdir("/")
        make_device = functools.partial(
            DeviceDaemon, record, root, commands=commands, outside=outside, sockets=sockets
        )
        asyncio.run(_run(make_device, folder, on_ready))

    if options.namespace is NamespaceKind.NONE:
        serve(folder / "root", files)
        return 0
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log_out, log_in = os.pipe()
    inner = Confinement.of(options.namespace, folder, record.name).fork()
    if inner:
        for descriptor in (options.ready_fd, log_in):
            os.close(descriptor)
        sockets.close()
        theirs.close()
        return supervise(inner, ours, log_out, files)
    # Whatever this process has open of the host, its device could reach through /proc.
    for descriptor in (lock, log_out):
        os.close(descriptor)
    files.close()
    ours.close()
    for standard in (1, 2):
        os.dup2(log_in, standard)
    os.close(log_in)
    serve(NAMESPACE_ROOT, SupervisedOutside(theirs))
    return 0


async def _run(
    make_device: Callable[..., DeviceDaemon], folder: Path, on_ready: Callable[[int], None]
) -> None:
    tracker = ProcessTracker()
    tracker.install()
    device = make_device(processes=ProcessTable(tracker, folder, exclusive=True))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, device.shut_down)
    await device.run(on_ready)
