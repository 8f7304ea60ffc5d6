"""Builds of a lab: a worker runs `qnnfarm build` for somebody, in a folder that all hosts see.

Its end stands in the journal of plans, as that of the cell `build` of a run that has the digest of
the build as its id.
"""

import contextlib
import hashlib
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from procrastinate.jobs import Job, Status
from pydantic import BaseModel, ConfigDict, Field

from buildlib.builder.code_digest import own_code
from buildlib.builder.lora_config import LoraSet
from buildlib.builder_options import move_paths
from buildlib.container.container import GenAIContainer, check_replaceable
from buildlib.container.op_packages import KEY as OP_PACKAGES
from buildlib.entry_points import entry_modules, entry_names
from buildlib.error_base import QnnfarmError
from buildlib.errors import BuildError
from buildlib.paths import plain_path
from buildlib.toolchains.child_process import dying_with_parent
from harness.errors import HostFileError, StoreError, WrongUseError
from harness.plans.builds import (
    BuildRequest,
    ContainerBuild,
    PlannedBuild,
    build_containers,
    planned_builds,
)
from harness.plans.journal import CellEnd
from harness.plans.plan_file import Plan
from harness.pool.requirement import OnProgress
from plugins.lab.content import Files, check_files, hashes
from plugins.lab.jobs import LabJobs, Taken, insist
from plugins.lab.service import Service

TASK = "qnnfarm_build"
QUEUE = "build"
KEY = "build"
_TICK_S = 1.0
_LINE = "qnnfarm: "
_LORA = "lora_config.lora_config_path"
_FILES = ("model", "encodings", "calibration")


class BuildJob(BaseModel):
    """A container to build on a host of the lab.

    Attributes:
        id: digest of the request and its files, with the builder's code.
        folder: of the container, which all hosts see.
        files: that the build reads.
        memory_bytes: limit of its memory; by default the builder's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", regex_engine="python-re")

    id: Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\Z")]
    request: BuildRequest
    folder: Path
    files: Files
    memory_bytes: int | None = None

    @classmethod
    def of(cls, planned: PlannedBuild) -> "BuildJob":
        """Return the job of a build, with its limit of memory; hashes its files.

        Raises:
            WrongUseError: it would run programs or libraries of its user.
        """
        request, build, folder = planned
        if own := _programs(request):
            raise WrongUseError(f"{own}: a worker runs no programs of others: build without --lab")
        named = {key: path.absolute() for key in _FILES if (path := getattr(request, key))}
        job = cls(
            id="0" * 32,
            request=request.model_copy(update=named),
            folder=plain_path(folder),
            files=hashes(
                build.files() | {p for p in (request.calibration, request.encodings) if p}
            ),
            memory_bytes=build.memory_limit,
        )
        return job.model_copy(update={"id": job.digest()})

    def digest(self) -> str:
        """Return the id that it has with the builder's code of this host."""
        doors = [entry_modules(door, entry_names(door)) for door in ("builders", "techniques")]
        modules = ("buildlib.builder_options", *itertools.chain.from_iterable(doors))
        code = own_code().of(*modules)
        identity = [self.model_dump(mode="json", exclude={"id", "memory_bytes"}), code]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]

    def check(self, root: Path) -> None:
        """Check that a host may run it, which has the files that it was submitted with.

        Raises:
            HostFileError: a path is not below `root`, or a file is missing or another one.
            WrongUseError: it would run programs or libraries of its user, or another qnnfarm built
                it.
        """
        if own := _programs(self.request):
            raise WrongUseError(f"{own}: a worker runs no programs of others")
        if self.id != self.digest():
            raise WrongUseError("its id is not that of this qnnfarm: use one version on all hosts")
        root = root.resolve()
        for path in (self.folder, *map(Path, self.files), *_paths(self.request)):
            if not path.resolve().is_relative_to(root):
                raise HostFileError(str(path), f"builds read and write below {root} alone")
        check_files(self.files)

    def arguments(self, options: Path) -> list[str]:
        """Return the arguments of `qnnfarm build`.

        Args:
            options: a file that the request's options are written to.
        """
        asked = self.request
        options.write_text(json.dumps(dict(asked.options)), encoding="utf-8")
        words = [str(asked.model), "--target", asked.target, "--options", str(options)]
        for key in ("encodings", "calibration", "toolchain", "qairt_sdk"):
            value = getattr(asked, key)
            words += [] if value is None else [f"--{key.replace('_', '-')}", str(value)]
        if asked.verify:
            words += ["--verify", "--reference-with", asked.reference_with]
        words += ["--out", str(self.folder), "--overwrite", "--json"]
        if self.memory_bytes is not None:
            words += ["--memory", str(self.memory_bytes / 2**30)]
        return words


