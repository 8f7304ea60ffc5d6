"""Context limit of a container: one rule for prompts, answers and perplexity windows."""

from dataclasses import dataclass, replace

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from harness.errors import PromptTooLongError, WrongUseError

_TOKENS = "input_ids"


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Limits of a container's context, as Genie enforces them.

    Measured with Genie 1.21 on QNN 2.51 (docs/libraries.md): Genie puts bos before every first
    prompt, and no prefill call sees more than CL - AR tokens before it. So a prompt has at most
    CL - AR + 1 tokens, bos included, and prompt and answer together have at most CL. AR is that
    of the prefill graph, the largest.

    Attributes:
        context_length: CL, in tokens.
        prefill_ar: AR of the prefill graph.
        slides: whether tokens leave the cache of the graphs as others come.
    """

    context_length: int
    prefill_ar: int
    slides: bool = False

    @classmethod
    def of(cls, container: GenAIContainer) -> "ContextLimit":
        """Read the limit from a container's manifest.

        Raises:
            ContainerError: it holds a text encoder, which has no context.
        """
        _ = container.genie_config
        graphs = container.metadata.graphs
        return cls(graphs.context_length, max(graphs.auto_regression_numbers))

    @classmethod
    def of_draft(cls, container: GenAIContainer) -> "ContextLimit":
        """Read the limit of a container's draft model; its binaries alone tell its AR."""
        from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

        dialog = container.genie_config.dialog
        draft = next((engine for engine in dialog.engines if engine.role == "draft"), None)
        if draft is None:
            raise WrongUseError(
                f"{container.path} holds no draft model: its dialog is of type {dialog.type}"
            )
        binary = container.files[draft.model.ctx_bins[0]]
        sizes = [
            tensor.shape[-1]
            for graph in OrtQnnToolchain().inspect(binary).graphs
            for tensor in graph.inputs
            if tensor.name == _TOKENS
        ]
        if dialog.type == "eaglet" or not sizes:
            raise WrongUseError(
                f"the draft model of {container.path} predicts from the hidden states of its "
                "target, so it has no perplexity of its own"
            )
        return cls(container.metadata.graphs.context_length, max(sizes))

    def for_dialog(self, config: GenieConfig) -> "ContextLimit":
        """Return the limit of a dialog; one with a sliding window outgrows the graphs."""
        dialog = config.dialog
        if dialog.target_engine.longcontext is None:
            return replace(self, context_length=min(self.context_length, dialog.context.size))
        return replace(self, context_length=dialog.context.size, slides=True)

    @property
    def past_tokens(self) -> int:
        """Tokens that a prefill call sees before its own, CL - AR."""
        return self.context_length - self.prefill_ar

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, bos included."""
        return self.context_length if self.slides else self.past_tokens + 1

    def allows(self, prompt_tokens: int, new_tokens: int) -> bool:
        """Return whether a prompt (bos included) and its answer fit."""
        total = prompt_tokens + new_tokens
        return prompt_tokens <= self.longest_prompt and total <= self.context_length

    def check(self, prompt_tokens: int, new_tokens: int) -> None:
        """Refuse a prompt (bos included) and an answer that do not fit."""
        if not self.allows(prompt_tokens, new_tokens):
            raise PromptTooLongError(
                prompt_tokens, new_tokens, self.longest_prompt, self.context_length
            )
