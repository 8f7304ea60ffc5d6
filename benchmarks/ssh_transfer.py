"""Files over SSH beside `scp`: `python -m benchmarks.ssh_transfer`.

A file of random data goes to a real OpenSSH server on loopback and back, directly and through
another one (`ProxyJump`), by turns with `scp` and with `Device.push` and `Device.pull`.
"""

import argparse
import contextlib
import filecmp
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec
from tests.plugins.ssh_devices.ssh_server import SshServer, running_ssh_server
from tests.system import program

MIB = 1 << 20
INNER = "inner"


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[SshServer]:
    """Run two servers: the configuration of the first has `board`, and `inner` through it."""
    with contextlib.ExitStack() as stack:
        running = []
        for name in ("outer", INNER):
            (folder / name).mkdir()
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            running.append(stack.enter_context(running_ssh_server(folder / name, port)))
        outer, inner = running
        outer.configure(
            "ProxyJump board",
            f"Port {inner.port}",
            f"UserKnownHostsFile {inner.known_hosts}",
            f"IdentityFile {inner.key}",
            host=INNER,
        )
        yield outer


def seconds(act: Callable[[], object]) -> float:
    """Return how long `act` takes."""
    began = time.monotonic()
    act()
    return time.monotonic() - began


def measure(folder: Path, server: SshServer, host: str, size: int, repetitions: int) -> None:
    """Measure one way to a host, and print a line for each direction."""
    local, remote, back = folder / "local", folder / "remote", folder / "back"
    scp = [str(program("ssh").with_name("scp")), "-q", "-F", str(server.config)]
    with Devices(ssh_config=server.config) as devices:
        device = devices.open(DeviceSpec("linux", host))
        device.shell("true")  # connected, as it is for all commands but the first
        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "push": (
                lambda: subprocess.run([*scp, str(local), f"{host}:{remote}"], check=True),
                lambda: device.push(local, str(remote), timeout_s=3600),
            ),
            "pull": (
                lambda: subprocess.run([*scp, f"{host}:{remote}", str(back)], check=True),
                lambda: device.pull(str(remote), back, timeout_s=3600),
            ),
        }
        for name, (theirs, ours) in ways.items():
            pairs = []
            for number in range(repetitions):
                turns = (theirs, ours) if number % 2 == 0 else (ours, theirs)
                took = {act: seconds(act) for act in turns}
                pairs.append((took[theirs], took[ours]))
            scp_s, our_s = (median(column) for column in zip(*pairs, strict=True))
            ratio = median(theirs / ours for theirs, ours in pairs)
            print(
                f"{name} {'direct' if host != INNER else 'ProxyJump':9}  "
                f"scp {size / scp_s / 1e6:4.0f} MB/s  qnnfarm {size / our_s / 1e6:4.0f} MB/s  "
                f"{ratio:.2f} x (min {min(a / b for a, b in pairs):.2f})",
                flush=True,
            )
        if not filecmp.cmp(local, back, shallow=False):
            raise SystemExit("the file that came back is another one")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=200, help="size of the file")
    parser.add_argument("--repetitions", type=int, default=5, help="of each, by turns")
    parser.add_argument("--folder", type=Path, help="work here, not in a temporary folder")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="qnnfarm-ssh-", dir=args.folder))
    try:
        with (root / "local").open("wb") as file:
            for _ in range(args.mib):
                file.write(os.urandom(MIB))
        print(f"{args.mib} MiB over loopback; load {os.getloadavg()[0]:.1f}")
        with servers(root) as server:
            for host in ("board", INNER):
                measure(root, server, host, args.mib * MIB, args.repetitions)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
