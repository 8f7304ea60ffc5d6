"""Latency of a lease while others wait: a ledger in a SQLite file against one in PostgreSQL.

    python -m benchmarks.lease --waiting 1 10 100
    python -m benchmarks.lease --waiting 50 --devices 200

Processes take turns on one device of this machine; with `--devices`, on one of so many virtual
devices, the others of which are held. Told is the time from the release of one to the lease of the
next, whose claim on the device is in it and is the same for both ledgers, and what the largest of
the waiting processes uses. PostgreSQL is a server of its own on this machine, reached by TCP. It is
no measure of any phone.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING

import psutil

from benchmarks.farm import MIB, SOC, connect_all
from harness.devices.spec import DeviceSpec
from harness.errors import LedgerError
from harness.pool.pool import LEDGER_VARIABLE, Pool
from harness.pool.requirement import Requirement
from tests.postgresql_server import running_postgresql_server
from tests.private_adb import free_port, private_adb

if TYPE_CHECKING:
    from multiprocessing import Queue

_SPAWN = multiprocessing.get_context("spawn")
_START_S = 600.0


@dataclass(frozen=True)
class Turns:
    """What so many processes saw, each of which took its turn again and again.

    Attributes:
        gaps: seconds from a release to the next lease.
        memory_bytes, descriptors: of the process with most of them.
    """

    gaps: Sequence[float]
    memory_bytes: int
    descriptors: int


def take_turns(
    specs: Sequence[DeviceSpec],
    times: "Queue[tuple[float, float]]",
    ready: "Queue[str]",
    stop: Event,
) -> None:
    """Lease a device again and again; put the times of each lease and its release.

    Puts an empty text once it begins, or why the ledger could not be used.
    """
    try:
        with Pool.of(specs) as pool:
            ready.put("")
            while not stop.is_set():
                with pool.acquire(Requirement(), timeout_s=_START_S):
                    leased = time.monotonic()
                times.put((leased, time.monotonic()))
    except LedgerError as error:
        ready.put(str(error))


def measure(specs: Sequence[DeviceSpec], waiting: int, seconds: float) -> Turns:
    """Let processes wait for one another on the one device that nobody else holds.

    Ends the program where the ledger cannot be used by so many, or nearly nobody gets a lease.
    """
    times: Queue[tuple[float, float]] = _SPAWN.Queue()
    ready: Queue[str] = _SPAWN.Queue()
    stop = _SPAWN.Event()
    processes = [
        _SPAWN.Process(target=take_turns, args=(specs, times, ready, stop))
        for _ in range(waiting + 1)
    ]
    for process in processes:
        process.start()
    reasons = [ready.get(timeout=_START_S) for _ in processes]
    began = time.monotonic()
    time.sleep(seconds)
    used = [psutil.Process(one.pid) for one in processes if one.is_alive()]
    memory_bytes = max((one.memory_info().rss for one in used), default=0)
    descriptors = max((one.num_fds() for one in used), default=0)
    stop.set()
    leases = []
    while any(process.is_alive() for process in processes) or not times.empty():
        try:
            leases.append(times.get(timeout=0.1))
        except Empty:
            continue
    while not ready.empty():
        reasons.append(ready.get())
    if failures := [reason for reason in reasons if reason]:
        raise SystemExit(f"{len(failures)} of {waiting + 1} processes ended: {failures[0]}")
    leases = sorted(lease for lease in leases if began < lease[0] < began + seconds)
    ends = [ended for _, ended in leases]
    gaps = [max(0.0, leased - ended) for ended, (leased, _) in zip(ends, leases[1:], strict=False)]
    if len(gaps) < 2:
        raise SystemExit(f"{len(gaps)} leases in {seconds:g} s: give more --seconds")
    return Turns(gaps, memory_bytes, descriptors)


@contextmanager
def devices(count: int) -> Iterator[Sequence[DeviceSpec]]:
    """Give this machine as a device, or so many virtual ones."""
    if count == 1:
        yield [DeviceSpec("local")]
        return
    from plugins.virtual_android.host import hosted_devices

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lease-")))
        server = stack.enter_context(private_adb(folder))
        farm = hosted_devices(count, SOC, folder / "farm", processes=4, unconfined=True)
        serials = stack.enter_context(farm)
        connect_all(server, serials)
        yield [DeviceSpec("android", serial) for serial in serials]


@contextmanager
def held(specs: Sequence[DeviceSpec]) -> Iterator[None]:
    """Hold all devices but one; print how long it took to have them."""
    began = time.monotonic()
    with Pool.of(specs) as pool:
        if len(specs) == 1:
            yield
            return
        with pool.acquire(Requirement(count=len(specs) - 1), timeout_s=_START_S):
            print(f"{len(specs) - 1} devices leased in {time.monotonic() - began:.1f} s")
            yield


@contextmanager
def ledgers() -> Iterator[dict[str, dict[str, str]]]:
    """Give the environment of each kind of ledger."""
    with (
        tempfile.TemporaryDirectory(prefix="lease-") as folder,
        running_postgresql_server(free_port, max_connections=300) as server,
    ):
        file = str(Path(folder) / "pool.db")
        yield {
            "SQLite": {LEDGER_VARIABLE: file},
            "PostgreSQL": {LEDGER_VARIABLE: server.url("postgres")},
        }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    print(f"load of this machine at the beginning: {os.getloadavg()[0]:.1f} on {os.cpu_count()}")
    head = "waiting  ledger      leases  median ms  95 % ms  ratio of medians  MiB  descriptors"
    with devices(options.devices) as specs, ledgers() as environments:
        first: dict[int, float] = {}
        for name, environment in environments.items():
            os.environ.update(environment)
            with held(specs):
                print(head)
                for waiting in options.waiting:
                    turns = measure(specs, waiting, options.seconds)
                    median_s = statistics.median(turns.gaps)
                    most_s = statistics.quantiles(turns.gaps, n=20)[-1]
                    ratio = median_s / first.setdefault(waiting, median_s)
                    print(
                        f"{waiting:7}  {name:10}  {len(turns.gaps):6}  {median_s * 1e3:9.1f}"
                        f"  {most_s * 1e3:7.1f}  {ratio:16.2f}  {turns.memory_bytes / MIB:3.0f}"
                        f"  {turns.descriptors:11}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
