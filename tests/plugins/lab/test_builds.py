"""Builds of a lab, on one real PostgreSQL: by workers here, whose builds are real processes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from procrastinate.jobs import Job, Status

from buildlib.container.container import GenAIContainer
from buildlib.errors import ContainerError
from harness.errors import WrongUseError
from harness.plans.builds import BuildRequest
from harness.plans.journal import CellEnd
from harness.plans.plan_file import Plan
from plugins.lab.builds import KEY, QUEUE, TASK, Builder, BuildJob, LabBuilds
from plugins.lab.jobs import LabJobs
from suites.models import tiny_llama
from suites.models.tiny_llama import lora
from tests.command_line import Started
from tests.postgresql_server import PostgresqlServer
from tests.private_adb import end_servers
from tests.waiting import wait_for

OPTIONS = {
    "arn_cl_options.auto_regression_number": [1, 32],
    "arn_cl_options.context_length": [192],
    "split_model.num_splits": 2,
}


@pytest.fixture
def jobs(server: PostgresqlServer) -> Iterator[LabJobs]:
    with LabJobs(server.url("lab")) as jobs:
        yield jobs
    server.ask("lab", "TRUNCATE procrastinate_events, procrastinate_jobs, plan_cells CASCADE")


@pytest.fixture
def lab(jobs: LabJobs) -> LabBuilds:
    return LabBuilds(jobs)


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.lab.builds._TICK_S", 0.05)


Start = Callable[[], list[str]]


@pytest.fixture
def start(
    jobs: LabJobs, tmp_path: Path, build_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Starts the builds of a worker below the test's folder; returns what it says.

    Its stage cache is the one that all tests share.
    """
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(build_cache))
    with contextlib.ExitStack() as stack:

        def start() -> list[str]:
            lines: list[str] = []
            jobs.register("board", 0)
            stack.enter_context(Builder(jobs, tmp_path, lines.append))
            return lines

        yield start


def model_in(folder: Path) -> Path:
    return Path(shutil.copytree(tiny_llama.folder(), folder / tiny_llama.folder().name))


def build_of(model: Path, folder: Path, **more: object) -> BuildJob:
    request = BuildRequest(model=model, target="SM8750:emulator", options=OPTIONS, **more)  # type: ignore[arg-type]
    return BuildJob.of((request, request.plan(), folder))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def statuses(server: PostgresqlServer) -> Counter[object]:
    rows = server.ask("lab", "SELECT status::text FROM procrastinate_jobs")
    return Counter(status for (status,) in rows)


@pytest.mark.needs("libatomic1")
def test_containers_of_a_plan_are_built_once_in_the_folder_that_all_see(
    lab: LabBuilds, start: Start, server: PostgresqlServer, tmp_path: Path, tiny_bundle: Path
) -> None:
    how: dict[str, object] = {
        "model": str(model_in(tmp_path)), "target": "SM8750:emulator", "ar": [1, 32], "cl": 192,
        "splits": 2,
    }  # fmt: skip
    broken = how | {"options": {"no.such.option": 1}}
    entries = [{"path": "broken", "build": broken}, {"path": "head", "build": how}]
    work = [{"kind": "command", "command": ["true"]}]
    plan = Plan.model_validate({"name": "lab", "workloads": work, "containers": entries})
    start()
    lines: list[str] = []
    failed, head = lab.build_containers(plan, tmp_path / "plan.yaml", lines.append)
    assert "no.such.option" in failed.error
    assert (head.error, head.replaced) == ("", True)
    assert contents(tmp_path / "head") == contents(tiny_bundle)
    _, again = lab.build_containers(plan, tmp_path / "plan.yaml", lines.append)
    assert (again.sha256, again.replaced, again.stages_run) == (head.sha256, False, 0)
    assert statuses(server) == {"succeeded": 1}


