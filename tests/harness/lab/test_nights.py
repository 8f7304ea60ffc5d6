"""Nights of a lab: one of all workers runs each, whoever knows them."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from harness.errors import WrongUseError
from harness.lab.jobs import LabJobs
from harness.lab.nights import Nights, check_cron
from suites.nightly.night import Night
from tests.postgresql_server import PostgresqlServer
from tests.waiting import wait_for

EACH_MINUTE = "* * * * *"
POOL = "devices:\n  - {{name: {host}-a, type: virtual, identifier: a, soc: SM8750}}\n"


def write_plan(folder: Path, server: PostgresqlServer) -> Path:
    """Write a plan of one command, whose nights go into a shared folder."""
    work = {"kind": "command", "command": ["sh", "-c", "echo well"], "label": "w"}
    path = folder / "nightly.yaml"
    plan = {"name": "night", "db": server.url("lab"), "conditions": "none", "workloads": [work]}
    path.write_text(yaml.safe_dump(plan | {"nightly": {"reports": str(folder / "reports")}}))
    return path


def test_each_night_is_put_into_the_queue_once_by_all_workers(
    server: PostgresqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Days pass; nobody takes a night, so no second one waits behind it."""
    monkeypatch.setattr(LabJobs, "take", lambda *_: None)
    clock = [1_900_000_000.0]
    monkeypatch.setattr("harness.lab.nights.time.time", lambda: clock[0])
    jobs = "SELECT args->>'timestamp' FROM procrastinate_jobs WHERE task_name = 'qnnfarm_night'"
    clock[0] = clock[0] // 86400 * 86400 + 2 * 3600 + 5  # five seconds after two o'clock
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            own = stack.enter_context(LabJobs(server.url("lab")))
            plan = tmp_path / "nightly.yaml"
            stack.enter_context(Nights(own, plan, "night", "0 2 * * *", lambda _: None))
        wait_for(lambda: len(server.ask("lab", jobs)) == 1)
        time.sleep(3)
        assert server.ask("lab", jobs) == [(str(int(clock[0]) - 5),)]
        clock[0] += 5 * 86400 + 3600  # five nights on, an hour late
        time.sleep(3)
        assert len(server.ask("lab", jobs)) == 1
    server.ask("lab", "TRUNCATE procrastinate_jobs, procrastinate_periodic_defers CASCADE")


@pytest.mark.slow
def test_one_of_two_workers_runs_a_night_as_the_command_does(
    server: PostgresqlServer, tmp_path: Path, new_port: Callable[[], int]
) -> None:
    plan, workers = write_plan(tmp_path, server), []
    try:
        for name in ("h1", "h2"):
            host = tmp_path / name
            host.mkdir()
            (host / "pool.yaml").write_text(POOL.format(host=name))
            words = ["--db", server.url("lab"), "--nightly", str(plan), "--cron", EACH_MINUTE]
            state = {"QNNFARM_STATE_DIR": str(host), "ANDROID_ADB_SERVER_PORT": str(new_port())}
            with (host / "log").open("wb") as log:
                command = [sys.executable, "-m", "harness.cli", "worker", "--pool", "pool.yaml"]
                workers.append(
                    subprocess.Popen(
                        [*command, *words], cwd=host, env=os.environ | state, stdout=log, stderr=log
                    )
                )
        ended = (
            "SELECT args->>'timestamp', count(*) FROM procrastinate_jobs j"
            " JOIN procrastinate_events e ON e.job_id = j.id AND e.type = 'started'"
            " WHERE task_name = 'qnnfarm_night' AND j.status = 'succeeded' GROUP BY 1"
        )
        wait_for(lambda: len(server.ask("lab", ended)) >= 2, timeout_s=300)
        assert {count for _, count in server.ask("lab", ended)} == {1}
    finally:
        for worker in workers:
            worker.terminate()
        assert [worker.wait(60) for worker in workers] == [130, 130]
        for name in ("h1", "h2"):
            command = [sys.executable, "-m", "harness.cli", "device", "stop", "a"]
            state = {"QNNFARM_STATE_DIR": str(tmp_path / name)}
            subprocess.run(command, env=os.environ | state, capture_output=True, check=False)
    records = list((tmp_path / "reports").glob("*/night.json"))
    assert len(records) == 1, "the second call of a night finds it over"
    night = Night.model_validate_json(records[0].read_bytes())
    assert (night.verdict, night.cells.done, night.failures) == ("good", 1, ())
    logs = [(tmp_path / name / "log").read_text() for name in ("h1", "h2")]
    assert sum("w is done: well" in text for text in logs) == 1


def test_cron_that_is_none_is_refused() -> None:
    with pytest.raises(WrongUseError, match="five fields"):
        check_cron("at midnight")
