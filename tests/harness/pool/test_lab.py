"""A lab: processes on three hosts, one ledger in PostgreSQL, and whatever happens to them."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.pool.requirement import Requirement
from tests.harness.pool import lab_worker
from tests.network import Link, linked_to
from tests.postgresql_server import PostgresqlServer, running_postgresql_server
from tests.system import program
from tests.tcp_meter import TcpMeter

_HOSTS = 3
_WORKERS = 12
_TTL_S = 6.0
_LONGEST_STOP_S = 15.0
_WAKING_S = 2.0
_LONGEST_CUT_S = 12.0
_RECONNECTING_S = 30.0
"""So long may a connection be silent after a cut: TCP doubles the pause between its attempts."""
_ROOT = Path(__file__).parents[3]
_ON_HOST = """
while ! ip link show up | grep -q eth; do sleep 0.1; done
hostname "$1"; mount --bind "$2/boot" /proc/sys/kernel/random/boot_id
mount --bind "$2/machine" /etc/machine-id; shift 2; exec "$@"
"""


@dataclass
class Lab:
    """Twelve processes on three hosts: namespaces with a name, machine and boot of their own.

    Each host has a cable of its own to the ledger, which may be cut.
    """

    server: PostgresqlServer
    folder: Path
    hosts: list["subprocess.Popen[str]"] = field(default_factory=list)
    workers: dict[int, int] = field(default_factory=dict)
    stopped: dict[int, float] = field(default_factory=dict)
    slept: list[tuple[int, float, float]] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    cut: dict[int, float] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)
    done: Counter[str] = field(default_factory=Counter)

    @property
    def ledger(self) -> str:
        return self.server.url("postgres", socket=True)

    def add_host(self) -> None:
        """Start a host, which starts workers."""
        host = self.folder / f"host{len(self.hosts)}"
        host.mkdir()
        (host / "boot").write_text(f"{len(self.hosts):08}-0000-0000-0000-000000000000\n")
        (host / "machine").write_text(f"{len(self.hosts):032}\n")
        words = [sys.executable, lab_worker.__file__, str(self.folder), str(_TTL_S)]
        unshare = [str(program("unshare")), "--mount", "--uts", "--net", "sh", "-c", _ON_HOST, "sh"]
        process = subprocess.Popen(
            [*unshare, host.name, str(host), *words],
            env={**os.environ, "QNNFARM_STATE_DIR": str(host), "PYTHONPATH": str(_ROOT)},
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hosts.append(process)
        link = self.stack.enter_context(linked_to(process.pid))
        self.links.append(link)
        server = "127.0.0.1", self.server.port
        relay = self.stack.enter_context(TcpMeter(server, host=link.address))
        assert process.stdin is not None
        near, far = f"127.0.0.1:{self.server.port}", f"{link.address}:{relay.port}"
        process.stdin.write(self.server.url("postgres").replace(near, far) + "\n")

    def start(self, number: int) -> None:
        host = self.hosts[number % len(self.hosts)]
        assert host.stdin is not None
        assert host.stdout is not None
        host.stdin.write(f"{number}\n")
        host.stdin.flush()
        self.workers[number] = int(host.stdout.readline())

    def revive(self) -> None:
        """Start workers again that began while the server was away, as systemd does."""
        for number, pid in self.workers.items():
            if not Path(f"/proc/{pid}").exists():
                said = (self.folder / f"worker{number}.err").read_text()
                assert "cannot be used: con" in said, (number, self._end_of(pid), said[-3000:])
                assert "return Pool(" in said, said[-3000:]  # at its first connection
                self.done["began too early"] += 1
                self.start(number)

    def _end_of(self, pid: int) -> list[str]:
        """Return the exit status with which a worker ended, negative for a signal."""
        ends = (self.folder / "ends").read_text().splitlines()
        return [line for line in ends if line.startswith(f"{pid} ")]

    def strike(self, choose: random.Random) -> None:
        """Do one thing to the lab that happens to labs."""
        what = choose.choices(["kill", "stop", "cut", "restart"], [10, 10, 3, 1])[0]
        number = choose.choice([n for n in self.workers if n not in self.stopped] or [0])
        self.done[what] += 1
        if what == "restart":
            self.server.stop()
            self.server.start()
        elif what == "cut":
            self._cut(choose.randrange(len(self.links)), choose.uniform(0.1, _LONGEST_CUT_S))
        elif what == "kill":
            self._end(number)
            self.start(number)
        else:
            os.kill(self.workers[number], signal.SIGSTOP)
            self.stopped[number] = time.time() + choose.uniform(0.1, _LONGEST_STOP_S)
            self.slept.append((number, time.time(), self.stopped[number] + _WAKING_S))

    def _cut(self, host: int, seconds: float) -> None:
        """Cut a host off from the ledger, not from its devices."""
        self.links[host].cut()
        self.cut[host] = time.time() + seconds
        ends = self.cut[host] + _RECONNECTING_S
        cut_off = [number for number in self.workers if number % len(self.hosts) == host]
        self.slept += [(number, time.time(), ends) for number in cut_off]

    def wake(self, *, everyone: bool = False) -> None:
        for host, until in list(self.cut.items()):
            if everyone or time.time() > until:
                del self.cut[host]
                self.links[host].mend()
        for number, until in list(self.stopped.items()):
            if everyone or time.time() > until:
                del self.stopped[number]
                os.kill(self.workers[number], signal.SIGCONT)

    def end(self) -> None:
        self.wake(everyone=True)
        for number in list(self.workers):
            self._end(number)
        for host in self.hosts:
            host.communicate()
        self.hosts.clear()
        self.stack.close()

    def _end(self, number: int) -> None:
        self.stopped.pop(number, None)
        with suppress(ProcessLookupError):
            os.kill(self.workers.pop(number), signal.SIGKILL)

    def was_awake(self, lease: dict[str, Any]) -> bool:
        """Return whether a worker was not stopped while it waited for a lease."""
        began, ended = lease["waited"]
        return not any(
            number == lease["worker"] and since < ended and began < until
            for number, since, until in self.slept
        )

    def count(self) -> int:
        return sum(log.read_text().count('"token"') for log in self.folder.glob("worker*.jsonl"))

    def told(self) -> list[dict[str, Any]]:
        lines = []
        for log in self.folder.glob("worker*.jsonl"):
            for line in log.read_text().splitlines():
                try:
                    lines.append(json.loads(line))
                except ValueError:  # its writer was killed
                    self.done["cut line"] += 1
        return lines


@pytest.fixture
def lab(tmp_path: Path, new_port: Callable[[], int]) -> Iterator[Lab]:
    for name in lab_worker.DEVICES:
        (tmp_path / name / "root").mkdir(parents=True)
    with running_postgresql_server(new_port) as server:
        made = Lab(server, tmp_path)
        try:
            for _ in range(_HOSTS):
                made.add_host()
            yield made
        finally:
            made.end()


@pytest.mark.slow
@pytest.mark.needs("namespaces", "root")
@pytest.mark.timeout(7200)
def test_no_device_ever_has_two_holders_and_nobody_waits_for_long(lab: Lab) -> None:
    wanted, seed = int(os.environ.get("QNNFARM_LEASES", "10000")), random.randrange(1 << 32)  # noqa: S311
    choose = random.Random(seed)  # noqa: S311
    for number in range(_WORKERS):
        lab.start(number)
    strike_at = time.monotonic() + 5
    end_at = time.monotonic() + 60 * float(os.environ.get("QNNFARM_MINUTES", "100"))
    while lab.count() < wanted and time.monotonic() < end_at:
        time.sleep(0.2)
        lab.wake()
        if time.monotonic() > strike_at:
            lab.strike(choose)
            strike_at = time.monotonic() + choose.uniform(1.0, 6.0)
        lab.revive()
    lab.end()
    leases = [line for line in lab.told() if "token" in line]
    lost = [line["lost"] for line in lab.told() if "lost" in line]
    awake = [line for line in leases if lab.was_awake(line)]
    overtook = sorted(line["overtook"] for line in awake)
    waited_s = sorted(line["waited"][1] - line["waited"][0] for line in awake)
    half = len(awake) // 2
    sys.stdout.write(
        f"seed {seed}: {len(leases)} leases, {len(lost)} lost, {dict(lab.done)}; {len(awake)} "
        f"whose process did not sleep waited {waited_s[half]:.2f} s (median), {waited_s[-1]:.1f} s "
        f"(longest), others served meanwhile {overtook[half]} (median), {overtook[-1]} (most)\n"
    )
    for name in lab_worker.DEVICES:
        assert not (lab.folder / name / "violations").exists()
        tokens = list(map(int, (lab.folder / name / "holders").read_text().split()))
        assert tokens == sorted(set(tokens)), name
    assert {line["said"] for line in leases} == {"well\n"}
    assert overtook[-1] <= 2 * _WORKERS
    with closing(lab_worker.make_pool(lab.ledger, lab.folder, _TTL_S)) as pool:
        for name in lab_worker.DEVICES:  # whoever waits for a device repairs what was left undone
            with pool.acquire(Requirement(name=name), timeout_s=300) as lease:
                assert lease.device.shell("echo here").stdout == "here\n"
        assert pool.ledger.waiting() == []
        assert {str(member.state) for member in pool.members()} == {"ready"}
