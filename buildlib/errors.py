"""The errors of `buildlib`: one root, each with the data of what went wrong.

    BuildError
    ├── CheckpointError
    │   └── UnsupportedModelError
    ├── InvalidShapeError
    ├── ModelFileError
    │   └── UnsupportedGraphError
    ├── PassError
    ├── EncodingsError
    ├── CalibrationError
    ├── PromptTooLongError
    ├── RunnerDiedError
    ├── UnknownSocError
    ├── InvalidOptionError
    ├── ModelNotFoundError
    ├── CalibrationTextMissingError
    ├── ToolchainMissingError
    ├── ToolchainError
    │   ├── ToolchainTimeoutError
    │   └── UnsupportedOperatorsError
    ├── InvalidBinaryError
    ├── GenieConfigError
    ├── ContainerError
    │   ├── ContainerVersionError
    │   ├── ContainerFileError
    │   └── ContainerExistsError
    ├── InputFileError
    ├── CacheError
    ├── CancelledError
    └── VerificationFailedError

`str(error)` is one line for the user: what is wrong, where, and what to do. All data goes to
`super().__init__`, so that every error survives pickling on its way out of a worker process.
"""

from pathlib import Path

_LONGEST = 400


def shown(text: str) -> str:
    """A text from a file as part of one line: of bounded length, nothing unprintable."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


class BuildError(Exception):
    """Root of everything `buildlib` raises on purpose.

    Attributes:
        exit_code: of the command line: 2, no answer could be had, or 1, the answer is bad.
    """

    exit_code = 2


class UnknownSocError(BuildError):
    """A target names no SoC of the catalog, or is written in no form that is known."""

    def __init__(self, name: str, known: tuple[str, ...], near: str | None) -> None:
        super().__init__(name, known, near)
        self.name = name
        self.known = known
        self.near = near

    def __str__(self) -> str:
        hint = f"did you mean {self.near}? " if self.near else ""
        return (
            f"unknown SoC {self.name!r}: {hint}write SM8750 for a phone or SM8750:emulator; "
            f"known are {', '.join(self.known)}"
        )


class InvalidOptionError(BuildError):
    """A builder option does not exist, or cannot take the value it was given."""

    def __init__(self, key: str, reason: str, known: tuple[str, ...]) -> None:
        super().__init__(key, reason, known)
        self.key = key
        self.reason = reason
        self.known = known

    def __str__(self) -> str:
        known = f"; known are {', '.join(self.known)}" if self.known else ""
        return f"option {self.key!r}: {self.reason}{known}"


class ModelNotFoundError(BuildError):
    """A model folder is not there, or holds nothing that can be built."""

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(folder, reason)
        self.folder = folder
        self.reason = reason

    def __str__(self) -> str:
        return f"no model in {self.folder}: {self.reason}"


class CalibrationTextMissingError(BuildError):
    """A checkpoint needs text to calibrate its quantization on, and there is none."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.folder = folder

    def __str__(self) -> str:
        return (
            f"no calibration text in {self.folder}: put text/calibration.txt into the model "
            "folder, or name a text with --calibration FILE"
        )


class CheckpointError(BuildError):
    """A checkpoint's file is missing, truncated, corrupt, or disagrees with its configuration."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot use checkpoint {self.path}: {self.reason}"


class UnsupportedModelError(CheckpointError):
    """A sound checkpoint of a model that cannot be built (yet)."""

    def __str__(self) -> str:
        return f"unsupported model {self.path}: {self.reason}"


class InvalidShapeError(BuildError):
    """An (AR, CL) that no graph can have, or that would confuse the runtime."""

    def __init__(self, ar: int, cl: int, reason: str) -> None:
        super().__init__(ar, cl, reason)
        self.ar = ar
        self.cl = cl
        self.reason = reason

    def __str__(self) -> str:
        return f"invalid shape AR {self.ar}, CL {self.cl}: {self.reason}"


class ModelFileError(BuildError):
    """An ONNX model, or the weights beside it, is missing, corrupt or not of the expected kind."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot use model {self.path}: {self.reason}"


class PassError(BuildError):
    """A pass's declared condition does not hold before (`requires`) or after (`ensures`) it."""

    def __init__(self, name: str, stage: str, path: Path, reason: str) -> None:
        super().__init__(name, stage, path, reason)
        self.name = name
        self.stage = stage
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"pass {self.name} {self.stage} of {self.path}: {self.reason}"


class EncodingsError(BuildError):
    """An encodings file cannot be read, or does not fit the model it is applied to."""

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(subject, reason)
        self.subject = subject
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot use encodings {shown(self.subject)}: {shown(self.reason)}"


