"""Builds of a lab, on one real PostgreSQL: by workers here, whose builds are real processes."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from procrastinate.jobs import Job, Status

from buildlib.container.container import GenAIContainer
from buildlib.paths import path_below
from harness.devices.devices import Devices
from harness.errors import WrongUseError
from harness.lab import content
from harness.lab.builds import TASK, Builder, BuildJob, LabBuilds
from harness.lab.content import HostFiles, own_address
from harness.lab.jobs import CellEnd, LabJobs
from harness.lab.worker import work
from harness.plans.builds import BuildRequest, ContainerBuild
from harness.plans.cell_runner import ModelCache
from harness.plans.plan_file import Plan
from harness.plans.scheduler import Scheduler
from suites.models import tiny_llama
from tests.command_line import Started
from tests.postgresql_server import PostgresqlServer
from tests.ssh_server import SshServer
from tests.waiting import wait_for

OPTIONS = {
    "arn_cl_options.auto_regression_number": [1, 32],
    "arn_cl_options.context_length": [192],
    "split_model.num_splits": 2,
}
GIB = 1 << 30


@pytest.fixture
def jobs(server: PostgresqlServer) -> Iterator[LabJobs]:
    with LabJobs(server.url("lab")) as jobs:
        yield jobs
    server.ask("lab", "TRUNCATE procrastinate_events, procrastinate_jobs, lab_cells CASCADE")


@pytest.fixture
def files(ssh_server: SshServer, tmp_path: Path) -> Iterator[HostFiles]:
    with HostFiles(ModelCache(), Devices(ssh_config=ssh_server.config), tmp_path / "own") as it:
        yield it


@pytest.fixture
def lab(jobs: LabJobs, files: HostFiles) -> LabBuilds:
    return LabBuilds(jobs, files)


Start = Callable[[int], list[str]]


@pytest.fixture
def start(
    jobs: LabJobs,
    ssh_server: SshServer,
    tmp_path: Path,
    build_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Start]:
    """Starts the builds of a worker with so much memory; returns what it says.

    Its stage cache is the one that all tests share.
    """
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(build_cache))
    with contextlib.ExitStack() as stack:

        def start(memory: int) -> list[str]:
            lines: list[str] = []
            devices = Devices(ssh_config=ssh_server.config)
            own = stack.enter_context(HostFiles(ModelCache(), devices, tmp_path / "worker"))
            jobs.register("board", 0)
            stack.enter_context(Builder(jobs, own, memory, "board", lines.append))
            return lines

        yield start


def model_in(folder: Path) -> Path:
    """Copy the reference model to a folder."""
    return Path(shutil.copytree(tiny_llama.folder(), folder / tiny_llama.folder().name))


def build_of(model: Path, memory: int | None = None, **more: object) -> BuildJob:
    request = BuildRequest(model=model, target="SM8750:emulator", options=OPTIONS, **more)  # type: ignore[arg-type]
    build = request.plan()
    build.memory_limit = memory
    return BuildJob.of(request, build, Path("tiny"), "board")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def statuses(server: PostgresqlServer) -> Counter[object]:
    rows = server.ask("lab", "SELECT status::text FROM procrastinate_jobs")
    return Counter(status for (status,) in rows)


def test_checkpoint_travels_to_a_worker_and_containers_of_a_plan_back_once(
    lab: LabBuilds,
    start: Start,
    server: PostgresqlServer,
    tmp_path: Path,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = str(tmp_path / "origin"), str(tmp_path / "worker" / "lab" / "build_")
    have = content._have

    def have_own(files: Mapping[Path, str]) -> bool:
        """Neither host sees the folders of the other."""
        return not any(str(p).startswith(others) for p in files) and have(files)

    monkeypatch.setattr(content, "_have", have_own)
    how: dict[str, object] = {
        "model": str(model_in(tmp_path / "origin")), "target": "SM8750:emulator", "ar": [1, 32],
        "cl": 192, "splits": 2,
    }  # fmt: skip
    broken = how | {"options": {"no.such.option": 1}}
    entries = [{"path": "broken", "build": broken}, {"path": "head", "build": how}]
    work = [{"kind": "command", "command": ["true"]}]
    plan = Plan.model_validate({"name": "lab", "workloads": work, "containers": entries})
    start(GIB)
    lines: list[str] = []

    def build() -> tuple[ContainerBuild, ...]:
        return lab.build_all(plan, tmp_path / "plan.yaml", "board", lines.append)

    failed, head = build()
    assert "no.such.option" in failed.error
    assert (head.error, head.replaced) == ("", True)
    assert contents(tmp_path / "head") == contents(tiny_bundle)
    assert any("board: " in line for line in lines)
    _, again = build()
    assert (again.sha256, again.replaced, again.stages_run) == (head.sha256, False, 0)
    assert statuses(server) == {"succeeded": 1}


@pytest.mark.slow
def test_builds_share_the_memory_of_a_worker_and_too_large_ones_wait(
    lab: LabBuilds, start: Start, server: PostgresqlServer, tmp_path: Path, tiny_bundle: Path
) -> None:
    needs = {"large": 9 * GIB, "one": 2 * GIB, "two": 2 * GIB, "small": GIB}
    builds = {name: build_of(model_in(tmp_path / name), need) for name, need in needs.items()}
    for build in builds.values():
        lab.submit(build)
    start(3 * GIB)
    wait_for(lambda: statuses(server)["succeeded"] == 3, lambda: statuses(server))
    rows = server.ask(
        "lab",
        "SELECT j.args->>'memory_bytes', e.type::text FROM procrastinate_events e"
        " JOIN procrastinate_jobs j ON j.id = e.job_id"
        " WHERE e.type IN ('started', 'succeeded') ORDER BY e.at, e.id",
    )
    used, most = 0, 0
    for need, event in rows:
        used += int(str(need)) * (1 if event == "started" else -1)
        most = max(most, used)
    assert len(rows) == 6
    assert most == 3 * GIB, "a large and a small one at once, never two large ones"
    assert lab.cancel(builds["large"]) == 1
    with pytest.raises(WrongUseError, match="cancelled"):
        lab.follow(builds["large"], tmp_path / "out", lambda _: None)


def test_hostile_jobs_fail_and_write_nothing(
    jobs: LabJobs, start: Start, server: PostgresqlServer, tmp_path: Path
) -> None:
    good = build_of(model_in(tmp_path)).model_dump(mode="json")
    harms: list[dict[str, object]] = [
        {"name": "../../escaped"},
        {"name": ".."},
        {"id": "../escaped"},
        {"files": {"/a/../../etc/passwd": "0" * 64}},
        {"request": {"target": 5}},
    ]
    for number, harm in enumerate(harms):
        run = f"{number:032x}"
        job = Job(
            queue="build-1", lock=None, queueing_lock=f"{run}:build", task_name=TASK,
            task_kwargs=good | harm,
        )  # fmt: skip
        jobs.put(run, [job])
    lines = start(GIB)
    wait_for(lambda: statuses(server) == {"failed": len(harms)}, lambda: statuses(server))
    assert lines == []
    assert not (tmp_path / "worker" / "lab").exists()


def test_failed_build_is_told_with_its_host_and_reason(
    lab: LabBuilds, start: Start, tmp_path: Path
) -> None:
    text = tmp_path / "calibration.txt"
    text.write_text("a")
    build = build_of(model_in(tmp_path), calibration=text)
    lines = start(GIB)
    lab.submit(build)
    with pytest.raises(WrongUseError, match=r"\Aboard: cannot calibrate: "):
        lab.follow(build, tmp_path / "out", lambda _: None)
    assert "is failed: cannot calibrate" in lines[-1]
    assert lab.submit(build), "what failed is tried again"
    assert lab.cancel(build) == 1


def test_failed_verification_is_told_to_whoever_asked_for_the_build(
    jobs: LabJobs, lab: LabBuilds, tmp_path: Path
) -> None:
    build = build_of(model_in(tmp_path))
    heard: list[Mapping[str, object]] = []
    lab.submit(build)
    jobs.register("h9", 0)
    taken = jobs.take(f"build-{build.memory_bytes}")
    assert taken is not None
    answer = {"target": "SM8750", "verification": {"passed": False, "comparisons": []}}
    jobs.record(taken, CellEnd("failed", "h9", "", "E", "split changed it", json.dumps([answer])))
    jobs.finish(taken, Status.FAILED)
    with pytest.raises(WrongUseError, match="h9: split changed it"):
        lab.follow(build, tmp_path / "out", lambda _: None, hear=heard.append)
    assert heard == [answer]
    jobs.unregister()


@pytest.mark.slow
@pytest.mark.needs("libatomic1")
def test_verification_is_shown_as_that_of_a_build_here(
    start: Start, server: PostgresqlServer, tmp_path: Path, build_cache: Path
) -> None:
    start(4 * GIB)
    build = ("build", tiny_llama.folder(), "--target", "SM8750:emulator", "--verify",
             "--ar", "1,32", "--cl", 192, "--splits", 2)  # fmt: skip
    tables = []
    for name, more in (("here", ()), ("there", ("--lab",)), ("again", ("--lab",))):
        command = (*build, "--out", tmp_path / name, *more)
        with qnnfarm(server, build_cache, *command) as process:
            answer, remarks = process.communicate(timeout=500)
        assert process.returncode == 0, remarks
        table, _, summary = answer.rstrip().rpartition("\n")
        assert str(tmp_path / name) in summary
        tables.append(table)
    assert tables[0] == tables[1] == tables[2]
    assert "verdict" in tables[0]


def test_build_that_takes_more_memory_than_there_is_ends(
    lab: LabBuilds, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_of(model_in(tmp_path), GIB // 64)
    start(GIB // 32)
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(tmp_path / "cold"))
    lab.submit(build)
    words = r"\Aboard: it took 0\.[0-9]+ GiB of the 0\.02 GiB .* 0\.03 GiB: raise --memory"
    with pytest.raises(WrongUseError, match=words):
        lab.follow(build, tmp_path / "out", lambda _: None)


def test_file_of_a_host_that_is_off_comes_from_a_worker(
    jobs: LabJobs, server: PostgresqlServer, ssh_server: SshServer, tmp_path: Path
) -> None:
    (tmp_path / "held").write_text("In the beginning")
    sha256 = hashlib.sha256(b"In the beginning").hexdigest()
    jobs.register("board", 0)
    jobs.announce("board", {"0" * 64: tmp_path / "other", sha256: tmp_path / "held"})
    wanted = {str(tmp_path / "origin" / "text"): sha256}
    assert jobs.holders([sha256]) == {}, "it is not asked for its own"
    with LabJobs(server.url("lab")) as own:
        assert own.holders([sha256]) == {sha256: [("board", str(tmp_path / "held"))]}
        devices = Devices(ssh_config=ssh_server.config)
        with (
            HostFiles(ModelCache(), devices, tmp_path / "own", own.holders) as files,
            files.root(wanted, "nobody.invalid") as root,
        ):
            text = path_below(root, tmp_path / "origin" / "text")
            assert text.read_text() == "In the beginning"
        jobs.announce("board", {})
        assert own.holders([sha256]) == {}
        jobs.announce("board", {sha256: tmp_path / "held"})
        jobs.unregister()
        assert own.holders([sha256]) == {}, "who has ended is not asked"


@pytest.mark.slow
def test_cancelled_build_ends_on_its_worker(
    lab: LabBuilds,
    start: Start,
    server: PostgresqlServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = build_of(model_in(tmp_path))
    lines = start(GIB)
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(tmp_path / "cold"))
    lab.submit(build)
    began: list[str] = []

    def cancel(words: str) -> None:
        began.append(words)
        if "(" in words and lab.cancel(build):  # a stage has ended
            began.clear()

    with pytest.raises(WrongUseError, match="board: the build was cancelled"):
        lab.follow(build, tmp_path / "out", cancel)
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
        assert "waiting for a worker that gives builds 1.5 GiB" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, remarks = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command follows it" in remarks
    assert statuses(server) == {"todo": 1}
    out.mkdir()
    (out / "notes").touch()  # what is there does not keep anybody from ending a build
    with qnnfarm(server, tmp_path, *build, "--cancel") as process:
        answer, remarks = process.communicate(timeout=60)
    assert (process.returncode, answer) == (0, "1 build cancelled\n"), remarks
    assert [path.name for path in out.iterdir()] == ["notes"]


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize(("given", "known"), [("ada@board", "ada@board"), ("", own_address())])
def test_worker_is_known_to_others_as_ssh_reaches_it(
    given: str,
    known: str,
    server: PostgresqlServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts: list[str] = []

    def build(_jobs: object, _files: object, _memory: int, host: str, _tell: object) -> object:
        hosts.append(host)
        return contextlib.nullcontext()

    def end(_: Scheduler) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.lab.worker.Builder", build)
    monkeypatch.setattr(Scheduler, "run", end)
    (tmp_path / "pool.yaml").write_text("devices: [{name: here, type: local}]")
    with pytest.raises(KeyboardInterrupt):
        work(server.url("lab"), tmp_path / "pool.yaml", host=given)
    assert hosts == [known]


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
        _, remarks = process.communicate(timeout=60)
    assert "the builds go on" in remarks
    with qnnfarm(server, tmp_path, *run, "--cancel") as process:
        answer, remarks = process.communicate(timeout=60)
    assert (process.returncode, answer) == (0, "1 build cancelled\n"), remarks
    assert statuses(server) == {"cancelled": 1}


@pytest.mark.slow
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
        return qnnfarm(server, host, *words, "--from-host", host.name)

    command = ("build", tiny_llama.folder(), "--target", "SM8750:emulator", *options)
    with qnnfarm(server, tmp_path, *command) as process, work(hosts[0]) as first:
        assert any(" s)" in line for line in process.stderr), "a stage has ended"
        first.kill()
        search = ["pgrep", "-f", f"harness.cli build.*{hosts[0]}"]
        wait_for(lambda: subprocess.run(search, check=False, capture_output=True).returncode)
        with work(hosts[1]) as second:
            answer, remarks = process.communicate(timeout=280)
            second.send_signal(signal.SIGTERM)
    assert process.returncode == 0, remarks
    assert "built by h2" in remarks
    assert GenAIContainer.load(out).metadata.container_sha256 in answer
    assert contents(out) == contents(tiny_bundle)
