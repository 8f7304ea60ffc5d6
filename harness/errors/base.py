"""Root of the errors, wrong use, and what is refused before anything runs."""

from buildlib.error_base import DataclassError
from harness.words import counted


class HarnessError(DataclassError):
    """Root of everything `harness` raises on purpose."""


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
    """This machine has no Genie, or not all of it, for devices of a kind.

    Attributes:
        soc: of the devices.
        reason: what is missing, and how to get it.
    """

    soc: str
    reason: str
    template = "no Genie to put on {soc} devices: {reason}"


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
            prompt=counted(self.prompt_tokens, "token"),
        )