class CalibrationError(BuildError):
    """The calibration text or its windows cannot calibrate the model."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot calibrate: {self.reason}"


class PromptTooLongError(BuildError):
    """Prompt and continuation do not fit into the context."""

    def __init__(self, n_tokens: int, cl: int) -> None:
        super().__init__(n_tokens, cl)
        self.n_tokens = n_tokens
        self.cl = cl

    def __str__(self) -> str:
        return f"{self.n_tokens} tokens do not fit into a context of {self.cl}"


class RunnerDiedError(BuildError):
    """The child process that runs compiled graphs ended, hung or answered garbage."""

    exit_code = 1

    def __init__(self, subject: str, reason: str, log_tail: str) -> None:
        super().__init__(subject, reason, log_tail)
        self.subject = subject
        self.reason = reason
        self.log_tail = log_tail

    def __str__(self) -> str:
        tail = self.log_tail.strip().splitlines()
        last = f"; its last words: {tail[-1][:200]}" if tail else ""
        return f"the runner of {self.subject} failed: {self.reason}{last}"


class ToolchainMissingError(BuildError):
    """A toolchain is not installed, is incomplete, or does not run on this machine."""

    def __init__(self, toolchain: str, reason: str) -> None:
        super().__init__(toolchain, reason)
        self.toolchain = toolchain
        self.reason = reason

    def __str__(self) -> str:
        return f"toolchain {self.toolchain} is not usable: {self.reason}"


class ToolchainError(BuildError):
    """A step of the toolchain failed: it refused its input, or its process died.

    Attributes:
        step: what was done: convert, compile, inspect, ...
        subject: the file it was done to.
        reason: one line.
        exit_status: of the child process; negative is the signal that ended it, `None` a time-out.
        log_tail: last lines of what the libraries printed.
        log_path: the whole log, kept for reading.
    """

    def __init__(
        self,
        step: str,
        subject: str,
        reason: str,
        exit_status: int | None,
        log_tail: tuple[str, ...],
        log_path: str,
    ) -> None:
        super().__init__(step, subject, reason, exit_status, log_tail, log_path)
        self.step = step
        self.subject = subject
        self.reason = reason
        self.exit_status = exit_status
        self.log_tail = log_tail
        self.log_path = log_path

    def __str__(self) -> str:
        last = f": {self.log_tail[-1]}" if self.log_tail else ""
        return f"{self.step} of {self.subject} failed: {self.reason}{last} (log: {self.log_path})"


class ToolchainTimeoutError(ToolchainError):
    """A step of the toolchain did not end in the time that it was given, and was killed."""


class InvalidBinaryError(BuildError):
    """A file is not a context binary, or not one that this toolchain can read."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path} is not a readable context binary: {self.reason}"


class GenieConfigError(BuildError):
    """A Genie configuration is not one that Genie, or our own model of it, accepts."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(path, message)
        self.path = path
        self.message = message

    def __str__(self) -> str:
        return f"Genie configuration {self.path} is refused: {self.message}"


class ContainerError(BuildError):
    """A folder is not a container, or cannot become one."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"container {self.path}: {self.reason}"


class ContainerVersionError(ContainerError):
    """A container was written by a later version of the project."""


class ContainerFileError(ContainerError):
    """A file of a container is missing, changed, or must not be there."""

    def __init__(self, path: str, file: str, reason: str) -> None:
        super().__init__(path, reason)
        self.args = (path, file, reason)
        self.file = file

    def __str__(self) -> str:
        return f"container {self.path}: file {self.file!r} {self.reason}; build or copy it again"


class ContainerExistsError(ContainerError):
    """The destination of a save is there already."""


class InputFileError(BuildError):
    """A file of the user's is missing, unreadable, no file, or changes while it is read."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot use the file {self.path!r}: {self.reason}"


class CacheError(BuildError):
    """The stage cache cannot be written, or has no such entry."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cache {self.path}: {self.reason}"


class UnsupportedOperatorsError(ToolchainError):
    """A model has operators that the tensor processor does not have.

    Attributes:
        nodes: name and operator of each of them.
    """

    def __init__(
        self,
        step: str,
        subject: str,
        reason: str,
        exit_status: int | None,
        log_tail: tuple[str, ...],
        log_path: str,
        nodes: tuple[tuple[str, str], ...],
    ) -> None:
        super().__init__(step, subject, reason, exit_status, log_tail, log_path)
        self.args = (*self.args, nodes)
        self.nodes = nodes

    def __str__(self) -> str:
        return f"{self.step} of {self.subject} failed: {self.reason} (log: {self.log_path})"


class UnsupportedGraphError(ModelFileError):
    """A sound ONNX model that is no decoder, or has something that the builder cannot express.

    Attributes:
        op: the operator that is refused; empty when it is the model as a whole.
        node: name of the first such node.
        count: nodes of this operator in the model.
    """

    def __init__(
        self, path: Path, reason: str, op: str = "", node: str = "", count: int = 0
    ) -> None:
        super().__init__(path, reason)
        self.args = (path, reason, op, node, count)
        self.op = op
        self.node = node
        self.count = count

    def __str__(self) -> str:
        if not self.op:
            return f"unsupported model {self.path}: {self.reason}"
        where = f"{self.op} {self.node!r} ({self.count} of this operator)"
        return f"unsupported model {self.path}: {where} {self.reason}"


class CancelledError(BuildError):
    """A task was ended because another one failed, or because the user interrupted."""

    def __str__(self) -> str:
        return "cancelled, because another part of the build failed or was interrupted"


class VerificationFailedError(BuildError):
    """A stage of a build changed what the model computes by more than it may."""

    exit_code = 1

    def __init__(self, target: str, stage: str, subject: str, bound: str) -> None:
        super().__init__(target, stage, subject, bound)
        self.target = target
        self.stage = stage
        self.subject = subject
        self.bound = bound

    def __str__(self) -> str:
        return (
            f"the build for {self.target} is not sound: {self.stage} of {self.subject} does not "
            f"meet {self.bound}; nothing was saved"
        )
