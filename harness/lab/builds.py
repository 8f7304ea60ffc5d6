"""Builds of a lab: a worker runs `qnnfarm build` for somebody, in the memory that it has for them.

A build is a job; its queue names the memory that it needs. Its end stands in `lab_cells`, as that
of the cell `build` of a run that has the digest of the build as its id.
"""

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
from procrastinate.jobs import Job, Status
from pydantic import BaseModel, ConfigDict, Field

import buildlib
from buildlib.builder.build import Build
from buildlib.builder.code_digest import CodeDigest
from buildlib.container.container import GenAIContainer
from buildlib.errors import BuildError
from buildlib.paths import path_below
from buildlib.toolchains.child_process import dying_with_parent
from harness.deploy.digests import hash_files
from harness.devices.devices import Devices
from harness.errors import HarnessError, HostFileError, StoreError, WrongUseError
from harness.lab.content import BUILD, Files, HostFiles, folder_files
from harness.lab.jobs import CellEnd, LabJobs, Taken, insist
from harness.lab.service import Service
from harness.plans.builds import BuildRequest, ContainerBuild, build_containers
from harness.plans.cell_runner import ModelCache
from harness.plans.matrix import resolve_path
from harness.plans.plan_file import Plan
from harness.pool.status import OnProgress

TASK = "qnnfarm_build"
KEY = "build"
_QUEUE = "build-"
_TICK_S = 1.0
_ANSWER, _CONTAINER = "answer.json", "container"
_LINE = "qnnfarm: "


