"""A lab of virtual devices beside one host: `python -m benchmarks.lab`.

The same commands (`sleep` of drawn lengths) run as cells of a plan: on the devices of one host by
`qnnfarm run` into a file, then on those of all hosts by `qnnfarm worker` and `qnnfarm run --lab`
through a PostgreSQL server of its own. Each host is an adb server, a state folder and a pool. What
the devices are taken for beyond the commands is the overhead; a cell's is told, and the ratio.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.farm import SOC, connect_all
from tests.postgresql_server import PostgresqlServer, running_postgresql_server
from tests.private_adb import free_port, private_environment, private_variables

QNNFARM = (sys.executable, "-m", "harness.cli")
_STARTING_S = 300.0


@dataclass(frozen=True)
class Host:
    """A host with its devices."""

    folder: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its processes."""
        return {**os.environ, **private_variables(self.folder, self.port)}

    @contextmanager
    def devices(self, count: int, processes: int) -> Iterator[None]:
        """Start its adb server and devices, and write its pool."""
        from harness.devices.adb.server import ensure_server
        from plugins.virtual_android.host import hosted_devices

        with ExitStack() as stack:
            with private_environment(self.folder, self.port):
                server = ensure_server()
                stop = [str(server.adb_path), "kill-server"]
                stack.callback(
                    subprocess.run, stop, env=self.environment, capture_output=True, check=False
                )
                farm = hosted_devices(
                    count, SOC, self.folder / "farm", processes=processes, unconfined=True
                )
                serials = stack.enter_context(farm)
                connect_all(server, serials)
            names = [{"type": "android", "identifier": serial} for serial in serials]
            (self.folder / "pool.yaml").write_text(json.dumps({"devices": names}))
            yield

    @contextmanager
    def worker(self, database: str, devices: int) -> Iterator[None]:
        """Run a worker, once it serves."""
        log = self.folder / "worker.log"
        with log.open("wb") as opened:
            command = [*QNNFARM, "worker", "--pool", "pool.yaml", "--db", database]
            worker = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=opened, stderr=opened
            )
        try:
            deadline = time.monotonic() + _STARTING_S
            while f"serves {devices} device" not in log.read_text():
                if worker.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(log.read_text()[-2000:])
                time.sleep(0.1)
            yield
        finally:
            worker.terminate()
            worker.wait()


def write_plan(folder: Path, seconds: Sequence[float], database: str) -> Path:
    """Write a plan of one command for each length."""
    works = [
        {"kind": "command", "command": ["sleep", f"{one:.3f}"], "label": f"w{number}"}
        for number, one in enumerate(seconds)
    ]
    path = folder / "plan.yaml"
    plan = {"name": "bench", "db": database, "conditions": "none", "workloads": works}
    path.write_text(json.dumps(plan))
    return path


def run_plan(host: Host, plan: Path, *options: str) -> float:
    """Run a plan; return the seconds from the first lease request to the last release.

    Raises:
        RuntimeError: not every cell is done.
    """
    done = subprocess.run(
        [*QNNFARM, "run", str(plan), *options],
        cwd=host.folder,
        env=host.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r" 0 failed, 0 left in ([\d.]+) s", done.stdout)
    if match is None:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-1000:])
    return float(match[1])


def elapsed_in_lab(server: PostgresqlServer) -> float:
    """Return the seconds from the beginning of the first cell to the end of the last."""
    query = (
        "SELECT extract(epoch FROM max(changed_at) - min(changed_at - duration_s * interval '1 s'))"
        " FROM plan_cells"
    )
    with closing(server.connect("lab")) as connection:
        ((elapsed,),) = connection.execute(query).fetchall()
    return float(str(elapsed))


def measure(args: argparse.Namespace, folder: Path, server: PostgresqlServer) -> None:
    """Run both ways, and print what a cell costs."""
    drawn = random.Random(args.seed)  # noqa: S311 - nothing secret about it
    lengths = [drawn.uniform(0.5, 1.5) * args.mean for _ in range(args.cells)]
    lengths.sort(reverse=True)
    share = lengths[:: args.hosts]
    hosts = [Host(folder / f"host{number}", free_port()) for number in range(args.hosts)]
    server.create("lab")
    database = server.url("lab")

    def tell(name: str, seconds: Sequence[float], devices: int, elapsed_s: float) -> float:
        overhead_s = (elapsed_s * devices - sum(seconds)) / len(seconds)
        bound_s = max(sum(seconds) / devices, *seconds)
        print(
            f"{name}: {len(seconds)} cells on {devices} devices in {elapsed_s:.1f} s, "
            f"{elapsed_s / bound_s:.3f} x the bound, {len(seconds) / elapsed_s:.1f} cells/s, "
            f"{overhead_s:.3f} s of a device for each cell beyond its command",
            flush=True,
        )
        return overhead_s

    with ExitStack() as stack:
        for host in hosts:
            host.folder.mkdir()
            stack.enter_context(host.devices(args.devices, args.processes))
        print(f"{args.hosts} hosts x {args.devices} devices; load {os.getloadavg()[0]:.1f}")
        first = hosts[0]
        run_plan(first, write_plan(first.folder, [0.0] * args.devices * 2, "warm.db"))
        alone = run_plan(first, write_plan(first.folder, share, "results.db"))
        one_s = tell("one host", share, args.devices, alone)
        for host in hosts:
            stack.enter_context(host.worker(database, args.devices))
        followed_s = run_plan(first, write_plan(first.folder, lengths, database), "--lab")
        lab_s = tell("lab", lengths, args.devices * args.hosts, elapsed_in_lab(server))
        print(f"lab, as its command tells: {followed_s:.1f} s")
        print(f"a cell's overhead in the lab is {lab_s / one_s:.2f} x that of one host")
        print(f"load {os.getloadavg()[0]:.1f} at the end")


def main() -> None:
    """Print what is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description=__doc__)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--devices", type=int, default=70, help="of each host")
    parser.add_argument("--processes", type=int, default=2, help="that share a host's devices")
    parser.add_argument("--cells", type=int, default=5000)
    parser.add_argument("--mean", type=float, default=6.0, help="seconds of a cell, on average")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder,
        running_postgresql_server(free_port) as server,
    ):
        measure(args, Path(folder), server)


if __name__ == "__main__":
    main()
