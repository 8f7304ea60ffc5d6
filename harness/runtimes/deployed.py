"""Common part of runtimes on a device: deployment, runs in a folder there, their log, sampling."""

import contextlib
import hashlib
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from buildlib.container.container import GenAIContainer
from buildlib.container.op_packages import Registration
from harness.deploy.deploy import deploy, remove_run
from harness.deploy.deployment import Deployment, Progress
from harness.deploy.digests import hashes_on
from harness.deploy.store import DISK_FULL
from harness.devices.base import DeviceProperties, PushItem
from harness.devices.device import Device
from harness.errors import (
    DeploymentCorruptError,
    DeviceFullError,
    HarnessError,
    RunnerError,
    RuntimeOutputError,
)
from harness.results.records import TelemetrySeries
from harness.runtimes.base import RuntimeOptions
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.bundles.checks import check_bundle

if TYPE_CHECKING:
    from harness.telemetry.sampler import Sampling

_LINE = re.compile(
    r"^qnnfarm-run exit=(?P<exit>\d{1,3}) signal=(?P<signal>\d{1,3}) timed_out=(?P<timed_out>[01])"
    r" peak_rss_kb=(?P<peak>\d{1,12}) peak_anon_kb=(?P<anonymous>\d{1,12})"
    r" peak_file_kb=(?P<file>\d{1,12}) elapsed_ms=(?P<elapsed>-?\d{1,12})"
    r" reason=(?P<reason>[A-Za-z-]{1,32}) leftover=(?P<leftover>\d{1,9})$"
)


_RUNNING = re.compile(r"qnnfarm-running elapsed_s=(?P<elapsed>\d{1,9}) ?(?P<words>.{0,100})")


@dataclass(frozen=True)
class RunOutcome:
    """End of a command on the device.

    Attributes:
        signal: that killed it, 0 for none.
        reason: `exited`, `timeout`, `log-too-big`, `log-gone`, or the signal that interrupted
            `run.sh`.
        peak_rss_bytes: highest resident set of its largest process, as the kernel saw it; None
            where it was looked at too seldom to know.
        peak_anonymous_bytes: of the process that had most, memory of its own.
        peak_file_bytes: of the process that had most, pages of mapped files and shared memory.
        leftover: processes of the run that not even SIGKILL ended.
    """

    exit_status: int
    signal: int
    timed_out: bool
    reason: str
    peak_rss_bytes: int | None
    peak_anonymous_bytes: int | None
    peak_file_bytes: int | None
    elapsed_s: float
    leftover: int

    @property
    def succeeded(self) -> bool:
        """True if it left by itself with status 0."""
        return self.reason == "exited" and self.exit_status == 0

    @property
    def memory(self) -> dict[str, float]:
        """The peaks that are known, by metric."""
        peaks = {
            "peak_rss_bytes": self.peak_rss_bytes,
            "peak_anonymous_bytes": self.peak_anonymous_bytes,
            "peak_file_bytes": self.peak_file_bytes,
        }
        return {key: float(peak) for key, peak in peaks.items() if peak is not None}

    def in_words(self) -> str:
        """Describe the end, in words that stand after the command's name."""
        match self.reason:
            case "timeout":
                limit = "--timeout, or runner_s of a plan, sets another limit"
                return f"had not ended after {self.elapsed_s:.0f} s and was killed: {limit}"
            case "log-too-big":
                return "was killed for what it wrote: its log grew too big"
            case "log-gone":
                return "was ended, since its folder on the device was removed"
            case "exited" if self.signal:
                return f"was killed by signal {self.signal} after {self.elapsed_s:.1f} s"
            case "exited":
                return f"ended with status {self.exit_status}"
            case _:
                return f"was interrupted ({self.reason})"


def parse_run_line(output: str) -> RunOutcome | None:
    """Return the outcome in the last line of `run.sh`'s output; None when that is not there."""
    match = _LINE.match(output.rstrip().rpartition("\n")[2].strip())
    if match is None:
        return None
    return RunOutcome(
        exit_status=int(match["exit"]),
        signal=int(match["signal"]),
        timed_out=match["timed_out"] == "1",
        reason=match["reason"],
        peak_rss_bytes=int(match["peak"]) * 1024 or None,
        peak_anonymous_bytes=int(match["anonymous"]) * 1024 or None,
        peak_file_bytes=int(match["file"]) * 1024 or None,
        elapsed_s=max(0, int(match["elapsed"])) / 1000,
        leftover=int(match["leftover"]),
    )


