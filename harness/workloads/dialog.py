"""Conversations of several turns with a container on a device, by the `genie-app` runner."""

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from harness.deploy.deploy import deploy, remove_run
from harness.deploy.deployment import DeployFile
from harness.devices.base import Device
from harness.errors import HarnessError, RuntimeOutputError, WrongUseError
from harness.runtimes.files import device_files, target_of
from harness.runtimes.libraries.choice import find_genie
from harness.runtimes.run_folder import run_command, send_inputs
from harness.runtimes.starting import runner_of, starting
from harness.workloads.target import Target

_SCRIPTS = ("genie_app.py", "genie_app_script.py")
_MAX_ANSWER = 1 << 20


@dataclass(frozen=True, slots=True)
class DialogResult:
    """What came of conversations.

    Attributes:
        answers: of each dialog, turn by turn.
        peak_rss_bytes: of the one process that held them all; 0 where it is not known.
    """

    answers: tuple[tuple[str, ...], ...]
    peak_rss_bytes: int


def converse(
    target: Target,
    dialogs: Sequence[Sequence[str]],
    *,
    max_new_tokens: int,
    timeout_s: float = 300.0,
) -> DialogResult:
    """Ask the turns of each dialog one after the other, and reset between dialogs.

    All of it is one process on the device and one Genie dialog: a turn sees what the turns before
    it in its dialog said. Prompts travel in files, as they are.

    Args:
        dialogs: the user's turns of each.
        max_new_tokens: of each answer.

    Raises:
        WrongUseError: a turn is empty, or holds a NUL.
        DeploymentCorruptError: a turn arrived as another.
        RunnerError: Genie refused, crashed or hung.
        RuntimeOutputError: an answer is missing.
    """
    for turn in (turn for turns in dialogs for turn in turns):
        if not turn or "\0" in turn:
            raise WrongUseError(f"not a turn of a dialog: {turn[:40]!r}")
    device, container = target.device, target.container
    scripts = resources.files("device_scripts")
    genie = find_genie(target.properties.abi, target_of(container).soc)
    files = {
        **device_files(container, genie),
        **{name: DeployFile(Path(str(scripts / name))) for name in _SCRIPTS},
    }
    config = container.genie_config.with_dialog(max_num_tokens=max_new_tokens).to_json()
    run_id = f"dialog-{uuid.uuid4().hex}"
    try:
        deployment = deploy(device, files, run_id=run_id)
        inputs = {"query_config.json": config, "script.txt": _script(dialogs)}
        inputs |= {
            f"turn_{d}_{t}.txt": turn
            for d, turns in enumerate(dialogs)
            for t, turn in enumerate(turns)
        }
        send_inputs(device, deployment.run_dir, inputs)
        runner = runner_of("genie-app", genie)
        command = [*starting(runner), "-s", "script.txt"]
        outcome = run_command(device, deployment, command, shown=runner, timeout_s=timeout_s)
        answers = tuple(
            tuple(_answer(device, deployment.run_dir, d, t) for t, _ in enumerate(turns))
            for d, turns in enumerate(dialogs)
        )
        return DialogResult(answers, outcome.peak_rss_bytes or 0)
    finally:
        with contextlib.suppress(HarnessError):
            remove_run(device, run_id)


def _script(dialogs: Sequence[Sequence[str]]) -> str:
    lines = ["dialog config create config query_config.json", "dialog create dialog config"]
    for d, turns in enumerate(dialogs):
        if d:
            lines.append("dialog reset dialog")
        lines += [
            f"dialog query dialog turn_{d}_{t}.txt answer_{d}_{t}.txt" for t, _ in enumerate(turns)
        ]
    return "\n".join([*lines, "dialog free dialog", "dialog config free config", ""])


def _answer(device: Device, run_dir: str, dialog: int, turn: int) -> str:
    name = f"answer_{dialog}_{turn}.txt"
    result = device.shell(
        ["head", "-c", str(_MAX_ANSWER), f"{run_dir}/{name}"], check=False, max_output=_MAX_ANSWER
    )
    if result.exit_status != 0:
        raise RuntimeOutputError(device.serial, f"the runner left no {name}", result.stderr)
    return result.stdout
