"""A farm of virtual devices on one host: `python -m benchmarks.farm`.

Devices in few processes behind one real adb server. The same commands (`sleep` of drawn lengths)
run on all of them twice: as cells of a plan, with leases, fences, journal and time limits, and
from a shell script that calls `adb shell` for each, one loop a device. What either takes beyond
the commands themselves is its overhead. Then processes contend for leases.
"""

import argparse
import os
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING

from benchmarks.memory_meter import MemoryMeter, resident_bytes
from tests.private_adb import private_adb

if TYPE_CHECKING:
    from harness.devices.adb.client import AdbServer
    from harness.plans.outcome import Summary
    from harness.pool.lease import Lease
    from harness.pool.pool import Pool
    from harness.pool.requirement import MemberStatus, Requirement

SOC = "SM8750"
LIMIT_OVERHEAD_S, LIMIT_MAKESPAN = 0.25, 1.05
MIB = 1 << 20
_CONNECTORS = 16


@dataclass(frozen=True)
class Load:
    """Seconds of each cell, longest first, as both ways take them."""

    seconds: Sequence[float]
    devices: int

    @property
    def bound_s(self) -> float:
        """No schedule is shorter: the sum over the devices, or the longest cell."""
        return max(sum(self.seconds) / self.devices, *self.seconds)

    def overhead_s(self, busy_s: float) -> float:
        """Return seconds of a cell beyond its command, with devices taken for `busy_s`."""
        return (busy_s - sum(self.seconds)) / len(self.seconds)


@dataclass
class TimedPool:
    """The pool as the scheduler sees it, with the time of each lease written down."""

    pool: "Pool"
    waits: list[float] = field(default_factory=list)

    def members(self) -> "Sequence[MemberStatus]":
        """See `Pool.members`."""
        return self.pool.members()

    def acquire(
        self, requirement: "Requirement", *, purpose: str = "", cancelled: Callable[[], bool]
    ) -> "Lease":
        """See `Pool.acquire`."""
        began = time.monotonic()
        lease = self.pool.acquire(requirement, purpose=purpose, cancelled=cancelled)
        self.waits.append(time.monotonic() - began)
        return lease


def first_contact(serials: Sequence[str]) -> float:
    """Return the seconds of one lease of all devices, which have not seen the harness before."""
    from harness.devices.spec import DeviceSpec
    from harness.pool.pool import Pool
    from harness.pool.requirement import Requirement

    began = time.monotonic()
    with (
        Pool.of([DeviceSpec("android", serial) for serial in serials]) as pool,
        pool.acquire(Requirement(count=len(serials))),
    ):
        return time.monotonic() - began


def run_plan(load: Load, serials: Sequence[str], folder: Path) -> tuple["Summary", TimedPool]:
    """Run all commands as cells of one plan."""
    from harness.devices.spec import DeviceSpec
    from harness.plans.cell_runner import DeviceCellRunner, ModelCache
    from harness.plans.cells import make_cell
    from harness.plans.journal import Journal
    from harness.plans.scheduler import run_matrix
    from harness.pool.pool import Pool
    from harness.pool.requirement import Requirement
    from harness.results.store import ResultsStore
    from harness.workloads.command import Command

    cells = [
        make_cell(
            f"cell-{number}",
            Command(command=("sleep", f"{seconds:.3f}")),
            Requirement(),
            session=number,
        )
        for number, seconds in enumerate(load.seconds)
    ]
    began = time.monotonic()
    with (
        Pool.of([DeviceSpec("android", serial) for serial in serials]) as pool,
        ResultsStore.open(folder / "results.db") as store,
        store.database.kept_open(),
    ):
        print(f"  pool of {len(serials)} devices opened in {time.monotonic() - began:.1f} s")
        journal = Journal(store.database, "farm")
        journal.begin(fresh=True)
        timed = TimedPool(pool)
        runner = DeviceCellRunner(store, ModelCache(), journal.plan_run_id)
        return run_matrix(cells, timed, runner, journal), timed


def run_script(load: Load, serials: Sequence[str], adb: str, folder: Path) -> tuple[float, float]:
    """Run the commands from a script a device; return seconds of all, and of all devices.

    Raises:
        RuntimeError: a command failed, so that the time is not that of the same work.
    """
    lists: Mapping[str, list[float]] = defaultdict(list)
    filled = dict.fromkeys(serials, 0.0)
    for seconds in load.seconds:
        least = min(filled, key=filled.__getitem__)
        lists[least].append(seconds)
        filled[least] += seconds
    scripts = []
    for number, serial in enumerate(serials):
        script = folder / f"device-{number}.sh"
        command = f"{shlex.quote(adb)} -s {shlex.quote(serial)} shell sleep"
        script.write_text("".join(f"{command} {s:.3f} </dev/null || exit\n" for s in lists[serial]))
        scripts.append(script)
    began = time.monotonic()
    running = [subprocess.Popen(["/bin/sh", str(script)]) for script in scripts]
    ends: list[float] = []

    def wait(one: "subprocess.Popen[bytes]") -> None:
        one.wait()
        ends.append(time.monotonic() - began)

    threads = [threading.Thread(target=wait, args=(one,)) for one in running]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed := sum(one.returncode != 0 for one in running):
        raise RuntimeError(f"{failed} of {len(running)} shell scripts failed")
    return max(ends), sum(ends)