_SEND_TIMEOUT_S = 60.0
_MARGIN_S = 30.0  # for adb and run.sh around the runner's own time limit
_LOG_TAIL = 4000
_LARGEST_OUTPUT = 8 << 20
_LARGEST_LOG = 256 << 10


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Sends a run's inputs, runs commands in its folder, and reads their output.

    Attributes:
        on_running: as `RuntimeOptions` has it.
    """

    device: Device
    deployment: Deployment
    on_running: Callable[[float, str], None] | None = None

    def send(self, inputs: Mapping[str, str | bytes]) -> None:
        """Write a query's inputs into the folder: small files, which are never reused."""
        device, run_dir = self.device, self.deployment.run_dir
        contents = {
            name: data.encode() if isinstance(data, str) else data for name, data in inputs.items()
        }
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
        with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
            items = [
                PushItem(Path(folder) / str(number), f"{run_dir}/{name}")
                for number, name in enumerate(contents)
            ]
            for item, data in zip(items, contents.values(), strict=True):
                item.local.write_bytes(data)
            device.push_many(items, timeout_s=_SEND_TIMEOUT_S)
        arrived = hashes_on(device, run_dir, digests, timeout_s=_SEND_TIMEOUT_S)
        for name, sha256 in digests.items():
            if arrived.get(name) != sha256:
                raise DeploymentCorruptError(device.serial, name, sha256, arrived.get(name, ""))

    def run(
        self, command: Sequence[str], *, name: str, timeout_s: float, stdout: str | None = None
    ) -> RunOutcome:
        """Run a command in the folder; every end but a good one is an error.

        Args:
            name: of the command in errors.
            timeout_s: for the command itself.
            stdout: a file in the folder for its output; None writes that into the log.
        """
        device, run_dir = self.device, self.deployment.run_dir
        script = ["sh", f"{self.deployment.scripts_dir}/run.sh"]
        script += ["-o", stdout] if stdout else []
        script += [run_dir, str(int(timeout_s)), "run.log", "--", *command]
        result = device.stream(
            script, on_output=_Listener(self.on_running), timeout_s=timeout_s + _MARGIN_S
        )
        outcome = parse_run_line(result.stdout)
        if outcome is None:
            tail = (result.stderr or result.stdout)[-_LOG_TAIL:]
            if DISK_FULL in tail:
                raise DeviceFullError(device.serial, run_dir, None, None)
            reason = "could not be started"
            raise RunnerError(device.serial, name, reason, result.exit_status, tail)
        if not outcome.succeeded:
            tail = self._library_errors(stdout) + self.read_log(_LOG_TAIL)
            raise RunnerError(device.serial, name, outcome.in_words(), outcome.exit_status, tail)
        return outcome

    def _library_errors(self, stdout: str | None) -> str:
        """Return the library's output in place of an answer, marked as errors in the log are."""
        if stdout is None:
            return ""
        command = ["tail", "-c", str(_LOG_TAIL), f"{self.deployment.run_dir}/{stdout}"]
        output = self.device.shell(command, check=False).stdout
        _, mark, answer = output.rpartition("\n[BEGIN]: ")
        if not mark or "[END]" in answer:
            return ""
        return "".join(f"[ERROR] {line}\n" for line in answer.splitlines()[-2:] if line.strip())

    def read_log(self, most: int = _LARGEST_LOG) -> str:
        """Read the end of the last command's log; empty if there is none."""
        command = ["tail", "-c", str(most), f"{self.deployment.run_dir}/run.log"]
        return self.device.shell(command, check=False).stdout

    def pull(self, name: str, most: int) -> bytes:
        """Read a binary file of the folder, of at most so many bytes."""
        received = 0

        def count(size: int) -> None:
            nonlocal received
            received += size
            if received > most:  # a device may send without end
                reason = f"the runner left more than {most} bytes in {name}"
                raise RuntimeOutputError(self.device.serial, reason)

        with tempfile.TemporaryDirectory(prefix="qnnfarm-") as scratch:
            local = Path(scratch) / name
            self.device.pull(f"{self.deployment.run_dir}/{name}", local, on_progress=count)
            return local.read_bytes()

    def read(self, name: str) -> str:
        """Read a file of the folder, of bounded size; invalid UTF-8 is replaced."""
        size = _LARGEST_OUTPUT + 1
        command = ["head", "-c", str(size), f"{self.deployment.run_dir}/{name}"]
        result = self.device.shell(command, check=False, max_output=size)
        if result.exit_status != 0:
            raise RuntimeOutputError(self.device.serial, f"the runner left no {name}")
        if len(result.stdout) > _LARGEST_OUTPUT:
            reason = f"the runner left more than {_LARGEST_OUTPUT} bytes in {name}"
            raise RuntimeOutputError(self.device.serial, reason)
        return result.stdout


class _Listener:
    """Takes the output of `run.sh`, and tells of the lines that say how far a command is."""

    def __init__(self, on_running: Callable[[float, str], None] | None) -> None:
        self._on_running = on_running
        self._open = b""

    def __call__(self, data: bytes) -> None:
        *lines, self._open = (self._open + data)[-_LOG_TAIL:].split(b"\n")
        for line in lines:
            match = _RUNNING.fullmatch(line.decode("utf-8", "replace").strip())
            if match and self._on_running is not None:
                self._on_running(float(match["elapsed"]), match["words"])