def test_hostile_builds_fail_and_are_told_so(
    jobs: LabJobs, start: Start, server: PostgresqlServer, tmp_path: Path
) -> None:
    build = build_of(model_in(tmp_path), tmp_path / "tiny")
    good = build.model_dump(mode="json")
    adapters = tmp_path / "adapters.json"
    adapters.write_text(
        json.dumps({"adapters": [{"name": "a", "path": str(lora.folder() / "law")}]})
    )
    (tmp_path / "link").symlink_to("/etc")
    request = good["request"]
    lora_config = {"options": {"lora_config.lora_config_path": str(adapters)}}
    harms: list[tuple[dict[str, Any], str]] = [
        ({"folder": "/etc/tiny"}, "below"),
        ({"folder": str(tmp_path / "link" / "tiny")}, "below"),
        ({"request": request | {"calibration": "/etc/passwd"}}, "below"),
        ({"request": request | lora_config}, "below"),
        ({"request": request | {"qairt_sdk": str(tmp_path)}}, "programs"),
        ({"request": request | {"options": {"op_packages": [{"name": "a"}]}}}, "programs"),
        ({"files": {str(adapters): "0" * 64}}, "is not what was submitted"),
        ({"files": {"/a/../../etc/passwd": "0" * 64}}, "no file of a host"),
        ({"request": {"target": 5}}, "request.model"),
        ({"id": "f" * 32}, "it is not the build"),
        ({}, "Input should be"),
    ]
    said = {}
    for number, (harm, reason) in enumerate(harms):
        own, run = {**good, **harm} if harm else {}, f"{number:032x}"
        with contextlib.suppress(ValueError):
            own["id"] = run = BuildJob.model_validate(own).digest()
        said[run] = reason
        own |= {key: harm[key] for key in harm.keys() & {"id"}}
        lock = f"{run}:{KEY}"
        job = Job(queue=QUEUE, lock=None, queueing_lock=lock, task_name=TASK, task_kwargs=own)
        assert jobs.put([job]) == 1
    server.ask("lab", "UPDATE procrastinate_jobs SET args = '[]' WHERE args = '{}' RETURNING 1")
    start()
    wait_for(lambda: statuses(server) == {"failed": len(harms)}, lambda: statuses(server), 60)
    rows = server.ask("lab", "SELECT plan_run, reason FROM plan_cells")
    reasons = {str(run): str(reason) for run, reason in rows}
    assert reasons.keys() == said.keys()
    assert [run for run, reason in said.items() if reason not in reasons[run]] == []
    assert not (tmp_path / "tiny").exists()


def test_build_that_would_load_its_users_libraries_stays_at_home(tmp_path: Path) -> None:
    request = BuildRequest(model=tiny_llama.folder(), target="SM8750", qairt_sdk=tmp_path)
    with pytest.raises(WrongUseError, match="--qairt-sdk"):
        BuildJob.of((request, None, tmp_path))  # type: ignore[arg-type]


