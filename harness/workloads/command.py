"""The `command` workload: a plain command on the device, without a container."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from harness.errors import one_line
from harness.workloads.base import UNRECORDED, NonEmpty, Recording, Workload, WorkloadResult
from harness.workloads.session import Session

_MAX_OUTPUT = 64 << 10
_SUMMARY_LENGTH = 60


class Command(Workload):
    """A plain command on the device; its exit status decides.

    Attributes:
        command: its words; no shell reads them unless they name one.
    """

    kind: Literal["command"] = "command"
    command: Annotated[tuple[NonEmpty, ...], Field(min_length=1, strict=False)]

    needs_container: ClassVar[bool] = False

    @model_validator(mode="after")
    def _is_a_program(self) -> Self:
        first = self.command[0]
        if first.startswith("-") or "=" in first:
            raise ValueError(f"the first word names a program, not {first[:80]!r}")
        return self

    def run(self, session: Session, recording: Recording = UNRECORDED) -> WorkloadResult[str]:
        """Run it, and return its output; nothing is stored."""
        del recording
        # `env`, so that no word is taken for a builtin, a keyword or an assignment.
        result = session.device.shell(
            ["env", *self.command], timeout_s=session.options.timeout_s, max_output=_MAX_OUTPUT
        )
        output = result.stdout
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        summary = one_line(last, _SUMMARY_LENGTH)
        if result.left:
            processes = one_line(", ".join(result.left), _SUMMARY_LENGTH)
            summary = f"{summary}; left running: {processes}".removeprefix("; ")
        return WorkloadResult(output, {}, summary)
