"""Thirty nights with a regression on the twentieth: one alert, the right night, the right commit.

`make nights`. The clock is simulated. A real virtual device measures a real container each night,
and heats up on the twentieth. Its clocks are low before that, so that a busy host does not show.
"""

import json
import os
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import update

from harness.devices.device import Device
from harness.plans.plan_file import NightlyEntry, Plan
from harness.pool.config import ReceiverConfig
from harness.pool.notifications import Notification
from harness.results import schema
from harness.results.store import ResultsStore
from plugins.nightly.archive import Archive
from plugins.nightly.job import Measured, NightlyJob, Steps
from plugins.nightly.night import Night
from plugins.nightly.steps import PlanSteps
from plugins.virtual_android import manager
from tests import system

NIGHTS, SLOWER_FROM = 30, 20
FIRST = datetime(2026, 10, 31, 22, 30, tzinfo=ZoneInfo("UTC"))
PLAN = Plan.model_validate({"name": "lab", "workloads": [{"kind": "command", "command": ["true"]}]})


def evening(night: int) -> datetime:
    return FIRST + timedelta(days=night - 1)


@dataclass
class Nights:
    folder: Path
    steps: Steps
    commit_of: Callable[[int], str]
    commits: dict[int, str] = field(default_factory=dict)
    sent: list[tuple[int, Notification]] = field(default_factory=list)
    tonight: int = 0

    def run(self) -> list[Night]:
        settings = NightlyEntry.model_validate({"tell": [{"command": ["a"]}], "keep": NIGHTS})
        archive = Archive(self.folder / "nights", "lab")
        found = []
        for number in range(1, NIGHTS + 1):
            self.tonight = number
            job = NightlyJob(archive, settings, self.steps, self._start, self._now, self._send)
            found.append(job.run())
            assert found[-1].is_over, found[-1].text
            if number in {1, SLOWER_FROM + 1}:
                assert job.run() == found[-1], "the second call of a night changes nothing"
        return found

    def _now(self) -> datetime:
        return evening(self.tonight)

    def _start(self, name: str) -> Night:
        at = evening(self.tonight)
        self.commits[self.tonight] = self.commit_of(self.tonight)
        return Night(plan="lab", name=name, began_at=at, commit=self.commits[self.tonight])

    def _send(self, _receiver: ReceiverConfig, notification: Notification) -> None:
        self.sent.append((self.tonight, notification))

    def check(self, found: Sequence[Night], *, latest: int) -> None:
        """Exactly one message, soon enough, of the right night and the right commits."""
        assert [night for night, _ in self.sent if night < SLOWER_FROM] == []
        ((told_on, notification),) = self.sent
        assert told_on <= latest
        details = notification.as_mapping()
        assert details["commit"] == self.commits[told_on]
        before = told_on - 1
        (worst, *_) = found[before].regressions
        assert worst.since == f"{evening(SLOWER_FROM):%Y-%m-%d}"
        assert worst.commits == (self.commits[SLOWER_FROM - 1], self.commits[SLOWER_FROM])
        codes = [night.exit_code for night in found]
        assert codes == [0] * before + [1] * (len(codes) - before)


class Real:
    """Steps on a real device, which is hot from a night on; time and commits are moved on."""

    def __init__(self, steps: PlanSteps, db: Path, heat: Callable[[float], object]) -> None:
        self._real = steps
        self._db = db
        self._heat = heat
        self._night = 0
        self._moved: set[str] = set()
        self.build = steps.build
        self.judge = steps.judge
        self.settle = steps.settle
        self.write_report = steps.write_report

    def measure(
        self, *, fresh: bool, skipped: Collection[str], on_begin: Callable[[str], None]
    ) -> Measured:
        self._night += 1
        self._heat(100.0 if self._night >= SLOWER_FROM else 80.0)
        result = self._real.measure(fresh=fresh, skipped=skipped, on_begin=on_begin)
        self._move()
        return result

    def _move(self) -> None:
        """Let tonight's runs have begun on the evening of the simulated night."""
        with ResultsStore.open(self._db) as store:
            runs = [run for run in store.list_runs() if run.id not in self._moved]
            with store.database.writing() as connection:
                for number, run in enumerate(runs):
                    at = evening(self._night) + timedelta(minutes=number)
                    this = update(schema.runs).where(schema.runs.c.id == run.id)
                    connection.execute(this.values(created_at=at, finished_at=at))
        self._moved |= {run.id for run in runs}


def git(*words: str) -> str:
    author = ["-c", "user.name=lab", "-c", "user.email=lab@example.com"]
    done = subprocess.run(
        [system.program("git"), *author, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def ahead_of_others() -> Iterator[None]:
    """What is started gets the processor before the host's other load, where that is allowed."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    yield
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.usefixtures("ahead_of_others")
def test_a_device_that_heats_up_is_one_alert(
    tmp_path: Path,
    make_virtual_device: Callable[..., tuple[manager.VirtualDevice, Device]],
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    virtual, device = make_virtual_device()
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    git("init", "-q")

    def next_commit(night: int) -> str:
        git("commit", "-q", "--allow-empty", "-m", f"night {night}")
        return git("rev-parse", "HEAD")

    pool = tmp_path / "pool.yaml"
    pool.write_text(f"devices: [{{type: android, identifier: '{device.serial}'}}]\n")
    bench = {"kind": "bench", "prompt_tokens": 16, "new_tokens": 3, "repetitions": 2, "warmup": 0}
    plan = {
        "name": "lab",
        "containers": [{"path": str(tiny_bundle), "label": "tiny"}],
        "workloads": [bench],
        "conditions": "none",
        "telemetry": False,
    }
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    db = tmp_path / "results.db"
    steps = PlanSteps(Plan.model_validate(plan), tmp_path / "plan.yaml", str(db), pool)

    # Clocks are a fifth at 80 degrees, so that a busy host does not show, and 3 % at 100.
    def heat(temperature_c: float) -> None:
        manager.control(virtual.name).heat(
            temperature_c=temperature_c, capacity_j_per_k=1e5, throttle_from_c=20, min_speed=0.03
        )

    nights = Nights(tmp_path, Real(steps, db, heat), next_commit)
    nights.check(nights.run(), latest=SLOWER_FROM + 3)
