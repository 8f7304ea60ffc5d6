"""`qnnfarm run` and `qnnfarm nightly`, killed as a whole at random moments.

They lose the cell in flight, and the same command goes on. `make kills` kills each a hundred times
(`QNNFARM_KILLS`).
"""

import contextlib
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.devices.device import Device
from harness.errors import StoreError
from harness.plans.plan_run import open_plan_run
from harness.results.records import Run
from harness.results.store import ResultsStore
from tests import command_line

BENCH = {
    "kind": "bench", "prompt_tokens": 16, "new_tokens": 3, "repetitions": 1, "warmup": 0,
}  # fmt: skip
KILLS = int(os.environ.get("QNNFARM_KILLS", "100"))
SESSIONS = 3
_PATIENCE_S = 250


@dataclass
class Campaign:
    """One plan whose commands are killed.

    Attributes:
        kept: ids of the cells that were seen to be done since the last fresh start.
        kills: of commands that were still at work.
    """

    folder: Path
    kept: set[str] = field(default_factory=set)
    kills: int = 0
    completed: int = 0
    longest_s: float = 0.0

    @property
    def plan(self) -> Path:
        return self.folder / "plan.yaml"

    @property
    def db(self) -> Path:
        return self.folder / "results.db"

    def run(self, *words: str, kill_after_s: float | None = None) -> tuple[int | None, str]:
        """Run a command, or kill it; return its exit code, None if it was killed, and its words."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            env = os.environ | {"COLUMNS": "120"}
            began = time.monotonic()
            process = command_line.start(words, cwd=self.folder, env=env, streams=(out, err))
            process.join(_PATIENCE_S if kill_after_s is None else kill_after_s)
            killed = process.is_alive()
            if killed:
                process.kill()
                process.join()
                assert kill_after_s is not None, f"{words} takes too long"
                assert process.exitcode == -signal.SIGKILL
            else:
                self.longest_s = max(self.longest_s, time.monotonic() - began)
            err.seek(0)
            return (None if killed else process.exitcode), err.read().decode()

    def runs(self) -> tuple[Run, ...]:
        with contextlib.suppress(StoreError), ResultsStore.open(self.db) as store:
            return store.list_runs()
        return ()

    def check(self, cells: int) -> None:
        """Check that what was kept is still there, once, and that a next run takes it over."""
        if self.db.exists():
            with closing(sqlite3.connect(self.db)) as database:
                assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        runs = self.runs()
        counts = Counter(run.status for run in runs)
        assert set(counts) <= {"done", "interrupted"}, [run.error for run in runs]
        assert counts["interrupted"] <= self.kills, "more than the cell in flight was lost"
        done = {run.id for run in runs if run.status == "done"}
        assert self.kept <= done
        sessions = Counter((run.group_id, run.session) for run in runs if run.status == "done")
        assert set(sessions.values()) <= {1}, "a cell that was done ran again"
        self.kept = done
        with open_plan_run(self.plan, dry_run=True) as plan_run:
            assert len(plan_run.cells) == cells
            groups = {run.group_id for run in runs if run.status == "done"}
            of_this = 0 if plan_run.runner is None else sum(
                (plan_run.runner.group_id(cell), cell.session) in sessions
                for cell in plan_run.cells
            )  # fmt: skip
            assert plan_run.done_before == of_this, groups


@pytest.fixture
def campaign(tmp_path: Path, virtual_device: Device, tiny_bundle: Path) -> Campaign:
    pool = {"devices": [{"type": "android", "identifier": virtual_device.serial, "name": "dut"}]}
    (tmp_path / "pool.yaml").write_text(json.dumps(pool))
    plan = {
        "name": "killed", "db": "results.db", "pool": "pool.yaml", "conditions": "none",
        "containers": [{"path": str(tiny_bundle)}], "workloads": [BENCH | {"sessions": SESSIONS}],
    }  # fmt: skip
    made = Campaign(tmp_path)
    made.plan.write_text(json.dumps(plan))
    return made


def kill(campaign: Campaign, command: str, afresh: str, kills: int, seed: int) -> None:
    """Run a command again and again, killed at random moments, until it may end."""
    rng = random.Random(seed)  # noqa: S311
    code, said = campaign.run(command, "plan.yaml")
    assert code == 0, said
    again: tuple[str, ...] = (afresh,)
    while campaign.kills < kills:
        after_s = rng.uniform(0, campaign.longest_s)
        code, said = campaign.run(command, "plan.yaml", *again, kill_after_s=after_s)
        assert code in {None, 0}, said
        campaign.kills += code is None
        campaign.completed += code == 0
        is_over = code == 0 or (command == "nightly" and not unfinished(campaign))
        again = (afresh,) if is_over else ()
        campaign.check(SESSIONS)
    code, said = campaign.run(command, "plan.yaml")
    assert code == 0, said
    campaign.check(SESSIONS)


def unfinished(campaign: Campaign) -> list[str]:
    """Names of the nights that are not over; every record can be read at any moment."""
    records = (campaign.folder / "killed-reports").glob("*/night.json")
    nights = [json.loads(path.read_text()) for path in records]
    names = [night["name"] for night in nights if night["verdict"] is None]
    assert len(names) <= 1, names
    return names


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    ("command", "afresh"),
    [
        ("run", "--fresh"),
        pytest.param("nightly", "--again", marks=pytest.mark.needs("plugins.nightly")),
    ],
)
def test_commands_killed_at_a_hundred_moments(
    campaign: Campaign, command: str, afresh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kill(campaign, command, afresh, KILLS, seed=11)
    if command == "nightly":
        assert not unfinished(campaign)
        index = (campaign.folder / "killed-reports" / "index.html").read_text()
        assert index.rstrip().endswith("</html>")
    with capsys.disabled():
        counts = Counter(run.status for run in campaign.runs())
        sys.stdout.write(
            f"\n{campaign.kills} kills: {counts['done']} cells kept, {counts['interrupted']} in "
            f"flight lost; {campaign.completed} commands ended by themselves\n"
        )
