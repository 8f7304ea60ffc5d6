"""Deployment beside `adb push` of the same files: `python -m benchmarks.push`.

Random data of a container's sizes go to a virtual device through an adb server of its own, by
turns with the `adb` program and with `deploy`, which also hashes every file on the device and
links the run folder. Then the unchanged container is deployed again, and the bytes between adb
server and device are counted. With `--link`, both go over a link of that speed, as a phone's cable.
"""

import argparse
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tests.private_adb import private_adb
from tests.tcp_meter import TcpMeter

if TYPE_CHECKING:
    from harness.devices.device import Device

MIB = 1 << 20
LIMIT_RATIO, LIMIT_AGAIN_S, LIMIT_AGAIN_BYTES = 0.9, 1.0, 100_000
SOC = "SM8750"

# Of the whole: three parts of a model, its table of embeddings, a tokenizer, libraries.
_SHARES = {
    "part_1_of_3.bin": 0.31,
    "part_2_of_3.bin": 0.29,
    "part_3_of_3.bin": 0.28,
    "embedding.raw": 0.09,
    "libQnnHtpV79Skel.so": 0.015,
    "libQnnHtp.so": 0.005,
    "libGenie.so": 0.004,
    "tokenizer.json": 0.0045,
}
_SMALL_FILES, _SMALL_BYTES = 12, 3000


@dataclass(frozen=True)
class Bench:
    """A device behind an adb server, and the wire between both."""

    device: "Device"
    adb: str
    wire: TcpMeter

    def adb_push(self, files: Mapping[str, Path]) -> float:
        """Return the seconds of `adb push` into an empty folder."""
        folder = f"{self.device.work_root}/pushed"
        self.device.shell(f"rm -rf {folder} && mkdir -p {folder}", timeout_s=120)
        command = [self.adb, "-s", self.device.serial, "push", *map(str, files.values()), folder]
        began = time.monotonic()
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.monotonic() - began
        self.device.shell(f"rm -rf {folder}", timeout_s=120)
        return seconds

    def deploy(self, files: Mapping[str, Path]) -> float:
        """Return the seconds of a deployment; its run folder is removed afterwards."""
        from harness.deploy.deploy import deploy, remove_run

        run_id = f"bench-{secrets.token_hex(6)}"
        began = time.monotonic()
        deploy(self.device, files, run_id=run_id)
        seconds = time.monotonic() - began
        remove_run(self.device, run_id)
        return seconds

    def first_deploy(self, files: Mapping[str, Path]) -> float:
        """Deploy to a device that holds nothing."""
        root = self.device.work_root
        self.device.shell(f"rm -rf {root}/store {root}/incoming", timeout_s=120)
        return self.deploy(files)

    def hash_rate(self) -> float:
        """Return bytes per second at which the device hashes one large file, alone."""
        script = (
            "cd $TMPDIR && dd if=/dev/urandom of=hash.me bs=1048576 count=64 2>/dev/null\n"
            "hash=sha256sum; ! command -v openssl >/dev/null || hash='openssl dgst -sha256'\n"
            "began=$(date +%s%N); $hash hash.me >/dev/null; ended=$(date +%s%N); rm hash.me\n"
            "echo $((ended - began))"
        )
        return 64 * MIB / (int(self.device.shell(script, timeout_s=60).stdout) / 1e9)


def make_files(folder: Path, total: int) -> dict[str, Path]:
    """Return files of random data that sum up to about `total` bytes."""
    sizes = {name: int(share * total) for name, share in _SHARES.items()}
    sizes |= {f"config/{number}.json": _SMALL_BYTES for number in range(_SMALL_FILES)}
    files = {}
    for name, size in sizes.items():
        path = files[name] = folder / name.replace("/", "_")
        with path.open("wb") as file:
            for start in range(0, size, MIB):
                file.write(os.urandom(min(MIB, size - start)))
    return files


@contextlib.contextmanager
def bench(folder: Path, link: float | None) -> Iterator[Bench]:
    """Start a virtual device, an adb server and a wire that nothing else uses."""
    with private_adb(folder) as server:
        from harness.devices.adb.transport import AdbTransport
        from harness.devices.device import Device
        from plugins.virtual_android import manager

        try:
            virtual = manager.start("bench", SOC)
            host, _, device_port = virtual.serial.rpartition(":")
            with TcpMeter((host, int(device_port)), link) as wire:
                server.connect(f"127.0.0.1:{wire.port}")
                device = Device(AdbTransport(server, f"127.0.0.1:{wire.port}"))
                yield Bench(device, str(server.adb_path), wire)
        finally:
            manager.remove("bench")


