"""The lab's page with many devices and many open pages: what it costs, how soon a change shows.

    python -m benchmarks.lab_page --devices 200 --pages 50

The page's server is a process of its own; the pages are connections of this one, which read the
events. The CPU time of the server is told in part of one core, idle and while a device changes
every second. It is no measure of any device.
"""

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from harness.pool.pool import Pool


class Page(threading.Thread):
    """An open page; notes when it hears of something."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.heard = list[tuple[float, bytes]]()
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def run(self) -> None:
        """Read until the server ends."""
        while data := self._socket.recv(1 << 20):
            self.heard.append((time.monotonic(), data))


def main() -> None:
    """Print what it measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--seconds", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lab-page-") as folder:
        os.environ["QNNFARM_STATE_DIR"] = folder
        pool_file = Path(folder) / "pool.yaml"
        lines = [f"  - {{type: android, identifier: d{n}}}" for n in range(options.devices)]
        pool_file.write_text("\n".join(["devices:", *lines]))
        command = [
            sys.executable,
            "-m",
            "harness.cli",
            "serve",
            "--pool",
            str(pool_file),
            "--port",
            "0",
        ]
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
            try:
                measure(server, pool_file, options)
            finally:
                server.terminate()


def measure(server: "subprocess.Popen[str]", pool_file: Path, options: argparse.Namespace) -> None:
    """Open the pages, change devices, and print CPU time and delays."""
    line = server.stderr.readline() if server.stderr else ""
    port = int(re.search(r":(\d+)/", line)[1])  # type: ignore[index]
    pages = [Page(port) for _ in range(options.pages)]
    for page in pages:
        page.start()
    time.sleep(5)
    process = psutil.Process(server.pid)
    idle = busy_share(process, options.seconds, lambda: None)
    delays = list[float]()
    with Pool.open(pool_file, probe=False) as pool:
        number = iter(range(1_000_000))

        def change() -> None:
            name, told = f"d{next(number) % options.devices}", time.monotonic()
            pool.admin.drain(name, f"change {told}")
            time.sleep(1.2)
            mark = f"change {told}".encode()
            delays.extend(
                min((at for at, data in page.heard if mark in data), default=told + 60) - told
                for page in pages
            )

        changing = busy_share(process, options.seconds, change)
    print(f"{options.devices} devices, {options.pages} open pages")
    print(f"server: {idle:.1%} of a core idle, {changing:.1%} with a change every 1.2 s")
    ordered = sorted(delays)
    print(
        f"a change shows after {statistics.median(ordered):.2f} s (median), "
        f"{ordered[-1]:.2f} s (worst of {len(ordered)})"
    )


def busy_share(process: psutil.Process, seconds: float, step: Callable[[], object]) -> float:
    """Return the part of a core that a process used meanwhile."""
    before, began = process.cpu_times(), time.monotonic()
    while time.monotonic() - began < seconds:
        step()
        time.sleep(0.05)
    after, took = process.cpu_times(), time.monotonic() - began
    return (after.user + after.system - before.user - before.system) / took


if __name__ == "__main__":
    main()
