"""Processes with many devices in them, for as long as a block runs."""

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from buildlib.targets import find_soc
from harness.errors import VirtualHostError
from harness.virtual_device.commanding import DeviceCommands
from harness.virtual_device.host import device_name
from harness.virtual_device.launch import kill_tree

_START_PATIENCE_S = 120.0
_STOP_PATIENCE_S = 30.0
_TAIL_BYTES = 600

_Host = subprocess.Popen[bytes]


@contextlib.contextmanager
def hosting(
    count: int,
    soc: str,
    folder: Path,
    *,
    processes: int = 2,
    storage_bytes: int | None = None,
) -> Iterator[list[str]]:
    """Run devices in few processes; gives their serials, ends them all and what runs on them.

    Files stay in `folder`, for the next time. They end with this process too, even if it is
    killed. `hosted_commands` has their switches.

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


def hosted_commands(folder: Path, number: int) -> DeviceCommands:
    """The switches of the device with that index among the serials."""
    name = device_name(number)
    return DeviceCommands(name, folder / name)


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