def test_container_that_is_there_is_replaced_only_if_asked(lab: LabBuilds, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes").touch()
    with pytest.raises(ContainerError, match="is there already"):
        lab.submit(build_of(model_in(tmp_path), tmp_path / "tiny"), overwrite=False)


def test_failed_verification_is_told_to_whoever_asked_for_the_build(
    jobs: LabJobs, lab: LabBuilds, tmp_path: Path
) -> None:
    build = build_of(model_in(tmp_path), tmp_path / "out")
    heard: list[Mapping[str, object]] = []
    lab.submit(build)
    jobs.register("h9", 0)
    taken = jobs.take(QUEUE)
    assert taken is not None
    answer = {"target": "SM8750", "verification": {"passed": False, "sides": []}}
    jobs.record(taken, CellEnd("failed", "h9", "", "E", "split changed it", json.dumps([answer])))
    jobs.finish(taken, Status.FAILED)
    with pytest.raises(WrongUseError, match="h9: split changed it"):
        lab.follow(build, lambda _: None, hear=heard.append)
    assert heard == [answer]
    jobs.unregister()


@pytest.mark.variant
def test_cancelled_build_ends_on_its_worker(
    lab: LabBuilds,
    start: Start,
    server: PostgresqlServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = build_of(model_in(tmp_path), tmp_path / "out")
    lines = start()
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(tmp_path / "cold"))
    lab.submit(build)
    began: list[str] = []

    def cancel(words: str) -> None:
        began.append(words)
        if "(" in words and lab.jobs.cancel(build.id):  # a stage has ended
            began.clear()

    with pytest.raises(WrongUseError, match="board: the build was cancelled"):
        lab.follow(build, cancel)
    assert statuses(server) == {"aborted": 1}
    assert "interrupted" in lines[-1]


def qnnfarm(server: PostgresqlServer, cache: Path, *words: object) -> Started:
    environment = os.environ | {
        "QNNFARM_CACHE_DIR": str(cache), "QNNFARM_LAB": server.url("lab"),
        "QNNFARM_STATE_DIR": str(cache / "state"),
    }  # fmt: skip
    return Started(*map(str, words), env=environment)


@pytest.mark.usefixtures("jobs")
def test_interrupted_command_leaves_the_build_and_cancel_ends_it(
    server: PostgresqlServer, tmp_path: Path
) -> None:
    out = tmp_path / "tiny"
    build = ("build", tiny_llama.folder(), "--target", "SM8750:emulator", "--out", out, "--lab",
             "--ar", "1,32", "--cl", 192)  # fmt: skip
    with qnnfarm(server, tmp_path, *build, "--memory", 1.5) as process:
        assert "waiting for a worker with --builds" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, remarks = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "the same command follows it" in remarks
    assert statuses(server) == {"todo": 1}
    out.mkdir()
    (out / "notes").touch()  # what is there does not keep anybody from ending a build
    with qnnfarm(server, tmp_path, *build, "--cancel") as process:
        answer, remarks = process.communicate(timeout=200)
    assert (process.returncode, answer) == (0, "1 build cancelled\n"), remarks
    assert [path.name for path in out.iterdir()] == ["notes"]


@pytest.mark.variant
@pytest.mark.usefixtures("jobs")
def test_cancelled_plan_ends_its_builds(server: PostgresqlServer, tmp_path: Path) -> None:
    build = {"model": str(tiny_llama.folder()), "target": "SM8750:emulator", "ar": [1, 32]}
    work = [{"kind": "command", "command": ["true"]}]
    entry = {"path": "tiny", "build": build | {"cl": 192}}
    plan = {"name": "lab", "workloads": work, "containers": [entry]}
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    run = ("run", tmp_path / "plan.yaml", "--lab", "--db", server.url("lab"))
    with qnnfarm(server, tmp_path, *run) as process:
        assert "waiting for a worker" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, remarks = process.communicate(timeout=200)
    assert "the builds go on" in remarks
    with qnnfarm(server, tmp_path, *run, "--cancel") as process:
        answer, remarks = process.communicate(timeout=200)
    assert (process.returncode, answer) == (0, "1 build cancelled\n"), remarks
    assert statuses(server) == {"cancelled": 1}


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
@pytest.mark.usefixtures("jobs")
def test_build_of_a_killed_worker_is_finished_by_another(
    server: PostgresqlServer, tmp_path: Path, tiny_bundle: Path
) -> None:
    """Each host with a cache of its own, so that the other starts from nothing."""
    hosts = [tmp_path / name for name in ("h1", "h2")]
    out = tmp_path / "out" / "tiny"
    options = ["--ar", "1,32", "--cl", "192", "--splits", "2", "--out", out, "--lab", "--json"]

    def work(host: Path) -> Started:
        host.mkdir()
        pool = "devices:\n  - {name: a, type: virtual, identifier: a, soc: SM8750}\n"
        (host / "pool.yaml").write_text(pool)
        words = ("worker", "--pool", host / "pool.yaml", "--dead-after", 3)
        return qnnfarm(server, host, *words, "--builds", tmp_path)

    command = ("build", model_in(tmp_path), "--target", "SM8750:emulator", *options)
    with qnnfarm(server, tmp_path, *command) as process, work(hosts[0]) as first:
        assert any(" s)" in line for line in process.stderr), "a stage has ended"
        first.kill()
        search = ["pgrep", "-f", f"harness.cli build .*{out}.*--overwrite"]
        wait_for(lambda: subprocess.run(search, check=False, capture_output=True).returncode)
        with work(hosts[1]) as second:
            answer, remarks = process.communicate(timeout=280)
            second.send_signal(signal.SIGTERM)
    end_servers(tmp_path)  # and the devices of both
    assert process.returncode == 0, remarks
    assert "built by " in remarks
    assert GenAIContainer.load(out).metadata.container_sha256 in answer
    assert contents(out) == contents(tiny_bundle)
