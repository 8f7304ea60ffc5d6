"""Jobs of a lab while the clock of its server, or of a host, is an hour off."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from procrastinate import utils
from procrastinate.jobs import Job

from harness.results import records
from plugins.lab import jobs as lab_jobs
from plugins.lab.jobs import LabJobs
from tests.postgresql_server import PostgresqlServer

HOUR_S = 3600
DEAD_AFTER_S = 30.0
_AGED = "UPDATE procrastinate_workers SET last_heartbeat = last_heartbeat - interval '{} s'"


@pytest.fixture
def jobs(server: PostgresqlServer) -> Iterator[LabJobs]:
    """A worker with one job, which it has taken."""
    server.set_clock("lab", 0)
    with LabJobs(server.url("lab")) as jobs:
        jobs.register("h1", 1)
        jobs.put([Job(queue="q", lock=None, queueing_lock="r:k", task_name="t", task_kwargs={})])
        yield jobs
    server.ask("lab", "TRUNCATE procrastinate_jobs, procrastinate_workers, plan_runs CASCADE")


def test_job_that_a_host_ahead_gives_back_runs_at_once(
    jobs: LabJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = utils.utcnow() + timedelta(seconds=HOUR_S)
    monkeypatch.setattr(utils, "utcnow", lambda: ahead)
    monkeypatch.setattr(lab_jobs, "now", lambda: ahead)
    taken = jobs.take("q")
    assert taken
    jobs.give_back(taken)
    assert jobs.take("q")


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_jobs_of_dead_workers_run_again_after_a_jump_of_the_servers_clock(
    jobs: LabJobs, server: PostgresqlServer, jump_s: int
) -> None:
    assert jobs.take("q")
    with LabJobs(server.url("lab")) as other:
        other.register("h2", 1)
        other.beat(DEAD_AFTER_S)
        server.set_clock("lab", jump_s)
        other.beat(DEAD_AFTER_S)
        server.ask("lab", _AGED.format(DEAD_AFTER_S + 1))  # and this much later
        other.beat(DEAD_AFTER_S)
        assert other.take("q")


def test_newest_run_of_a_plan_is_the_one_that_began_last(
    jobs: LabJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = records.now() + timedelta(seconds=HOUR_S)
    with monkeypatch.context() as patched:
        patched.setattr(lab_jobs, "now", lambda: ahead)
        jobs.begin("plan", "ann", fresh=True)
    fresh = jobs.begin("plan", "ann", fresh=True)
    assert jobs.begin("plan", "ann", fresh=False) == fresh
