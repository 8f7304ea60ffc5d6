"""Processes of a lab, which lease devices and have each hold a lock while they work there.

    lab_worker.py FOLDER TTL_S

reads the location of the ledger, then starts one for each number that it reads, and prints its pid.

The devices are four folders of this machine, each a device of its own to fences. What a holder runs
there takes a lock without waiting, and writes its token down: a second holder would fail at it.
"""

import dataclasses
import importlib
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from harness.clock import SystemClock
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.devices.local import LocalTransport
from harness.devices.spec import DeviceSpec
from harness.errors import LeaseLostError
from harness.pool.config import DeviceEntry, parse_config
from harness.pool.members import Member
from harness.pool.opener import Opener
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement

DEVICES = ("d0", "d1", "d2", "d3")
WORK = """
exec flock -n {folder}/lock sh -c 'echo {token} >>{folder}/holders; sleep 0.02; echo well' \
|| echo two >>{folder}/violations
"""


class Folder(LocalTransport):
    """A folder of this machine as the storage of a device."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def find_root(self, device: Device, timeout_s: float) -> str:  # noqa: ARG002
        return str(self.folder / "root")

    def properties(self, device: Device, timeout_s: float) -> DeviceProperties:
        found = super().properties(device, timeout_s)
        return dataclasses.replace(found, hardware_serial=f"folder-{self.folder.name}")


class Folders(Opener):
    """Opens folders of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def discover(self, _: DeviceEntry) -> tuple[DeviceSpec, ...]:
        return ()

    def open(self, member: Member) -> Device:
        return Device(Folder(self._folder / member.name))

    def forget(self, member: Member) -> None:
        pass

    def restart_server(self, member: Member) -> None:
        pass

    def close(self) -> None:
        pass


def make_pool(ledger: str, folder: Path, ttl_s: float) -> Pool:
    """Open the pool of the four devices."""
    config = parse_config(
        f"lease: {{ttl_s: {ttl_s}}}\nrecovery: {{steps: [reconnect], backoff_s: 1}}"
    )
    members = [Member(name, DeviceSpec("android", name)) for name in DEVICES]
    return Pool(members, config, Folders(folder), ledger=ledger, clock=SystemClock())


def work(number: int, ledger: str, folder: Path, ttl_s: float) -> None:
    """Lease devices until this process is ended."""
    log = folder / f"worker{number}.jsonl"
    with make_pool(ledger, folder, ttl_s) as pool, log.open("a", buffering=1) as told:
        while True:
            began, before = time.time(), pool.ledger._counter("token") or 0
            try:
                with pool.acquire(Requirement()) as lease:
                    waited, overtook = (began, time.time()), lease.token - before - 1
                    device = lease.device
                    place = folder / device.member
                    said = device.shell(WORK.format(folder=place, token=lease.token)).stdout
            except LeaseLostError as error:
                told.write(json.dumps({"lost": str(error)}) + "\n")
                continue
            record = {"worker": number, "token": lease.token, "said": said}
            told.write(json.dumps({**record, "waited": waited, "overtook": overtook}) + "\n")


def main() -> None:
    """Start a worker for each number."""
    folder, ttl_s = Path(sys.argv[1]), float(sys.argv[2])
    ledger = sys.stdin.readline().strip()
    importlib.import_module("psycopg")

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with (folder / "ends").open("a") as ends:
                    ends.write(f"{ended[0]} {os.waitstatus_to_exitcode(ended[1])}\n")

    signal.signal(signal.SIGCHLD, reap)  # so that they leave no zombies
    for line in sys.stdin:
        number = int(line)
        if pid := os.fork():
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        errors = os.open(folder / f"worker{number}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, sys.stderr.fileno())
        try:
            work(number, ledger, folder, ttl_s)
        except BaseException as error:  # noqa: BLE001 - the end of a process
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(1)


if __name__ == "__main__":
    main()
