"""Tokens of a container on the host: to count, to cut into windows, to read ids.

The limit of its context is one rule for prompts, answers and windows of perplexity.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from harness.errors import PromptTooLongError, WrongUseError
from harness.runtimes.base import Window

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(path: Path) -> "Tokenizer":
    """Read a `tokenizer.json`, without its truncation and padding."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise WrongUseError(f"cannot read the tokenizer {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Return the ids of a text, without the special tokens that some tokenizers add."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


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


_SLACK = 8


def cut_windows(
    text: str, tokenizer: Path, limit: ContextLimit, most: int | None = None, *, bos: bool = True
) -> list[Window]:
    """Cut a text; an end that fills no window is left out.

    Genie 1.21 scores the first CL - AR predictions of a context that bos and the window fill. So
    without bos the window has a token more, of which the first is predicted by nothing: it is the
    last one that the window before scores.

    Args:
        bos: whether it stands before each window.

    Raises:
        WrongUseError: the text is shorter than one window, or the tokenizer cannot be read.
    """
    context = limit.context_length
    encoder = load_tokenizer(tokenizer)
    text = text.replace("\0", " ")
    offsets = encoder.encode(text, add_special_tokens=False).offsets
    windows: list[Window] = []
    first = 0 if bos else 1
    start = 0
    while (most is None or len(windows) < most) and start + context + _SLACK <= len(offsets):
        piece = text[offsets[start][0] : offsets[start + context + _SLACK - 1][1]]
        ids = encode(encoder, piece)
        if not context - 1 <= len(ids) - first <= 2 * context - 2:
            raise WrongUseError(
                f"the text cannot be cut into windows of {context} tokens near {piece[:40]!r}"
            )
        scored = tuple(ids[first : first + limit.past_tokens])
        windows.append(Window(piece, scored, context=tuple(ids[:first])))
        start += limit.past_tokens
    if not windows:
        raise WrongUseError(
            f"the text has {len(offsets)} tokens, and one window of the context length needs "
            f"{context + _SLACK}: name a longer text"
        )
    return windows
