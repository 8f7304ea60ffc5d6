"""Plans over hosts: workers as processes with pools of their own, on one real PostgreSQL."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from procrastinate.jobs import Status

from harness.devices.adb.connection import ServerAddress
from harness.errors import ConfigFileError, WrongUseError
from harness.plans.journal import CellEnd
from harness.plans.plan_file import load_plan
from plugins.lab.jobs import LabJobs, queue_name
from plugins.lab.page.access import Access, read_tokens
from plugins.lab.submission import SubmittedRun, open_lab
from tests.command_line import qnnfarm
from tests.conftest import kill_server
from tests.plugins.lab.hosts import HELD, POOL, Host, Lab
from tests.plugins.lab.page_server import serving
from tests.postgresql_server import PostgresqlServer
from tests.private_adb import end_servers
from tests.system import VIRTUAL, needs
from tests.waiting import wait_for

pytestmark = pytest.mark.first


@pytest.fixture(scope="module")
def hosts(
    server: PostgresqlServer, tmp_path_factory: pytest.TempPathFactory, new_port: Callable[[], int]
) -> Iterator[Lab]:
    needs(VIRTUAL)
    folder = tmp_path_factory.mktemp("lab")
    lab = Lab(folder, server)
    lab.hosts = [Host(name, folder / name, lab.url, new_port()) for name in ("h1", "h2")]
    try:
        for host in lab.hosts:
            host.start(wait=False)
        for host in lab.hosts:
            host.wait()
        yield lab
    finally:
        for host in lab.hosts:
            host.kill()
            own = os.environ | {"QNNFARM_STATE_DIR": str(host.folder)}
            qnnfarm("device", "stop", "--all", env=own)
            kill_server(ServerAddress("127.0.0.1", host.port))
        end_servers(folder)


@pytest.fixture
def lab(hosts: Lab) -> Iterator[Lab]:
    yield hosts
    hosts.hold()
    for host in hosts.hosts:
        if host.process is None or host.process.poll() is not None:
            host.start()
    for table in ("procrastinate_events", "procrastinate_jobs", "plan_cells", "plan_runs"):
        hosts.ask(f"TRUNCATE {table} CASCADE")


def test_cells_run_once_each_on_devices_of_both_hosts(lab: Lab) -> None:
    code, answer, _ = lab.run(lab.plan(*(f"sleep 1; echo {n}" for n in range(8))))
    assert code == 0, answer
    assert {summary for (summary,) in lab.ask("SELECT summary FROM plan_cells")} == set("01234567")
    begun = "SELECT count(*) FROM procrastinate_events WHERE type = 'started' GROUP BY job_id"
    assert lab.ask(begun) == [(1,)] * 8
    assert lab.statuses() == {"succeeded": 8}
    assert "8 done, 0 failed" in answer
    devices = {device for (device,) in lab.ask("SELECT device FROM plan_cells")}
    assert {"h1-a", "h2-a"} <= devices
    code, answer, remarks = lab.run(lab.folder / "plan.yaml")
    assert "0 cells submitted, 8 of 8 done" in remarks, "the same command repeats nothing"
    assert code == 0
    assert lab.statuses() == {"succeeded": 8}


def test_cell_of_a_killed_worker_goes_to_another(lab: Lab) -> None:
    process = lab.submit(lab.plan(HELD))
    owner = lab.owner()
    lab.bury(owner)
    lab.let_go()
    lab.finish(process, succeeded=1)
    (other,) = lab.ask("SELECT device FROM plan_cells")[0]
    assert str(other)[:2] != owner.name


@pytest.mark.variant
def test_worker_that_is_ended_gives_its_cells_back(lab: Lab) -> None:
    process = lab.submit(lab.plan(HELD))
    assert lab.owner().stop() == 130
    lab.let_go()
    lab.finish(process, succeeded=1)


def test_plan_is_followed_beyond_a_connection_that_is_cut(lab: Lab) -> None:
    process = lab.submit(lab.plan(HELD))
    wait_for(lambda: lab.statuses()["doing"], lab.statuses)
    asking = "FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%starts_with%'"
    with (
        contextlib.closing(lab.server.connect("lab")) as connection,
        connection.transaction(),
    ):
        connection.execute("LOCK TABLE procrastinate_jobs IN ACCESS EXCLUSIVE MODE")
        wait_for(lambda: lab.ask(f"SELECT pid {asking}"), lambda: "it does not ask")
        assert lab.ask(f"SELECT pg_terminate_backend(pid) {asking}") == [(True,)]
    lab.let_go()
    answer, remarks = lab.finish(process, succeeded=1)
    assert "trying again" in remarks
    assert "1 done" in answer


@pytest.mark.variant
def test_person_cancels_a_plan_on_the_page(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = lab.submit(lab.plan(*("sleep 100" for _ in range(8))))
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL.format(host="h9"))
    (tmp_path / "tokens").write_text(f"ada {'a' * 20}\n")
    (tmp_path / "tokens").chmod(0o600)
    wait_for(lambda: lab.statuses()["doing"] == 4, lab.statuses)
    with serving(pool, lab.url, Access(read_tokens(tmp_path / "tokens"))) as page:
        text = page.get().text
        assert "8 cells left, 4 running, 0 done" in text
        assert "<h2>2 hosts</h2>" in text
        assert text.count("2 devices, 2 cells running") == 2
        ((run,),) = lab.ask("SELECT id FROM plan_runs")
        bearer = {"Authorization": f"Bearer {'a' * 20}"}
        assert page.post(f"/plans/{run}/cancel").status == 401
        other = bearer | {"Sec-Fetch-Site": "cross-site"}
        assert page.post(f"/plans/{run}/cancel", other).status == 403
        assert lab.statuses()["doing"] == 4
        answer = page.post(f"/plans/{run}/cancel", bearer)
    assert (answer.status, answer.text) == (200, f"8 cells of plan run {run} cancelled\n")
    assert f"ada: 8 cells of plan run {run} cancelled" in caplog.text
    process.communicate(timeout=200)
    assert lab.statuses() == {"cancelled": 4, "aborted": 4}


def test_failed_cell_is_told_with_its_host_and_reason(lab: Lab) -> None:
    code, answer, _ = lab.run(lab.plan("echo broken >&2; exit 3", "true"))
    assert code == 1
    assert "1 done, 1 failed" in answer
    assert "broken" in answer
    assert lab.statuses() == {"succeeded": 1, "failed": 1}
    code, _, remarks = lab.run(lab.folder / "plan.yaml")
    assert "1 cell submitted, 1 of 2 done" in remarks, "what failed is tried again"


@contextlib.contextmanager
def opened(plan_file: Path) -> Iterator[SubmittedRun]:
    plan = load_plan(plan_file)
    with open_lab(str(plan.db)) as lab:
        yield lab.open_run(plan, plan_file)


@pytest.fixture
def run(lab: Lab) -> Iterator[SubmittedRun]:
    """Two cells for a worker that is this process, as no host of the lab has such a device."""
    with opened(lab.plan("true", "true", devices=[{"soc": "SM8650"}])) as run:
        assert run.submit() == 2
        run.jobs.register("h9", 1)
        yield run
        run.jobs.unregister()


def test_worker_that_was_taken_for_dead_takes_jobs_again(lab: Lab, run: SubmittedRun) -> None:
    queue = queue_name(run.cells[0])
    lost = run.jobs.fetch(queue)
    assert lost is not None
    assert lab.ask("DELETE FROM procrastinate_workers RETURNING true")
    run.jobs.beat(60)
    run.jobs.record(lost, CellEnd("failed"))
    assert run.jobs.ends(run.id) == {}, "it is not its job any more"
    job = run.jobs.fetch(queue)
    assert job is not None
    run.jobs.record(job, CellEnd("begun"))
    assert set(run.jobs.ends(run.id)) == {job.cell.key}


def test_cell_that_ends_while_its_plan_is_submitted_again_runs_once(
    lab: Lab, run: SubmittedRun
) -> None:
    with opened(lab.folder / "plan.yaml") as again:
        job = run.jobs.fetch(queue_name(run.cells[0]))
        assert job is not None
        run.jobs.record(job, CellEnd("done"))
        run.jobs.finish(job, Status.SUCCEEDED)
        assert again.submit() == 0


def test_job_that_a_server_gave_to_nobody_waits_again(lab: Lab, run: SubmittedRun) -> None:
    """Its worker lives, but the server went away between giving the job and saying so."""
    queue = queue_name(run.cells[0])
    held = run.jobs.fetch(queue)
    lab.ask(f"SELECT procrastinate_fetch_job_v2(ARRAY['{queue}'], {run.jobs.worker})")
    assert held is not None
    assert lab.statuses() == {"doing": 2}
    run.jobs.beat(60)
    assert lab.statuses() == {"doing": 1, "todo": 1}
    lost = run.jobs.fetch(queue)
    assert lost is not None
    assert lost.cell.key != held.cell.key
    run.jobs.beat(60)
    assert lab.statuses() == {"doing": 2}
    run.jobs.finish(lost, Status.SUCCEEDED)
    lab.ask("UPDATE procrastinate_jobs SET status = 'doing'")
    run.jobs.beat(60)
    assert lab.statuses() == {"doing": 1, "todo": 1}, "a server that forgot its end"


def test_cell_of_another_version_fails_and_ends_no_worker(lab: Lab, run: SubmittedRun) -> None:
    lab.ask("UPDATE procrastinate_jobs SET args = jsonb_set(args, '{cell}', '\"{}\"')")
    assert run.jobs.backlog() == []
    assert run.jobs.fetch(queue_name(run.cells[0])) is None
    end = run.jobs.ends(run.id)[run.cells[0].key]
    assert (end.status, end.host) == ("failed", "h9")
    assert "the qnnfarm of this host cannot read it" in end.reason


def test_files_cannot_be_a_lab(tmp_path: Path) -> None:
    with pytest.raises(WrongUseError, match="PostgreSQL"):
        LabJobs(str(tmp_path / "results.db"))


def test_all_devices_of_a_lab_cannot_be_counted(lab: Lab) -> None:
    plan = lab.plan("true", devices=[{"count": "all"}])
    with pytest.raises(ConfigFileError, match="name devices"), opened(plan):
        pass