def _programs(request: BuildRequest) -> str:
    """Name what it has of its user's own that a build would run; empty if nothing."""
    if any(OP_PACKAGES in str(key) for key in request.options):
        return OP_PACKAGES
    return "--qairt-sdk" if request.qairt_sdk is not None else ""


def _paths(request: BuildRequest) -> Iterator[Path]:
    """Yield the files and folders that it names, then those that a file of these names."""
    named = [str(path) for key in _FILES if (path := getattr(request, key))]

    def keep(path: str) -> str:
        named.append(path)
        return path

    move_paths(request.options, keep)
    yield from map(Path, named)
    lora = Path(str(request.options.get(_LORA, "")))
    if lora.is_file():
        yield from LoraSet.load(lora).files().values()


@dataclass(frozen=True, slots=True)
class LabBuilds:
    """Builds, for the hosts that ask for them."""

    jobs: LabJobs

    def submit(self, build: BuildJob, *, overwrite: bool = True) -> bool:
        """Put a build into the queue unless it waits or runs; return whether it was not done.

        Args:
            overwrite: replace another container in its folder.
        """
        is_live = bool(self.jobs.live(build.id))
        end = self.jobs.ends(build.id).get(KEY)
        if end is not None and end.status == "done" and not is_live:
            with contextlib.suppress(WrongUseError):
                self._container(build, end)
                return False  # it is gone otherwise: it is built again
        job = Job(
            queue=QUEUE,
            lock=None,
            queueing_lock=f"{build.id}:{KEY}",
            task_name=TASK,
            task_kwargs=build.model_dump(mode="json"),
        )
        if not is_live:
            check_replaceable(build.folder, exist_ok=overwrite)
            self.jobs.put([job])
        return True

    def follow(
        self,
        build: BuildJob,
        tell: OnProgress,
        *,
        hear: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> tuple[GenAIContainer, Mapping[str, Any], str]:
        """Wait for a build that was submitted; return container, answer and host.

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
                news = "waiting for a worker with --builds"
            elif end.status == "begun":
                news = f"{end.host}: {end.summary or end.status}"
            if news != words:
                tell(words := news)
            time.sleep(_TICK_S)
        if end is not None and end.status in {"done", "failed"} and end.summary:
            hear(_answer(end))
        if end is None or end.status != "done":
            reason = end.reason if end else ""
            place = f"{end.host}: " if end and end.host else ""
            raise WrongUseError(f"{place}{reason or 'the build was cancelled'}")
        return self._container(build, end), _answer(end), end.host

    def build(
        self,
        builds: Sequence[PlannedBuild],
        *,
        overwrite: bool,
        tell: Callable[[str, str], None],
        hear: Callable[[Mapping[str, Any]], None],
    ) -> Iterator[tuple[Mapping[str, Any], str, bool]]:
        """See `Lab`."""
        jobs = [BuildJob.of(planned) for planned in builds]
        is_new = [self.submit(job, overwrite=overwrite) for job in jobs]
        for job, new in zip(jobs, is_new, strict=True):
            _, answer, host = self.follow(job, partial(tell, job.request.target), hear=hear)
            yield answer, host, new

    def build_containers(
        self, plan: Plan, plan_file: Path, tell: OnProgress
    ) -> tuple[ContainerBuild, ...]:
        """See `Lab`."""
        submitted: dict[Path, tuple[BuildJob, bool]] = {}

        def submit(planned: PlannedBuild) -> tuple[BuildJob, bool]:
            *_, folder = planned
            if folder not in submitted:
                job = BuildJob.of(planned)
                submitted[folder] = job, self.submit(job)
            return submitted[folder]

        def build(request: BuildRequest, folder: Path, tell: OnProgress) -> tuple[str, int]:
            job, is_new = submitted.get(folder) or submit((request, request.plan(), folder))
            container, answer, _ = self.follow(job, tell)
            return container.metadata.container_sha256, answer["stages_run"] if is_new else 0

        for planned in planned_builds(plan, plan_file):
            with contextlib.suppress(QnnfarmError):  # told when it is followed
                submit(planned)
        return build_containers(plan, plan_file, tell, build)

    def cancel(self, builds: Sequence[PlannedBuild]) -> int:
        """See `Lab`."""
        count = 0
        for planned in builds:
            with contextlib.suppress(WrongUseError, HostFileError):  # such a one was not submitted
                count += self.jobs.cancel(BuildJob.of(planned).id)
        return count

    def _container(self, build: BuildJob, end: CellEnd) -> GenAIContainer:
        """Return the container of a build that is done, as this host sees it."""
        try:
            container = GenAIContainer.load(build.folder)
        except BuildError as error:
            reason = "name a folder that all hosts of the lab see"
            raise WrongUseError(f"{end.host} built it, but {error}: {reason}") from None
        if container.metadata.container_sha256 != _answer(end)["sha256"]:
            raise WrongUseError(f"{build.folder} is not what {end.host} built: build it again")
        return container


def _answer(end: CellEnd) -> Mapping[str, Any]:
    (answer,) = json.loads(end.summary)
    return dict(answer)


class Builder(Service):
    """Runs builds of the lab's queue on this host, one after the other.

    Each is a process of its own, which ends with this one.

    Args:
        jobs: of the lab.
        root: folder that builds may read and write below, which all hosts see.
        tell: called with a line when a build begins or ends.
    """

    def __init__(self, jobs: LabJobs, root: Path, tell: OnProgress) -> None:
        self._jobs = jobs
        self._root = root
        self._tell = tell
        super().__init__(_TICK_S)

    def _work(self) -> None:
        taken = self._jobs.take(QUEUE)
        if taken is None:
            return
        end = CellEnd("failed", self._jobs.host)
        try:
            build = BuildJob.model_validate(taken.job.task_kwargs)
            if taken.job.queueing_lock != f"{build.id}:{KEY}":
                raise ValueError(f"it is not the build {build.id}")
        except ValueError as error:  # of another version, or of somebody who means harm
            end = replace(end, reason=str(error))
        else:
            self._tell(f"build {build.folder} for {build.request.target} begins")
            end = self._build(taken, build)
            words = end.reason and f": {end.reason}"
            self._tell(f"build {build.folder} for {build.request.target} is {end.status}{words}")
        insist(lambda: self._finish(taken, end))

    def _finish(self, taken: Taken, end: CellEnd) -> None:
        if end.status == "interrupted" and self._is_closing.is_set():
            self._jobs.give_back(taken)
            return
        statuses = {"done": Status.SUCCEEDED, "failed": Status.FAILED}
        self._jobs.record(taken, end)
        self._jobs.finish(taken, statuses.get(end.status, Status.ABORTED))

    def _build(self, taken: Taken, build: BuildJob) -> CellEnd:
        try:
            build.check(self._root)
            with tempfile.TemporaryDirectory(prefix="qnnfarm-build-") as scratch:
                return self._run_command(taken, build, Path(scratch))
        except Exception as error:  # noqa: BLE001 - whoever asked for it is to hear of it
            return CellEnd("failed", self._jobs.host, "", type(error).__name__, str(error))

    def _run_command(self, taken: Taken, build: BuildJob, scratch: Path) -> CellEnd:
        words = build.arguments(scratch / "options.json")
        command = dying_with_parent([sys.executable, "-m", "harness.cli", "build", *words])
        answer = scratch / "answer.json"
        with answer.open("wb") as stdout:
            process = subprocess.Popen(
                command, stdout=stdout, stderr=subprocess.PIPE, start_new_session=True
            )
        with process:
            is_ended, last = self._follow(process, taken, build.request.target)
        text = answer.read_text(encoding="utf-8")
        if process.returncode == 0:
            return CellEnd("done", self._jobs.host, summary=text)
        if is_ended:
            return CellEnd("interrupted", self._jobs.host, reason="the build was cancelled")
        reason = last.removeprefix(_LINE) or f"exit status {process.returncode}"
        return CellEnd("failed", self._jobs.host, "", "WrongUseError", reason, text)

    def _follow(
        self, process: "subprocess.Popen[bytes]", taken: Taken, target: str
    ) -> tuple[bool, str]:
        """Show the output of a build until it ends, which somebody may cancel.

        Returns:
            Whether it was ended, and its last line.
        """
        last = [""]
        reader = threading.Thread(target=_read_lines, args=(process, last), daemon=True)
        reader.start()
        is_ended, shown = False, ""
        while process.poll() is None:
            with contextlib.suppress(StoreError):
                ends = self._is_closing.is_set() or taken.job.id in self._jobs.to_abort()
                if ends and not is_ended:
                    process.send_signal(signal.SIGINT)
                    is_ended = True
                if last[0] != shown and not last[0].startswith(_LINE):
                    shown = last[0]
                    words = shown.removeprefix(f"{target}: ")
                    self._jobs.record(taken, CellEnd("begun", self._jobs.host, summary=words))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TICK_S)
        reader.join()
        return is_ended, last[0]


def _read_lines(process: "subprocess.Popen[bytes]", last: list[str]) -> None:
    for line in process.stderr or ():
        last[0] = line.decode(errors="replace").strip() or last[0]
