"""Errors of `buildlib`: one root, each with the data of the fault.

    BuildError
      InvalidOptionError
        UnknownOptionError
      ModelFileError
      EncodingsError
      RunnerDiedError
      ToolchainMissingError
      ToolchainError
        ToolchainTimeoutError
      ContainerError
      InputFileError
      CacheError
      VerificationFailedError
      LossTooLargeError

`str(error)` is one line for the user: the fault, its place, and the way out. A `ModelWarning` is
such a line about a model that is built or run all the same.
"""

from pathlib import Path

from buildlib.error_base import QnnfarmError, nearest_names, one_line


class ModelWarning(UserWarning):
    """A model is built or run, but may not behave as its files or its options say."""


class BuildError(QnnfarmError):
    """Root of the errors that `buildlib` raises on purpose; the error where no subclass fits."""

    __match_args__ = ("reason",)
    template = "{reason}"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.__post_init__()


class InvalidOptionError(BuildError):
    """A builder option does not exist, or cannot take the given value."""

    key: str
    reason: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return self._fill(
            "option {key!r}: {reason}" + ("; known are {known}" if self.known else "")
        )


class UnknownOptionError(InvalidOptionError):
    """A builder option does not exist; the message names the nearest one, or all."""

    __match_args__ = ("key", "options")

    def __init__(self, key: str, options: tuple[str, ...]) -> None:
        self.options = options
        near = nearest_names(key, options)
        reason = f"no such option: did you mean {near[0]}?" if near else "no such option"
        super().__init__(key, reason, () if near else options)


class ModelFileError(BuildError):
    """A model or one of its files is missing, corrupt, or of a kind that cannot be built."""

    path: Path
    reason: str
    template = "cannot use model {path}: {reason}"


class EncodingsError(BuildError):
    """An encodings file cannot be read, or does not fit the model it is applied to."""

    subject: str
    reason: str
    template = "cannot use encodings {subject}: {reason:400}"


class RunnerDiedError(BuildError):
    """The child process that runs compiled graphs ended, hung or answered garbage."""

    exit_code = 1
    subject: str
    reason: str
    log_tail: str

    def __str__(self) -> str:
        message = self._fill("the runner of {subject} failed: {reason}")
        tail = self.log_tail.strip().splitlines()
        return f"{message}; its last words: {one_line(tail[-1], 200)}" if tail else message


class ToolchainMissingError(BuildError):
    """A toolchain is not installed, is incomplete, or does not run on this machine."""

    toolchain: str
    reason: str
    template = "toolchain {toolchain} is not usable: {reason}"


class ToolchainError(BuildError):
    """A step of the toolchain failed: it refused its input, or its process died.

    Attributes:
        step: convert, compile, inspect, ...
        subject: the file that the step worked on.
        exit_status: of the child process; negative is the signal that ended it, `None` a time-out.
        log_tail: last lines of the libraries' output.
        log_path: the whole log, which is kept.
    """

    step: str
    subject: str
    reason: str
    exit_status: int | None
    log_tail: tuple[str, ...]
    log_path: str

    def __str__(self) -> str:
        last = f"{self.reason}: {self.log_tail[-1]}" if self.log_tail else self.reason
        return self._fill("{step} of {subject} failed: {last} (log: {log_path})", last=last)


class ToolchainTimeoutError(ToolchainError):
    """A step of the toolchain exceeded its time limit and was killed."""


class ContainerError(BuildError):
    """A folder is not a container, or cannot become one."""

    path: str
    reason: str
    template = "container {path}: {reason}"


class InputFileError(BuildError):
    """A file of the user's is missing, unreadable, no file, or changes while it is read."""

    path: str
    reason: str
    template = "cannot use the file {path!r}: {reason}"


class CacheError(BuildError):
    """The stage cache cannot be written, or has no entry for a key."""

    path: str
    reason: str
    template = "cache {path}: {reason}"


class LossTooLargeError(BuildError):
    """Quantization costs a model more than the user's bound."""

    exit_code = 1
    model: str
    loss: str
    bound: float
    advice: str
    template = "{model} loses more than max_kl={bound:g}: {loss}{advice}"


class VerificationFailedError(BuildError):
    """A stage of a build changed the model's results by more than it may."""

    exit_code = 1
    target: str
    stage: str
    subject: str
    bound: str
    template = (
        "the build for {target} is not sound: {stage} of {subject} does not meet {bound}; "
        "nothing was saved"
    )
