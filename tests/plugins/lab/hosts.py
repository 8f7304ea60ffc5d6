"""A lab on one machine: hosts with pools of their own, and one real PostgreSQL."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.command_line import QNNFARM, Started
from tests.postgresql_server import PostgresqlServer
from tests.system import program
from tests.waiting import wait_for

HELD = "until [ -e $TMPDIR/go ]; do sleep 0.1; done"
"""A command that ends when `Lab.let_go` says so."""
SERVES = "serves 2 devices"
DEAD_AFTER_S = 12
"""On a busy machine signs of life come seconds late."""
POOL = """
devices:
  - {{name: {host}-a, type: virtual, identifier: a, soc: SM8750}}
  - {{name: {host}-b, type: virtual, identifier: b, soc: SM8750}}
"""


_BOOT = """
hostname "$1"; mount --bind "$2/boot" /proc/sys/kernel/random/boot_id
mount --bind "$2/machine" /etc/machine-id; shift 2
until [ -e down ]; do "$@"; sleep 0.5; done
exec sleep infinity
"""
"""Init of a host, which starts its worker again, as systemd would, until it is taken down."""
_FORKED = f"""
import os
os.setsid()
log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1), os.dup2(log, 2)
{QNNFARM}
"""
"""A command of a session of its own, as a service is."""


@dataclass
class Host:
    """A host: a state folder, an adb server and a pool of its own, and its worker.

    Attributes:
        boots: whether it has a name, a boot id and processes of its own, in namespaces; whoever
            kills `process` then cuts its power.
    """

    name: str
    folder: Path
    url: str
    port: int
    boots: bool = False
    dead_after_s: float = DEAD_AFTER_S
    process: "subprocess.Popen[bytes] | Started | None" = None

    def start(self, *, wait: bool = True) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "pool.yaml").write_text(POOL.format(host=self.name))
        state = {"QNNFARM_STATE_DIR": str(self.folder), "ANDROID_ADB_SERVER_PORT": str(self.port)}
        before = self.log.count(SERVES)
        environment = os.environ | state
        if not self.boots:
            self.process = Started("-c", _FORKED, *self._worker(), cwd=self.folder, env=environment)
        else:
            command = [*self._boot(), sys.executable, "-m", "harness.cli", *self._worker()]
            with (self.folder / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    command, cwd=self.folder, env=environment, stderr=log, stdout=log,
                    start_new_session=True,
                )  # fmt: skip
        if wait:
            self.wait(before)

    def wait(self, before: int = 0) -> None:
        """Wait until its worker serves, once more than `before`."""
        wait_for(lambda: self.log.count(SERVES) > before, lambda: self.log)

    def _worker(self) -> list[str]:
        arguments = ["--db", self.url, "--pool", "pool.yaml", "--dead-after"]
        return ["worker", *arguments, f"{self.dead_after_s}"]

    def _boot(self) -> list[str]:
        (self.folder / "boot").write_text(f"{uuid.uuid4()}\n")
        (self.folder / "machine").write_text(f"{uuid.uuid5(uuid.NAMESPACE_DNS, self.name).hex}\n")
        kinds = ["--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return [str(program("unshare")), *kinds, "sh", "-c", _BOOT, "sh", self.name,
                str(self.folder)]  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        """Return what runs on a host that boots, but for its init."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)[1:]
        return []

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def take_down(self) -> None:
        """End the worker of a host that boots, for good."""
        (self.folder / "down").touch()
        if (worker := self.worker()) is not None:
            worker.terminate()
        wait_for(lambda: self.worker() is None, lambda: self.log)

    def worker(self) -> psutil.Process | None:
        """Return the worker of a host that boots, unless it is starting again."""
        for one in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if one.cmdline()[1:4] == ["-m", "harness.cli", "worker"]:
                    return one
        return None

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def kill(self) -> None:
        """End all processes of the worker at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self) -> int | None:
        if self.process is None:
            return None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(200)


@dataclass
class Lab:
    folder: Path
    server: PostgresqlServer
    hosts: list[Host] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url("lab")

    def plan(self, *commands: str, **more: object) -> Path:
        works = [
            {"kind": "command", "command": ["sh", "-c", command], "label": f"w{number}"}
            for number, command in enumerate(commands)
        ]
        path = self.folder / "plan.yaml"
        plan = {"name": "work", "db": self.url, "conditions": "none", "workloads": works}
        path.write_text(json.dumps(plan | more))
        return path

    def let_go(self) -> None:
        for tmp in self._tmp():
            (tmp / "go").touch()

    def hold(self) -> None:
        for tmp in self._tmp():
            (tmp / "go").unlink(missing_ok=True)

    def _tmp(self) -> Iterator[Path]:
        for host in self.hosts:
            yield from host.folder.glob("devices/*/root/data/local/tmp")

    def bury(self, host: Host) -> None:
        """Kill a worker, and let the others know, who would wait for a sign of life from it."""
        host.kill()
        self.ask(
            "UPDATE procrastinate_workers SET last_heartbeat = last_heartbeat - interval '1 hour'"
        )

    def submit(self, plan: Path, *arguments: str) -> Started:
        return Started("run", plan, "--lab", *arguments, cwd=self.folder)

    def run(self, plan: Path, *arguments: str) -> tuple[int, str, str]:
        """Submit a plan and wait for its end: exit code, answer and remarks."""
        with self.submit(plan, *arguments) as process:
            answer, remarks = process.communicate(timeout=200)
            return process.wait(), answer, remarks

    def finish(self, process: Started, **statuses: int) -> tuple[str, str]:
        """Wait for the end of a plan; give its answer and remarks. By then, jobs ended so."""
        answer, remarks = process.communicate(timeout=200)
        assert process.returncode == 0, answer + remarks
        assert self.statuses() == statuses
        return answer, remarks

    def ask(self, query: str) -> list[tuple[object, ...]]:
        return self.server.ask("lab", query)

    def owner(self) -> Host:
        """Wait until a cell has begun; the host that runs it."""
        begun = "SELECT device FROM plan_cells WHERE status = 'begun'"
        wait_for(lambda: self.ask(begun), self.statuses)
        (device,) = self.ask(begun)[0]
        return next(host for host in self.hosts if str(device).startswith(host.name))

    def statuses(self) -> Counter[object]:
        return Counter(s for (s,) in self.ask("SELECT status::text FROM procrastinate_jobs"))
