"""Context limit of a container: one rule for prompts, answers and perplexity windows."""

from dataclasses import dataclass

from buildlib.container.container import GenAIContainer
from harness.errors import PromptTooLongError


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Limits of a container's context, as Genie enforces them.

    Measured with Genie 1.21 on QNN 2.51 (docs/architecture.md, "What running the libraries
    taught"): Genie puts bos before every first prompt, and no prefill call sees more than
    CL - AR tokens before it. So a prompt has at most CL - AR + 1 tokens, bos included, and prompt
    and answer together have at most CL. AR is that of the prefill graph, the largest.

    Attributes:
        context_length: CL, in tokens.
        prefill_ar: AR of the prefill graph.
    """

    context_length: int
    prefill_ar: int

    @classmethod
    def of(cls, container: GenAIContainer) -> "ContextLimit":
        """Read the limit from a container's manifest."""
        graphs = container.metadata.graphs
        return cls(graphs.context_length, max(graphs.auto_regression_numbers))

    @property
    def past_tokens(self) -> int:
        """Tokens that a prefill call sees before its own, CL - AR."""
        return self.context_length - self.prefill_ar

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, bos included."""
        return self.past_tokens + 1

    def allows(self, prompt_tokens: int, new_tokens: int) -> bool:
        """Return whether a prompt (bos included) and its answer fit."""
        total = prompt_tokens + new_tokens
        return prompt_tokens <= self.longest_prompt and total <= self.context_length

    def check(self, prompt_tokens: int, new_tokens: int) -> None:
        """Refuse a prompt (bos included) and an answer that do not fit.

        Raises:
            PromptTooLongError: the prompt, or prompt and answer together, are too long.
        """
        if not self.allows(prompt_tokens, new_tokens):
            raise PromptTooLongError(
                prompt_tokens, new_tokens, self.longest_prompt, self.context_length
            )