def spread(values: Sequence[float], unit: str, digits: int = 2) -> str:
    """Format median, least and most."""
    shown = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return "{} {unit} (min {}, max {})".format(*shown, unit=unit)


@dataclass
class Results:
    """Seconds of each push and deployment; bytes on the wire of the unchanged ones."""

    pushes: list[float] = field(default_factory=list)
    deploys: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    again_bytes: list[int] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Speed of a deployment as a part of the speed of the `adb push` beside it."""
        return [push / took for push, took in zip(self.pushes, self.deploys, strict=True)]


def measure(bed: Bench, files: Mapping[str, Path], repetitions: int) -> Results:
    """Measure first pushes by turns, then unchanged ones."""
    results = Results()
    bed.deploy({"small": next(iter(files.values()))})  # the scripts are there from now on
    for number in range(repetitions):
        turns = [(bed.adb_push, results.pushes), (bed.first_deploy, results.deploys)]
        for act, seconds in turns if number % 2 == 0 else reversed(turns):
            seconds.append(act(files))
        print(
            f"  {number + 1}: adb push {results.pushes[-1]:.2f} s, "
            f"deploy {results.deploys[-1]:.2f} s",
            flush=True,
        )
    for _ in range(max(repetitions, 5)):
        before = bed.wire.total_bytes
        results.again.append(bed.deploy(files))
        results.again_bytes.append(bed.wire.total_bytes - before)
    return results


def report(results: Results, total: int) -> bool:
    """Print what was measured; whether all limits hold."""
    print(f"adb push          {spread([total / 1e6 / s for s in results.pushes], 'MB/s', 0)}")
    print(f"deploy            {spread([total / 1e6 / s for s in results.deploys], 'MB/s', 0)}")
    print(f"deploy / adb push {spread(results.ratios, 'x')}")
    print(f"unchanged deploy  {spread(results.again, 's', 3)}")
    print(f"on the wire       {spread(results.again_bytes, 'bytes', 0)}, removal included")
    checks = [
        (f"first push >= {LIMIT_RATIO} of adb push", median(results.ratios) >= LIMIT_RATIO),
        (f"unchanged push < {LIMIT_AGAIN_S} s", max(results.again) < LIMIT_AGAIN_S),
        (f"it sends < {LIMIT_AGAIN_BYTES} bytes", max(results.again_bytes) < LIMIT_AGAIN_BYTES),
    ]
    for text, holds in checks:
        print(f"{'ok  ' if holds else 'MISS'} {text}")
    return all(holds for _, holds in checks)


def run(folder: Path, args: argparse.Namespace) -> bool:
    """Make the files, measure and report."""
    from harness.deploy.digests import hash_files

    link = args.link * 1e6 if args.link else None
    with bench(folder, link) as bed:
        files = make_files(folder, args.mib * MIB)
        total = sum(path.stat().st_size for path in files.values())
        time.sleep(1.1)  # a file that was written just now is not remembered
        began = time.monotonic()
        hash_files(files.values())
        hashed_s = time.monotonic() - began
        over = f"a link of {args.link:g} MB/s" if link else "loopback"
        rate, load = bed.hash_rate() / 1e6, os.getloadavg()[0]
        print(f"{len(files)} files, {total / 1e6:.0f} MB, over {over}; load {load:.1f}")
        print(f"the host hashed them in {hashed_s:.1f} s, once; that is not counted below")
        print(f"the device hashes at {rate:.0f} MB/s, on one of {os.cpu_count()} processors")
        return report(measure(bed, files, args.repetitions), total)


def main() -> int:
    """Run the benchmark; return 0 if all limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="size of the container")
    parser.add_argument("--repetitions", type=int, default=5, help="of each, by turns")
    parser.add_argument("--link", type=float, default=0, help="MB/s between adb server and device")
    parser.add_argument("--folder", type=Path, help="work here, not in a temporary folder")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="qnnfarm-push-", dir=args.folder))
    try:
        return 0 if run(root, args) else 1
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
