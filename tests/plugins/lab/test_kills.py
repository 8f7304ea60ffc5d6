"""A plan over three hosts, whose parts are killed at random moments; `make lab-kills` runs it.

Sizes: `QNNFARM_LAB_CELLS` (300), `QNNFARM_LAB_KILLS` (100); `QNNFARM_LAB_SEED` repeats a draw.
"""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.plugins.lab.hosts import Host, Lab
from tests.postgresql_server import running_postgresql_server
from tests.waiting import wait_for

CELLS = int(os.environ.get("QNNFARM_LAB_CELLS", "300"))
KILLS = int(os.environ.get("QNNFARM_LAB_KILLS", "100"))
SEED = int(os.environ.get("QNNFARM_LAB_SEED", str(random.randrange(1 << 32))))  # noqa: S311
BENCH = {
    "kind": "bench", "prompt_tokens": 8, "new_tokens": 2, "repetitions": 1, "warmup": 0,
}  # fmt: skip
STUCK_S = 600.0
WEIGHTS = {"worker": 4, "host": 3, "pause": 3, "database": 2, "submitter": 2}
LASTING = ("adb", "plugins.virtual_android")
"""Programs of a host that outlive its worker: the adb server, and the devices themselves."""


@dataclass
class Campaign:
    """A lab whose plan goes on whatever happens to its parts."""

    lab: Lab
    plan: Path
    choose: random.Random
    submitter: "subprocess.Popen[bytes] | None" = None
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    logs: list[Path] = field(default_factory=list)

    def submit(self) -> None:
        self.logs.append(self.lab.folder / f"submitter{len(self.logs)}.log")
        with self.logs[-1].open("wb") as log:
            self.submitter = subprocess.Popen(
                [sys.executable, "-m", "harness.cli", "run", str(self.plan), "--lab"],
                stdout=log,
                stderr=log,
                cwd=self.lab.folder,
            )

    def done(self) -> int:
        ((count,),) = self.lab.ask("SELECT count(*) FROM runs WHERE status = 'done'")
        return int(str(count))

    def is_over(self) -> bool:
        """Return whether all is up again, and the command has seen the plan's end."""
        return not self.later and self.submitter is not None and self.submitter.poll() is not None

    def strike(self) -> None:
        """Kill something, which comes back a little later."""
        kind = self.choose.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        away_s = self.choose.uniform(0, 4)
        host = self.choose.choice([host for host in self.lab.hosts if host.is_up] or [None])
        if kind == "submitter" and self.submitter is not None:
            self.submitter.kill()
            self.submitter.wait()
            self.submit()
        elif kind == "database":
            self.lab.server.stop()
            time.sleep(away_s)
            self.lab.server.start()
        elif host is None:
            return
        elif kind == "host":
            host.kill()
            self.after(away_s, lambda: host.start(wait=False))
        else:
            self.strike_worker(host, pause_s=4 * away_s if kind == "pause" else 0.0)
        self.kills[kind] += 1

    def strike_worker(self, host: Host, pause_s: float) -> None:
        """Kill a worker, or stop it for so long that it may be taken for dead."""
        worker = host.worker()
        if worker is None:
            return
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGSTOP if pause_s else signal.SIGKILL)

        def wake() -> None:
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGCONT)

        if pause_s:
            self.after(pause_s, wake)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, act))

    def tick(self) -> None:
        """Do what is due; the command that follows the plan must not give up meanwhile."""
        if self.submitter is not None and self.submitter.poll():
            remarks = self.logs[-1].read_text()
            assert " submitted, " not in remarks, remarks[-3000:]
            assert "cannot use the results database" in remarks, remarks[-3000:]
            self.kills["began too early"] += 1  # while the database was away: a person tries again
            self.submit()
        due = [entry for entry in self.later if entry[0] <= time.monotonic()]
        for entry in due:
            self.later.remove(entry)
            entry[1]()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something, while there is progress."""
        before, deadline = -1, 0.0
        while not condition():
            done = self.done()
            if done != before:
                before, deadline = done, time.monotonic() + STUCK_S
            assert time.monotonic() < deadline, (done, self.lab.statuses(), SEED)
            self.tick()
            time.sleep(0.1)


@pytest.fixture
def campaign(tmp_path: Path, new_port: Callable[[], int], small_bundle: Path) -> Iterator[Campaign]:
    with running_postgresql_server(new_port) as server:
        server.create("lab")
        lab = Lab(tmp_path, server)
        lab.hosts = [
            Host(name, tmp_path / name, lab.url, new_port(), boots=True, dead_after_s=8.0)
            for name in ("h1", "h2", "h3")
        ]
        benches = [
            BENCH | {"sessions": CELLS // 3, "new_tokens": 2 + n, "label": f"bench-{n}"}
            for n in range(3)
        ]
        containers = [{"path": str(small_bundle), "label": "small"}]
        plan = lab.plan(containers=containers, workloads=benches, telemetry=False)
        made = Campaign(lab, plan, random.Random(SEED))  # noqa: S311
        try:
            for host in lab.hosts:
                host.start()
            yield made
        finally:
            for host in lab.hosts:
                host.kill()
            if made.submitter is not None:
                made.submitter.kill()
                made.submitter.wait()


def leftovers(host: Host) -> list[str]:
    commands = []
    for one in host.processes():
        with suppress(psutil.NoSuchProcess):
            commands.append(" ".join(one.cmdline()))
    return [words for words in commands if not any(name in words for name in LASTING)]


@pytest.mark.slow
@pytest.mark.needs("namespaces", "root", "libatomic1")
@pytest.mark.timeout(4 * 3600)
def test_each_cell_is_in_the_results_once_whatever_is_killed(campaign: Campaign) -> None:
    lab, cells = campaign.lab, CELLS // 3 * 3
    began = time.monotonic()
    campaign.submit()
    campaign.wait_until(lambda: bool(lab.statuses()["doing"]))
    for number in range(KILLS):
        campaign.wait_until(lambda n=number: campaign.done() >= n * cells // (KILLS + 1))  # type: ignore[misc]
        campaign.after(campaign.choose.uniform(0, 3), campaign.strike)
    campaign.wait_until(campaign.is_over)
    took_s = time.monotonic() - began

    tries = Counter(status for (status,) in lab.ask("SELECT status FROM runs"))
    began_events = lab.ask("SELECT count(*) FROM procrastinate_events WHERE type = 'started'")
    sys.stdout.write(
        f"seed {SEED}: {dict(campaign.kills)} killed or stopped in {took_s:.0f} s; "
        f"jobs began {began_events[0][0]} times; runs {dict(tries)}\n"
    )
    assert campaign.submitter is not None
    assert campaign.submitter.wait() == 0, campaign.logs[-1].read_text()[-3000:]
    once = "SELECT count(*) FROM runs WHERE status = 'done' GROUP BY group_id, session"
    assert lab.ask(once) == [(1,)] * cells
    assert set(tries) <= {"done", "interrupted"}
    assert lab.statuses() == {"succeeded": cells}
    assert lab.ask("SELECT DISTINCT status FROM plan_cells") == [("done",)]
    for host in lab.hosts:
        host.take_down()
        with closing(sqlite3.connect(host.folder / "pool.db")) as ledger:
            assert ledger.execute("SELECT * FROM pool_leases").fetchall() == []
        wait_for(lambda h=host: not leftovers(h), lambda h=host: leftovers(h))  # type: ignore[misc]
    assert lab.ask("SELECT count(*) FROM procrastinate_workers") == [(0,)]