# Files of a run are links into the store, and Python looks for modules where a link leads. It
# writes no bytecode: on a full disk that would be cut off, and the next start fail to read it.
_PYTHON = ("env", "PYTHONPATH=.", "PYTHONDONTWRITEBYTECODE=1", "python3")


def runner_command(runner: str, op_packages: Sequence[Registration] = ()) -> tuple[str, ...]:
    """Return the command that starts a runner in a run folder, without its options.

    Args:
        runner: its file.
        op_packages: that Genie's runners in Python, and their children, register, in their order.
    """
    if not runner.endswith(".py"):
        return (f"./{runner}",)
    registered = " ".join(map(str, op_packages))
    env, *python = _PYTHON
    variables = (f"QNNFARM_OP_PACKAGES={registered}",) if registered else ()
    return (env, *variables, *python, runner)


RUN_S = 300.0
"""Limit of an answer, a window or a text on a device."""


def _in_silence(_serial: str) -> AbstractContextManager[Progress]:
    return contextlib.nullcontext(lambda _sent, _total: None)


class DeployedRuntime:
    """Base of runtimes with one run folder on the device.

    Attributes:
        device: only the run folder and the content store on it are touched.
        deployment: on the device; None before `prepare`.
        bundle: files of a run, the user's included.
    """

    def __init__(
        self,
        device: Device,
        properties: DeviceProperties,
        bundle: Bundle,
        options: RuntimeOptions,
        container: GenAIContainer | None = None,
    ) -> None:
        self.device = device
        self.options = options
        self.bundle = bundle.add(options.push)
        self._check = partial(check_bundle, self.bundle, device, properties, container)
        self._run_id = f"run-{uuid.uuid4().hex}"
        self.deployment: Deployment | None = None
        self._sampling: Sampling | None = None
        self._touched = False

    def prepare(self) -> Deployment:
        """Put the files on the device, once; those that are there are not pushed again."""
        if self.deployment is None:
            self._check()
            self._touched = True  # from here on, also when the deployment is interrupted
            display = self.options.shown or _in_silence
            with display(self.device.serial) as on_progress:
                self.deployment = deploy(
                    self.device,
                    self.bundle.files,
                    run_id=self._run_id,
                    timeout_s=self.options.timeout_s,
                    on_progress=on_progress,
                )
        return self.deployment

    def clean(self) -> None:
        """End the processes of the run on the device, and remove its folder.

        A device that is gone has nothing to clean: the content store is verified before its next
        use anyway.
        """
        if self._touched:
            self._touched, self.deployment = False, None
            with contextlib.suppress(HarnessError):
                remove_run(self.device, self._run_id)

    def sha256_of(self, file: str) -> str | None:
        """Return the hash of a deployed file, by its path or its name; deploy first if needed."""
        hashes = {each.name: each.sha256 for each in self.prepare().files}
        by_name = {path.rpartition("/")[2]: sha256 for path, sha256 in hashes.items()}
        return hashes.get(file, by_name.get(file))

    def pushed(self) -> dict[str, str]:
        """Return the hashes of the user's files, as versions; deploy first if needed."""
        return {
            f"pushed {file.name}": f"sha256:{file.sha256[:16]}"
            for file in self.prepare().files
            if file.name in self.options.push
        }

    def read_log(self) -> str:
        """Read the end of the last process's log on the device; empty if there was none."""
        if self.deployment is None:
            return ""
        return RunFolder(self.device, self.deployment).read_log()

    def folder(self) -> RunFolder:
        """Return the run folder; deploy first if needed."""
        return RunFolder(self.device, self.prepare(), self.options.on_running)

    def limit_s(self, queries: int = 1, new_tokens: int = 0) -> float:
        """Return the seconds after which a process on the device is ended.

        Args:
            queries: answers, windows or texts that it is to give.
            new_tokens: that each of them has at most.
        """
        asked = self.options.runner_timeout_s
        return queries * (RUN_S + self._emulated_s(new_tokens) if asked is None else asked)

    def _emulated_s(self, new_tokens: int) -> float:
        """Return what an emulator may take for a query, beside the time of a device."""
        del new_tokens
        return 0.0

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample the device while a block runs a command, if that was asked for."""
        hz = self.options.telemetry_hz
        if hz is None:
            yield
            return
        from harness.telemetry.sampler import sampling

        deployment = self.prepare()
        where = (deployment.scripts_dir, deployment.run_dir)
        with sampling(self.device, *where, hz=hz) as self._sampling:
            yield

    @property
    def samples(self) -> tuple[TelemetrySeries, ...]:
        """Of the newest command that was sampled."""
        return () if self._sampling is None else self._sampling.series
