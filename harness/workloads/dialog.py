"""The `dialog` workload: conversations of several turns, by the `genie-app` runner."""

import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from buildlib.container.container import GenAIContainer
from harness.deploy.deploy import deploy, remove_run
from harness.deploy.deployment import DeployFile
from harness.errors import HarnessError
from harness.results.records import Runner
from harness.results.records import Workload as WorkloadRecord
from harness.runtimes.context_limit import ContextLimit
from harness.runtimes.files import device_files, target_of
from harness.runtimes.libraries.base import GenieLibraries
from harness.runtimes.libraries.choice import find_genie
from harness.runtimes.run_folder import RunFolder
from harness.runtimes.starting import runner_of, starting
from harness.workloads.base import (
    UNRECORDED,
    NonEmpty,
    Recording,
    WorkloadModel,
    WorkloadResult,
    summarize,
)
from harness.workloads.generate import SHORTEST_PROMPT
from harness.workloads.session import Session

_SCRIPTS = ("genie_app.py", "genie_app_script.py")
Turns = Annotated[tuple[NonEmpty, ...], Field(min_length=1, strict=False)]


@dataclass(frozen=True, slots=True)
class DialogResult:
    """Answers of conversations.

    Attributes:
        answers: of each dialog, turn by turn.
        memory: peaks of the one process that held them all, by metric, as far as they are known.
    """

    answers: tuple[tuple[str, ...], ...]
    memory: Mapping[str, float]


class Dialog(WorkloadModel):
    """Conversations, turn by turn, with a reset between them.

    All of it is one process on the device and one Genie dialog: a turn sees the turns before it in
    its dialog. Prompts travel in files, unchanged.

    Attributes:
        dialogs: the user's turns of each.
        max_tokens: of each answer.
    """

    kind: Literal["dialog"] = "dialog"
    dialogs: Annotated[tuple[Turns, ...], Field(min_length=1, strict=False)]
    max_tokens: Annotated[int, Field(ge=1)] = 16

    length_key: ClassVar[str] = "max_tokens"

    def check(self, container: GenAIContainer) -> None:
        """See `Workload.check`; the lengths of the turns are known only to the tokenizer."""
        ContextLimit.of(container).check(SHORTEST_PROMPT, self.max_tokens)

    def run(
        self, session: Session, recording: Recording = UNRECORDED
    ) -> WorkloadResult[DialogResult]:
        """Hold the conversations.

        Raises:
            DeploymentCorruptError: a turn arrived as another.
            RunnerError: Genie refused, crashed or hung.
            RuntimeOutputError: an answer is missing.
        """
        genie = find_genie(session.properties.abi, target_of(session.container).soc)
        runner = runner_of("genie-app", genie)
        record = WorkloadRecord(
            runner=runner, max_new_tokens=self.max_tokens, sampler={"greedy": True}
        )
        with recording.start_if_stored(session, "generate", record) as recorder:
            result = self._converse(session, genie, runner)
            values = dict(result.memory)
            last = result.answers[-1][-1]
            if recorder is not None:
                recorder.generated_text = last
                recorder.add_values(values)
        run = recording.stored_run(recorder)
        return WorkloadResult(result, values, summarize(values, last), run)

    def _converse(self, session: Session, genie: GenieLibraries, runner: Runner) -> DialogResult:
        device, container = session.device, session.container
        scripts = resources.files("device_scripts")
        files = {
            **device_files(container, genie),
            **{name: DeployFile(Path(str(scripts / name))) for name in _SCRIPTS},
        }
        inputs = {
            "query_config.json": container.genie_config.with_dialog(
                max_num_tokens=self.max_tokens
            ).to_json(),
            "script.txt": self._script(),
        }
        inputs |= {
            f"turn_{d}_{t}.txt": turn
            for d, turns in enumerate(self.dialogs)
            for t, turn in enumerate(turns)
        }
        command = [*starting(runner), "-s", "script.txt"]
        timeout_s = session.options.runner_timeout_s
        run_id = f"dialog-{uuid.uuid4().hex}"
        try:
            folder = RunFolder(device, deploy(device, files, run_id=run_id))
            folder.send(inputs)
            outcome = folder.run(command, name=runner, timeout_s=timeout_s)
            answers = tuple(
                tuple(folder.read(f"answer_{d}_{t}.txt") for t, _ in enumerate(turns))
                for d, turns in enumerate(self.dialogs)
            )
            return DialogResult(answers, outcome.memory)
        finally:
            with contextlib.suppress(HarnessError):
                remove_run(device, run_id)

    def _script(self) -> str:
        lines = ["dialog config create config query_config.json", "dialog create dialog config"]
        for d, turns in enumerate(self.dialogs):
            if d:
                lines.append("dialog reset dialog")
            lines += [
                f"dialog query dialog turn_{d}_{t}.txt answer_{d}_{t}.txt"
                for t, _ in enumerate(turns)
            ]
        return "\n".join([*lines, "dialog free dialog", "dialog config free config", ""])
