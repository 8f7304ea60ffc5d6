"""Logits of decode steps on a device, by a custom sampler of Genie's."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buildlib.container.genie_config import GenieConfig
from buildlib.validation import first_fault
from harness.devices.device import Device
from harness.errors import RuntimeOutputError
from harness.runtimes.base import StepLogits, StepWindow
from harness.runtimes.genie.output import parse_trace
from harness.runtimes.run_folder import RunFolder, runner_command

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

STEP_RUNNER: Final = "genie_logits.py"
STEP_SAMPLER: Final = "qnnfarm-steps"
"""Name under which the runner registers its sampler."""
_CONFIG, _WINDOWS, _OUTPUT, _SUMMARY, _TRACE = (
    "query_config.json", "steps.json", "logits.raw", "steps_done.json", "trace.json",
)  # fmt: skip
_FLOAT_BYTES = 4


class _Summary(BaseModel):
    model_config = ConfigDict(extra="ignore")

    format: Annotated[int, Field(ge=1, le=1)]
    step_bytes: Annotated[int, Field(ge=_FLOAT_BYTES, le=1 << 30, multiple_of=_FLOAT_BYTES)]
    steps: list[int]


@dataclass(frozen=True)
class StepRun:
    """Decodes windows in a run folder.

    Attributes:
        timeout_s: for one window.
        logging: options of the runner for Genie's own log.
        trace: whether the runner writes a trace.
        command: that starts the runner, its file last.
    """

    device: Device
    folder: RunFolder
    timeout_s: float
    logging: tuple[str, ...] = ()
    trace: bool = False
    command: tuple[str, ...] = runner_command(STEP_RUNNER)

    def decode(self, windows: Sequence[StepWindow], config: GenieConfig) -> StepLogits:
        """Return the logits of each window."""
        content = json.dumps([asdict(window) for window in windows])
        self.folder.send({_CONFIG: config.to_json(), _WINDOWS: content})
        command = [*self.command, "-c", _CONFIG, "--windows", _WINDOWS, *self.logging]
        command += ["--output_file", _OUTPUT, "--summary", _SUMMARY]
        command += ["--trace", _TRACE] if self.trace else []
        timeout_s = self.timeout_s * len(windows)
        self.folder.run(command, name=self.command[-1], timeout_s=timeout_s, stdout="output.txt")
        text = self.folder.read(_SUMMARY)
        try:
            summary = _Summary.model_validate_json(text)
        except ValidationError as error:
            raise self._odd(f"unreadable summary: {first_fault(error, _Summary)}") from error
        counts = [len(window.following) for window in windows]
        if summary.steps != counts:
            raise self._odd(f"steps {summary.steps}, not {counts}")
        logits = self._read(counts, summary.step_bytes)
        traced = parse_trace(self.folder.read(_TRACE), self.device.serial) if self.trace else ""
        return StepLogits(logits, traced)

    def _read(self, steps: Sequence[int], step_bytes: int) -> "list[npt.NDArray[np.float32]]":
        import numpy as np

        data = self.folder.pull(_OUTPUT, sum(steps) * step_bytes)
        if len(data) != sum(steps) * step_bytes:
            raise self._odd(f"{len(data)} bytes of logits for {sum(steps)} steps")
        values = np.frombuffer(data, "<f4").astype(np.float32)
        rows = values.reshape(sum(steps), step_bytes // _FLOAT_BYTES)
        ends = np.cumsum(steps)[:-1]
        return list(np.split(rows, ends))

    def _odd(self, reason: str) -> RuntimeOutputError:
        return RuntimeOutputError(self.device.serial, f"{self.command[-1]}: {reason}")