class BuildJob(BaseModel):
    """A container to build on a host of the lab.

    Attributes:
        id: digest of the request and its files, with the builder's code.
        name: of the container's folder.
        files: that the build reads on the host that asks for it.
        memory_bytes: its peak, as it is estimated, or as its user says.
        origin: the host that asks for it, as SSH reaches it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", regex_engine="python-re")

    id: Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\Z")]
    name: Annotated[str, Field(pattern=r"\A[^/\x00]*[^/\x00.][^/\x00]*\Z")]
    request: BuildRequest
    files: Files
    memory_bytes: int
    origin: str

    @classmethod
    def of(cls, request: BuildRequest, build: Build, folder: Path, origin: str) -> "BuildJob":
        """Return the job of a request; hashes its files.

        Args:
            build: that it plans, with its limit of memory, if it has one.
            folder: of the container on this host.
        """
        request = request.at(Path("/"))
        paths = build.files() | {p for p in (request.calibration, request.encodings) if p}
        files = {str(path): digest.sha256 for path, digest in hash_files(sorted(paths)).items()}
        code = CodeDigest(Path(buildlib.__path__[0])).of("buildlib.builder_options")
        identity = [request.model_dump(mode="json"), files, code]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        need = build.memory_limit or build.memory_bytes
        return cls(
            id=digest[:32],
            name=folder.resolve().name or "container",
            request=request,
            files=files,
            memory_bytes=need,
            origin=origin,
        )


class BuiltContainer(BaseModel):
    """A container that a host has built.

    Attributes:
        host: as SSH reaches it.
        answer: that of `qnnfarm build --json` there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    folder: str
    files: Files
    answer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LabBuilds:
    """Builds, for the hosts that ask for them.

    Attributes:
        files: of other hosts, fetched here.
    """

    jobs: LabJobs
    files: HostFiles

    def submit(self, build: BuildJob) -> bool:
        """Put a build into the queue unless it waits or runs; return whether it was not done."""
        is_live = bool(self.jobs.live(build.id))
        end = self.jobs.ends(build.id).get(KEY)
        if end is not None and end.status == "done" and not is_live:
            with contextlib.suppress(HostFileError), self._fetched(end):
                return False  # it is gone otherwise: it is built again
        job = Job(
            queue=f"{_QUEUE}{build.memory_bytes}",
            lock=None,
            queueing_lock=f"{build.id}:{KEY}",
            task_name=TASK,
            task_kwargs=build.model_dump(mode="json"),
        )
        if not is_live:
            self.jobs.put(build.id, [job])
        return True

    def follow(
        self,
        build: BuildJob,
        folder: Path,
        tell: OnProgress,
        *,
        overwrite: bool = True,
        hear: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> tuple[GenAIContainer, BuiltContainer]:
        """Wait for a build that was submitted, and place its container in a folder.

        A KeyboardInterrupt ends the waiting, and nothing else.

        Args:
            hear: called with the answer of `qnnfarm build --json`; also where a stage changed the
                model, and there is no container.

        Raises:
            WrongUseError: it failed, or was cancelled.
        """
        words = ""
        while True:
            is_live = bool(insist(lambda: self.jobs.live(build.id)))
            end = insist(lambda: self.jobs.ends(build.id)).get(KEY)
            if not is_live:
                break
            news = words
            if end is None:
                need = f"{build.memory_bytes / 2**30:.1f} GiB"
                news = f"waiting for a worker that gives builds {need}"
            elif end.status == "begun":
                news = f"{end.host}: {end.summary or end.status}"
            if news != words:
                tell(words := news)
            time.sleep(_TICK_S)
        if end is not None and end.status == "failed" and end.summary:
            (answer,) = json.loads(end.summary)
            hear(answer)
        if end is None or end.status != "done":
            reason = end.reason if end else ""
            place = f"{end.host}: " if end and end.host else ""
            raise WrongUseError(f"{place}{reason or 'the build was cancelled'}")
        with self._fetched(end) as (container, source):
            hear(source.answer)
            return container.save(folder, exist_ok=overwrite), source

    def build_all(
        self, plan: Plan, plan_file: Path, origin: str, tell: OnProgress
    ) -> tuple[ContainerBuild, ...]:
        """Build the containers of a plan that name their build at once; see `build_containers`.

        Args:
            origin: this host, as SSH of others reaches it.
        """
        submitted: dict[Path, tuple[BuildJob, bool]] = {}

        def submit(job: BuildJob, folder: Path) -> tuple[BuildJob, bool]:
            if folder not in submitted:
                submitted[folder] = job, self.submit(job)
            return submitted[folder]

        def build(request: BuildRequest, folder: Path, tell: OnProgress) -> tuple[str, int]:
            job, is_new = submitted.get(folder) or submit(_job(request, folder, origin), folder)
            container, source = self.follow(job, folder, tell)
            stages = source.answer["stages_run"] if is_new else 0
            return container.metadata.container_sha256, stages

        for job, folder in _jobs_of(plan, plan_file, origin):
            submit(job, folder)
        return build_containers(plan, plan_file, tell, build)

    def cancel_all(self, plan: Plan, plan_file: Path) -> int:
        """End the builds of a plan that wait or run; return the number of builds."""
        return sum(self.cancel(job) for job, _ in _jobs_of(plan, plan_file, ""))

    def cancel(self, build: BuildJob) -> int:
        """End a build that waits or runs; return the number of builds."""
        return self.jobs.cancel(build.id)

    @contextmanager
    def _fetched(self, end: CellEnd) -> Iterator[tuple[GenAIContainer, BuiltContainer]]:
        source = BuiltContainer.model_validate_json(end.summary)
        with self.files.root(source.files, source.host) as root:
            yield GenAIContainer.load(path_below(root, source.folder)), source


def _job(request: BuildRequest, folder: Path, origin: str) -> BuildJob:
    return BuildJob.of(request, request.plan(), folder, origin)


def _jobs_of(plan: Plan, plan_file: Path, origin: str) -> Iterator[tuple[BuildJob, Path]]:
    """Yield the builds of a plan, and the folders of their containers; none that cannot begin."""
    for entry in plan.containers:
        if entry.build is not None:
            with contextlib.suppress(BuildError, HarnessError):  # told when it is followed
                folder = resolve_path(plan_file, entry.path)
                yield _job(BuildRequest.of(entry.build, plan_file), folder, origin), folder


@contextmanager
def open_lab_builds(location: str) -> Iterator[LabBuilds]:
    """Open the builds of a lab.

    Args:
        location: URL of its database.
    """
    with (
        LabJobs(location) as jobs,
        HostFiles(ModelCache(), Devices(), holders=jobs.holders) as files,
    ):
        yield LabBuilds(jobs, files)


@dataclass(eq=False, slots=True)
class _Running:
    """A build that runs here."""

    taken: Taken
    build: BuildJob
    process: "subprocess.Popen[bytes] | None" = None
    is_ended: bool = False
    """Somebody cancelled it, or this worker ends."""
    excess: str = ""
    """Of one that took too much memory: how much."""
    answer: str = ""
    """Of one that failed: why a stage does not compute what the one before it does."""


class Builder(Service):
    """Runs builds of the lab's queue on this host: as many at once as fit into its memory.

    The oldest build that this host could ever run goes first, and others wait until it fits, so
    that small ones do not keep a large one out. Each is a process of its own, which ends with this
    one.

    Args:
        jobs: of the lab.
        files: of the hosts that ask for builds.
        memory_bytes: for all builds at once.
        host: this one, as SSH of others reaches it.
        tell: called with a line when a build begins or ends.
    """

    def __init__(
        self,
        jobs: LabJobs,
        files: HostFiles,
        memory_bytes: int,
        host: str,
        tell: OnProgress,
    ) -> None:
        self._jobs = jobs
        self._files = files
        self._memory_bytes = memory_bytes
        self._host = host
        self._tell = tell
        self._running: dict[threading.Thread, _Running] = {}
        super().__init__(_TICK_S)

    def close(self) -> None:
        """End the builds that run here, and give them to other workers."""
        super().close()
        self._end(list(self._running.values()))
        for thread in self._running:
            thread.join()

    def _work(self) -> None:
        self._running = {t: one for t, one in self._running.items() if t.is_alive()}
        aborted = self._jobs.to_abort() if self._running else frozenset()
        self._end([one for one in self._running.values() if one.taken.job.id in aborted])
        self._guard_memory()
        self._take()

    def _end(self, builds: Sequence[_Running]) -> None:
        for one in builds:
            if not one.is_ended and one.process is not None:
                one.process.send_signal(signal.SIGINT)
            one.is_ended = True

    def _guard_memory(self) -> None:
        """End the build furthest beyond its need, if all take more than there is for them."""
        trees = {one: _tree(one.process) for one in self._running.values()}
        sums = {one: sum(map(_memory, tree)) for one, tree in trees.items()}
        if sum(sums.values()) <= self._memory_bytes:
            return
        one = max(sums, key=lambda one: sums[one] - one.build.memory_bytes)
        sizes = (sums[one], one.build.memory_bytes, self._memory_bytes)
        took, need, all_have = (f"{size / 2**30:.2f} GiB" for size in sizes)
        one.excess = f"it took {took} of the {need} that it asked for, where builds have {all_have}"
        for process in trees[one]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _take(self) -> None:
        """Take the oldest build that could run here, once there is memory for it."""
        in_use = sum(one.build.memory_bytes for one in self._running.values())
        needs = (int(queue.removeprefix(_QUEUE)) for queue in self._jobs.queues(TASK))
        need = next((need for need in needs if need <= self._memory_bytes), None)
        if need is None or in_use + need > self._memory_bytes:
            return
        job = self._jobs.take(f"{_QUEUE}{need}")
        if job is not None:
            try:
                one = _Running(job, BuildJob.model_validate(job.job.task_kwargs))
            except ValueError as error:  # of another version, or of somebody who means harm
                self._finish(job, CellEnd("failed", self._host, reason=str(error)))
                return
            thread = threading.Thread(target=self._run, args=(one,), daemon=True)
            self._running[thread] = one
            thread.start()

    def _run(self, one: _Running) -> None:
        name = f"build {one.build.name} for {one.build.request.target}"
        self._tell(f"{name} begins")
        try:
            end = self._build(one)
        except KeyboardInterrupt:
            end = CellEnd("interrupted", self._host, reason="the build was cancelled")
        except Exception as error:  # noqa: BLE001 - whoever asked for it is to hear of it
            name_of_error = type(error).__name__
            end = CellEnd("failed", self._host, "", name_of_error, str(error), one.answer)
        self._tell(f"{name} is {end.status}{end.reason and ': '}{end.reason}")
        insist(lambda: self._finish(one.taken, end))

    def _finish(self, taken: Taken, end: CellEnd) -> None:
        if end.status == "interrupted" and self._is_closing.is_set():
            self._jobs.give_back(taken)
            return
        statuses = {"done": Status.SUCCEEDED, "failed": Status.FAILED}
        self._jobs.record(taken, end)
        self._jobs.finish(taken, statuses.get(end.status, Status.ABORTED))

    def _build(self, one: _Running) -> CellEnd:
        """Build a container, unless the cache has it; `KeyboardInterrupt` if it was ended."""
        build = one.build

        def make(folder: Path) -> None:
            self._show(one, "fetching its files")
            with self._files.root(build.files, build.origin) as root:
                self._run_command(one, build.request.at(root, folder), folder)

        with self._files.entry(BUILD, {"id": build.id}, build.name, make) as folder:
            out = folder / _CONTAINER
            files = {str(p): d.sha256 for p, d in hash_files(folder_files(out)).items()}
            (summary,) = json.loads(Path(folder, _ANSWER).read_text(encoding="utf-8"))
        source = BuiltContainer(host=self._host, folder=str(out), files=files, answer=summary)
        return CellEnd("done", self._host, summary=source.model_dump_json())

    def _run_command(self, one: _Running, request: BuildRequest, folder: Path) -> None:
        """Run `qnnfarm build`, which fills a folder."""
        build, answer = one.build, folder / _ANSWER
        words = request.arguments(folder / "options.json")
        words += ["--out", str(folder / _CONTAINER), "--json"]
        words += ["--memory", str(build.memory_bytes / 2**30)]
        command = dying_with_parent([sys.executable, "-m", "harness.cli", "build", *words])
        with answer.open("wb") as stdout:
            process = subprocess.Popen(
                command, stdout=stdout, stderr=subprocess.PIPE, start_new_session=True
            )
        with process:
            one.process = process
            if one.is_ended:
                process.send_signal(signal.SIGINT)
            last = self._follow(process, one)
        if one.excess and process.returncode != 0:
            raise WrongUseError(f"{one.excess}: raise --memory, or --build-memory of the worker")
        if one.is_ended and process.returncode != 0:
            raise KeyboardInterrupt
        if process.returncode != 0:
            one.answer = answer.read_text(encoding="utf-8")
            raise WrongUseError(last.removeprefix(_LINE) or f"exit status {process.returncode}")

    def _follow(self, process: "subprocess.Popen[bytes]", one: _Running) -> str:
        """Show the output of a build, a line a second at most; return its last line."""
        last, shown_at = "", float("-inf")
        for line in process.stderr or ():
            last = line.decode(errors="replace").strip() or last
            if time.monotonic() - shown_at > _TICK_S and not last.startswith(_LINE):
                shown_at = time.monotonic()
                self._show(one, last.removeprefix(f"{one.build.request.target}: "))
        return last

    def _show(self, one: _Running, words: str) -> None:
        with contextlib.suppress(StoreError):
            self._jobs.record(one.taken, CellEnd("begun", self._host, summary=words))


def _tree(process: "subprocess.Popen[bytes] | None") -> list[psutil.Process]:
    """Return a process that runs, and all that it started."""
    if process is None or process.poll() is not None:
        return []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    return []


def _memory(process: psutil.Process) -> int:
    """Return the bytes of a process in memory, without files that it maps."""
    with contextlib.suppress(psutil.NoSuchProcess):
        memory = process.memory_info()
        return int(memory.rss - memory.shared)
    return 0