def contend(count: int, processes: int) -> list[float]:
    """Return the seconds that leases took which several processes took and gave back at once."""
    code = (
        "import sys, time\n"
        "from harness.pool.requirement import Requirement\n"
        "from harness.pool.pool import Pool\n"
        "with Pool.open() as pool:\n"
        f"    for _ in range({count // processes}):\n"
        "        began = time.monotonic()\n"
        "        lease = pool.acquire(Requirement())\n"
        "        print(time.monotonic() - began)\n"
        "        lease.release()\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    return [float(line) for one in running for line in one.communicate()[0].split()]


def percentiles(values: Sequence[float]) -> str:
    """Compute p50, p90, p99 and the largest, in milliseconds."""
    cuts = quantiles(values, n=100, method="inclusive")
    shown = [f"p{p} {1000 * cuts[p - 1]:.0f} ms" for p in (50, 90, 99)]
    return f"{', '.join(shown)}, max {1000 * max(values):.0f} ms"


def connect_all(server: "AdbServer", serials: Sequence[str]) -> None:
    """Connect the adb server to every device."""
    with ThreadPoolExecutor(_CONNECTORS) as threads:
        list(threads.map(lambda serial: server.connect(serial, timeout_s=60), serials))


def children() -> list[int]:
    """Return processes started by this one."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def measure(args: argparse.Namespace, folder: Path) -> bool:
    """Run both ways; whether the limits hold."""
    from plugins.virtual_android.host import hosted_devices

    drawn = random.Random(args.seed)  # noqa: S311 - nothing secret about it
    lengths = [drawn.uniform(0.5, 1.5) * args.mean for _ in range(args.cells)]
    load = Load(sorted(lengths, reverse=True), args.devices)
    with private_adb(folder) as server, MemoryMeter() as meter:
        began = time.monotonic()
        with hosted_devices(
            args.devices, SOC, folder / "farm", processes=args.processes, unconfined=True
        ) as serials:
            connect_all(server, serials)
            started_s = time.monotonic() - began
            print(f"{args.devices} devices in {args.processes} processes: {started_s:.1f} s")
            memory_mib = sum(map(resident_bytes, children())) / args.devices / MIB
            print(f"  {memory_mib:.1f} MiB of memory a device")
            print(f"  first contact with all, scripts pushed: {first_contact(serials):.1f} s")
            print(f"{args.cells} cells of {args.mean * 0.5:g} to {args.mean * 1.5:g} s")
            print(f"  no schedule is shorter than {load.bound_s:.1f} s")
            script_s, script_busy = run_script(load, serials, str(server.adb_path), folder)
            print(f"shell script: {script_s:.1f} s")
            print(f"  {load.overhead_s(script_busy):.3f} s overhead a cell")
            summary, timed = run_plan(load, serials, folder)
            busy = sum(outcome.duration_s for outcome in summary.outcomes)
            whole = load.overhead_s(summary.elapsed_s * load.devices)
            rate = len(load.seconds) / summary.elapsed_s
            print(
                f"harness: {summary.elapsed_s:.1f} s, {summary.elapsed_s / script_s:.3f} x script"
            )
            print(f"  {rate:.1f} cells/s; {summary.count('done')} done")
            print(f"  {load.overhead_s(busy):.3f} s overhead a cell")
            print(f"  {whole:.3f} s with leases, scheduling and idle ends")
            print(f"  lease wait: {percentiles(timed.waits)} ({len(timed.waits)} leases)")
            waits = contend(args.leases, args.contenders)
            print(f"{args.contenders} processes, {len(waits)} leases: {percentiles(waits)}")
    print(
        f"peak memory of all processes {meter.peak_bytes / MIB:.0f} MiB, shared pages counted often"
    )
    wanted = args.leases // args.contenders * args.contenders
    checks = [
        (f"every lease taken: {len(waits)} of {wanted}", len(waits) == wanted),
        ("every cell done", summary.count("done") == args.cells),
        (f"overhead a cell {whole:.3f} s <= {LIMIT_OVERHEAD_S} s", whole <= LIMIT_OVERHEAD_S),
        (
            f"makespan {summary.elapsed_s / load.bound_s:.3f} x the bound <= {LIMIT_MAKESPAN}",
            summary.elapsed_s <= LIMIT_MAKESPAN * load.bound_s,
        ),
    ]
    for text, holds in checks:
        print(f"{'ok  ' if holds else 'MISS'} {text}")
    return all(holds for _, holds in checks)


def main() -> int:
    """Print what is measured; 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.farm", description=__doc__)
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--cells", type=int, default=5000)
    parser.add_argument("--mean", type=float, default=6.0, help="seconds of a cell, on average")
    parser.add_argument("--leases", type=int, default=200)
    parser.add_argument("--contenders", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
        return 0 if measure(args, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
