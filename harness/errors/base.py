"""Root of the errors, and refusals before anything runs."""

from enum import StrEnum
from typing import ClassVar

from buildlib.error_base import QnnfarmError
from harness.words import pluralize


class FailureClass(StrEnum):
    """Part at fault for a failure, which decides whether a plan tries the cell again."""

    DEVICE = "device"
    """The device, or the way to it: another device may do better."""
    RUNNER = "runner"
    LEASE = "lease"
    """Somebody took the device away: the cell runs again, and nobody is to blame."""
    OUTPUT = "output"
    USE = "use"
    """The request is impossible: a plan never tries again."""


class HarnessError(QnnfarmError):
    """Root of everything `harness` raises on purpose.

    Its class attributes say what an error means, to pools, plans, tests and lists alike.

    Attributes:
        failure_class: part at fault.
        quarantine_weight: how much it counts against its device; 0 says nothing about the device.
        needs_recovery: the device must be reached again before its next use.
        loses_device: the device was gone, so there is no result: a lease ends, and a test has an
            error, not a failure.
        is_infrastructure: the adb server or the host in front of devices failed, hence all devices
            behind it at once.
        ends_plan: nothing can be recorded any more, so a plan ends.
        device_state: how a list shows a device that cannot be opened because of it.
    """

    failure_class: ClassVar[FailureClass] = FailureClass.USE
    quarantine_weight: ClassVar[float] = 0.0
    needs_recovery: ClassVar[bool] = False
    loses_device: ClassVar[bool] = False
    is_infrastructure: ClassVar[bool] = False
    ends_plan: ClassVar[bool] = False
    device_state: ClassVar[str] = "unusable"


class WrongUseError(HarnessError):
    """An option or argument that cannot be used."""

    reason: str
    template = "{reason}"


class HostFileError(HarnessError):
    """A file of this host is missing, unreadable, no file, or changes while it is used."""

    path: str
    reason: str
    template = "cannot use the file {path!r}: {reason}"


class RuntimeChoiceError(HarnessError):
    """No runtime can run this container on this device."""

    device: str
    reason: str
    template = "cannot run on {device}: {reason}"


class GenieMissingError(HarnessError):
    """Genie, or part of it, missing on this machine for devices of a kind.

    Attributes:
        soc: of the devices.
        reason: the missing part, and how to get it.
    """

    soc: str
    reason: str
    template = "no Genie and QNN to put on {soc} devices: {reason}"


class LibrariesFetchError(HarnessError):
    """The libraries for other devices could not be downloaded.

    Attributes:
        wanted: the distribution, or its file.
    """

    wanted: str
    reason: str
    template = "cannot fetch {wanted}: {reason}"


class PromptTooLongError(HarnessError):
    """Prompt and answer do not fit into the context.

    Attributes:
        prompt_tokens: including the bos that the runtime prepends.
        most_prompt: tokens that a prompt may have, with bos.
        context: tokens that prompt and answer may have together.
    """

    prompt_tokens: int
    new_tokens: int
    most_prompt: int
    context: int

    def __str__(self) -> str:
        return self._fill(
            "the prompt has {prompt} (with bos), and {new_tokens} are to be generated: this "
            "container takes prompts of up to {most_prompt}, and {context} tokens in all",
            prompt=pluralize(self.prompt_tokens, "token"),
        )


class ConfigFileError(HarnessError, ValueError):
    """A plan, a pool, a recipe or another file of settings that cannot be used.

    Attributes:
        path: of the file; `recipe` for one that is not a file.
        line: of the file, counted from 1; `None` where there is none.
        key: e.g. `devices[2].tags`; empty for the whole file.
    """

    path: str
    line: int | None
    key: str
    reason: str

    def __str__(self) -> str:
        line = "" if self.line is None else ", line {line}"
        key = ", {key:120}" if self.key else ""
        return self._fill("{path}" + line + key + ": {reason}")


class PipelineError(HarnessError, RuntimeError):
    """A pipeline, its manifest or its model cannot do that."""

    reason: str
    template = "{reason}"
