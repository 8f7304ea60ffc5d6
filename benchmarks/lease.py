"""Latency of a lease while others wait: a ledger in a SQLite file against one in PostgreSQL.

    python -m benchmarks.lease --waiting 1 10 100

Processes take turns on one device of this machine. Told is the time from the release of one to the
lease of the next, whose claim on the device is in it and is the same for both ledgers. PostgreSQL
is a server of its own on this machine, reached by TCP. It is no measure of any phone.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING

from harness.devices.spec import DeviceSpec
from harness.errors import LedgerError
from harness.pool.pool import LEDGER_VARIABLE, Pool
from harness.pool.requirement import Requirement
from tests.postgresql_server import running_postgresql_server
from tests.private_adb import free_port

if TYPE_CHECKING:
    from multiprocessing import Queue

_SPAWN = multiprocessing.get_context("spawn")
_START_S = 300.0


def take_turns(times: "Queue[tuple[float, float]]", ready: "Queue[str]", stop: Event) -> None:
    """Lease the device again and again; put the times of each lease and its release.

    Puts an empty text once it begins, or why the ledger could not be used.
    """
    try:
        with Pool.of([DeviceSpec("local")]) as pool:
            ready.put("")
            while not stop.is_set():
                with pool.acquire(Requirement(), timeout_s=_START_S):
                    leased = time.monotonic()
                times.put((leased, time.monotonic()))
    except LedgerError as error:
        ready.put(str(error))


def measure(waiting: int, seconds: float) -> tuple[float, float, int]:
    """Return the median and the 95th percentile of the latency in seconds, and of how many.

    Ends the program where the ledger cannot be used by so many, or nearly nobody gets a lease.
    """
    times: Queue[tuple[float, float]] = _SPAWN.Queue()
    ready: Queue[str] = _SPAWN.Queue()
    stop = _SPAWN.Event()
    processes = [
        _SPAWN.Process(target=take_turns, args=(times, ready, stop)) for _ in range(waiting + 1)
    ]
    for process in processes:
        process.start()
    reasons = [ready.get(timeout=_START_S) for _ in processes]
    began = time.monotonic()
    time.sleep(seconds)
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
    return statistics.median(gaps), statistics.quantiles(gaps, n=20)[-1], len(gaps)


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
    options = parser.parse_args()
    print(f"load of this machine at the beginning: {os.getloadavg()[0]:.1f} on {os.cpu_count()}")
    print("waiting  ledger      leases  median ms  95 % ms  ratio of medians")
    with ledgers() as environments:
        for waiting in options.waiting:
            first = 0.0
            for name, environment in environments.items():
                os.environ.update(environment)
                median_s, most_s, count = measure(waiting, options.seconds)
                first = first or median_s
                print(
                    f"{waiting:7}  {name:10}  {count:6}  {median_s * 1e3:9.1f}  {most_s * 1e3:7.1f}"
                    f"  {median_s / first:5.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
