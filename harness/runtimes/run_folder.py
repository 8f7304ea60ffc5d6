"""What all runners do in a run folder: get their inputs, run, and say why they failed."""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.deploy.deployment import Deployment
from harness.deploy.hashing import hashes_on
from harness.devices.base import Device, PushItem
from harness.errors import DeploymentCorruptError, RunnerError
from harness.runtimes.run_line import RunOutcome, parse_run_line

_SEND_TIMEOUT_S = 60.0
_MARGIN_S = 30.0  # for adb and run.sh around the runner's own time limit
_LOG_TAIL = 4000


def send_inputs(device: Device, run_dir: str, inputs: Mapping[str, str]) -> None:
    """Write a query's inputs into the run folder: configuration, which is never reused.

    Raises:
        DeploymentCorruptError: one arrived as something else, which would be answered as well.
    """
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


def run_command(
    device: Device,
    deployment: Deployment,
    command: Sequence[str],
    *,
    shown: str,
    timeout_s: float,
    stdout: str | None = None,
) -> RunOutcome:
    """Run a command in the run folder, and turn any end but a good one into an error.

    Args:
        shown: what errors call it.
        timeout_s: for the command itself.
        stdout: a file there for what it prints; None: that goes into the log.

    Raises:
        RunnerError: it could not be started, crashed, hung or refused.
    """
    script = ["sh", f"{deployment.scripts_dir}/run.sh", *(["-o", stdout] if stdout else [])]
    script += [deployment.run_dir, str(int(timeout_s)), "run.log", "--", *command]
    result = device.shell(script, timeout_s=timeout_s + _MARGIN_S, check=False)
    outcome = parse_run_line(result.stdout)
    if outcome is None:
        tail = (result.stderr or result.stdout)[-_LOG_TAIL:]
        reason = "could not be started"
        raise RunnerError(device.serial, shown, reason, result.exit_status, tail)
    if not outcome.succeeded:
        ask = ["tail", "-c", str(_LOG_TAIL), f"{deployment.run_dir}/run.log"]
        tail = device.shell(ask, check=False).stdout
        raise RunnerError(device.serial, shown, outcome.in_words(), outcome.exit_status, tail)
    return outcome
