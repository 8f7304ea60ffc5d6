"""A holder that is cut off from the ledger, from its device, or from both; a rival that is not.

The holder runs in a network namespace with one cable to the ledger, a real PostgreSQL server, and
one to the device, a real SSH server. What it runs on the device holds a lock there and writes its
token: another command that gets the lock proves that it has ended.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from tests.network import Link, linked_to
from tests.plugins.ssh_devices import partitioned_holder
from tests.plugins.ssh_devices.ssh_server import running_ssh_server
from tests.postgresql_server import running_postgresql_server
from tests.system import program
from tests.tcp_meter import TcpMeter
from tests.waiting import wait_for

_ROOT = Path(__file__).parents[3]
_WAIT_S = 120.0
_LATE = """
import runpy, sys
sys.stdin.readline()  # once the cables are there
sys.argv = [sys.argv[1], open(sys.argv[2]).read(), sys.argv[3]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("namespaces", "root"),
    pytest.mark.timeout(600),
]


@dataclass
class Partition:
    """A holder behind two cables, and a pool of the same device on this side.

    Attributes:
        folder: on the device.
    """

    process: "subprocess.Popen[str]"
    to_ledger: Link
    to_device: Link
    rival: Pool
    folder: Path

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.answer()

    def start_work(self) -> None:
        """Let the holder lease the device, and run there what holds the lock without end."""
        token = self.ask("lease")
        beats = self.folder / "beats"
        loop = f"while :; do echo {token} >>{beats}; sleep 0.05; done"
        self.tell(f"exec flock -n {self.folder}/lock sh -c '{loop}'")
        wait_for(lambda: beats.exists() and beats.read_text().count("\n") > 3)

    def beats(self) -> int:
        return (self.folder / "beats").read_text().count("\n")

    def lease_for_rival(self) -> None:
        """Check that the rival gets the device, and that nothing of the holder runs there then."""
        with self.rival.acquire(Requirement(), timeout_s=_WAIT_S) as lease:
            before = self.beats()
            lock = f"flock -n {self.folder}/lock echo alone"
            assert lease.device.shell(lock).stdout == "alone\n"
            time.sleep(0.5)
            assert self.beats() == before


@pytest.fixture
def partition(tmp_path: Path, new_port: Callable[[], int]) -> Iterator[Partition]:
    with ExitStack() as stack:
        server = stack.enter_context(running_postgresql_server(new_port))
        board = stack.enter_context(running_ssh_server(tmp_path, new_port()))
        unshare = [str(program("unshare")), "--net", sys.executable]
        config = tmp_path / "far_config"
        url = tmp_path / "url"
        process = subprocess.Popen(
            [*unshare, "-c", _LATE, partitioned_holder.__file__, str(url), str(config)],
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        to_ledger = stack.enter_context(linked_to(process.pid))
        to_device = stack.enter_context(linked_to(process.pid))
        ledger_at = stack.enter_context(
            TcpMeter(("127.0.0.1", server.port), host=to_ledger.address)
        )
        device_at = stack.enter_context(TcpMeter(("127.0.0.1", board.port), host=to_device.address))
        near = f"127.0.0.1:{server.port}"
        url.write_text(
            server.url("postgres").replace(near, f"{to_ledger.address}:{ledger_at.port}")
        )
        key = board.known_hosts.read_text().split(maxsplit=1)[1]
        config.write_text(
            board.config.read_text()
            .replace("HostName 127.0.0.1", f"HostName {to_device.address}")
            .replace(f"Port {board.port}", f"Port {device_at.port}")
            .replace(str(board.known_hosts), str(tmp_path / "far_hosts"))
        )
        (tmp_path / "far_hosts").write_text(f"[{to_device.address}]:{device_at.port} {key}")
        rival = stack.enter_context(
            partitioned_holder.open_pool(server.url("postgres"), board.config)
        )
        made = Partition(process, to_ledger, to_device, rival, tmp_path)
        assert made.ask("begin") == "ready"
        yield made


def test_a_holder_without_its_ledger_is_ended_on_the_device(partition: Partition) -> None:
    partition.start_work()
    partition.to_ledger.cut()
    partition.lease_for_rival()
    partition.to_ledger.mend()
    assert partition.answer() == "LeaseLostError"
    assert partition.ask(f"touch {partition.folder}/late") == "LeaseLostError"
    assert not (partition.folder / "late").exists()
    partition.ask("release")
    assert partition.ask("lease").isdecimal()
    assert partition.ask("echo again") == "again"


def test_a_holder_without_its_device_gives_it_up(partition: Partition) -> None:
    partition.start_work()
    partition.to_device.cut()
    assert partition.answer() in {"DeviceTimeoutError", "DeviceLostError", "HostError"}
    partition.tell("release")
    partition.lease_for_rival()
    partition.to_device.mend()
    assert partition.answer() == "released"


def test_a_holder_that_comes_back_touches_nothing(partition: Partition) -> None:
    partition.start_work()
    partition.to_ledger.cut()
    partition.to_device.cut()
    partition.lease_for_rival()
    partition.to_device.mend()
    partition.to_ledger.mend()
    assert partition.answer() == "LeaseLostError"
    assert partition.ask(f"touch {partition.folder}/late") == "LeaseLostError"
    assert not (partition.folder / "late").exists()
