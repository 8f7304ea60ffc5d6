"""What is refused before anything runs."""

from harness.errors.base import HarnessError
from harness.words import counted


class RuntimeChoiceError(HarnessError):
    """No runtime can run this container on this device."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(device, reason)
        self.device = device
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot run on {self.device}: {self.reason}"


class GenieMissingError(HarnessError):
    """This machine has no Genie, or not all of it, for devices of a kind.

    Attributes:
        soc: what the devices are.
        reason: what is missing, and how to get it.
    """

    def __init__(self, soc: str, reason: str) -> None:
        super().__init__(soc, reason)
        self.soc = soc
        self.reason = reason

    def __str__(self) -> str:
        return f"no Genie to put on {self.soc} devices: {self.reason}"


class LibrariesFetchError(HarnessError):
    """The libraries for other devices could not be downloaded.

    Attributes:
        wanted: the distribution, or its file.
    """

    def __init__(self, wanted: str, reason: str) -> None:
        super().__init__(wanted, reason)
        self.wanted = wanted
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot fetch {self.wanted}: {self.reason}"


class PromptTooLongError(HarnessError):
    """Prompt and answer do not fit into the context.

    Attributes:
        prompt_tokens: with the bos that the runtime puts before them.
        most_prompt: tokens that a prompt may have, with bos.
        context: tokens that prompt and answer may have together.
    """

    def __init__(self, prompt_tokens: int, new_tokens: int, most_prompt: int, context: int) -> None:
        super().__init__(prompt_tokens, new_tokens, most_prompt, context)
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.most_prompt = most_prompt
        self.context = context

    def __str__(self) -> str:
        has = counted(self.prompt_tokens, "token")
        return (
            f"the prompt has {has} (with bos), and {self.new_tokens} are to "
            f"be generated: this container takes prompts of up to {self.most_prompt}, and "
            f"{self.context} tokens in all"
        )
