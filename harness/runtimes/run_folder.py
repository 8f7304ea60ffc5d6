"""The run folder on a device, in which all runners work."""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.deploy.deployment import Deployment
from harness.deploy.hashing import hashes_on
from harness.devices.base import Device, PushItem
from harness.errors import DeploymentCorruptError, RunnerError, RuntimeOutputError
from harness.runtimes.run_line import RunOutcome, parse_run_line

_SEND_TIMEOUT_S = 60.0
_MARGIN_S = 30.0  # for adb and run.sh around the runner's own time limit
_LOG_TAIL = 4000
_LARGEST_OUTPUT = 8 << 20


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Sends a run's inputs, runs commands in its folder, and reads their output."""

    device: Device
    deployment: Deployment

    def send(self, inputs: Mapping[str, str]) -> None:
        """Write a query's inputs into the folder: small files, which are never reused.

        Raises:
            DeploymentCorruptError: one arrived altered; it would have been answered all the same.
        """
        device, run_dir = self.device, self.deployment.run_dir
        sent = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in inputs.items()}
        with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
            items = [PushItem(Path(folder) / name, f"{run_dir}/{name}") for name in inputs]
            for item, text in zip(items, inputs.values(), strict=True):
                item.local.write_bytes(text.encode())
            device.push_many(items, timeout_s=_SEND_TIMEOUT_S)
        arrived = hashes_on(device, run_dir, sent, timeout_s=_SEND_TIMEOUT_S)
        for name, sha256 in sent.items():
            if arrived.get(name) != sha256:
                raise DeploymentCorruptError(device.serial, name, sha256, arrived.get(name, ""))

    def run(
        self, command: Sequence[str], *, name: str, timeout_s: float, stdout: str | None = None
    ) -> RunOutcome:
        """Run a command in the folder; every end but a good one is an error.

        Args:
            name: of the command in errors.
            timeout_s: for the command itself.
            stdout: a file in the folder for what it prints; None: that goes into the log.

        Raises:
            RunnerError: it could not be started, crashed, hung or refused.
        """
        device, run_dir = self.device, self.deployment.run_dir
        script = ["sh", f"{self.deployment.scripts_dir}/run.sh"]
        script += ["-o", stdout] if stdout else []
        script += [run_dir, str(int(timeout_s)), "run.log", "--", *command]
        result = device.shell(script, timeout_s=timeout_s + _MARGIN_S, check=False)
        outcome = parse_run_line(result.stdout)
        if outcome is None:
            tail = (result.stderr or result.stdout)[-_LOG_TAIL:]
            reason = "could not be started"
            raise RunnerError(device.serial, name, reason, result.exit_status, tail)
        if not outcome.succeeded:
            read_log = ["tail", "-c", str(_LOG_TAIL), f"{run_dir}/run.log"]
            tail = device.shell(read_log, check=False).stdout
            raise RunnerError(device.serial, name, outcome.in_words(), outcome.exit_status, tail)
        return outcome

    def read(self, name: str) -> str:
        """Read a file of the folder, of bounded size; what is not UTF-8 is replaced.

        Raises:
            RuntimeOutputError: it is missing or too large.
        """
        size = _LARGEST_OUTPUT + 1
        command = ["head", "-c", str(size), f"{self.deployment.run_dir}/{name}"]
        result = self.device.shell(command, check=False, max_output=size)
        if result.exit_status != 0:
            raise RuntimeOutputError(self.device.serial, f"the runner left no {name}", "")
        if len(result.stdout) > _LARGEST_OUTPUT:
            reason = f"the runner left more than {_LARGEST_OUTPUT} bytes in {name}"
            raise RuntimeOutputError(self.device.serial, reason, "")
        return result.stdout
