"""Genie's configuration of a dialog, from its settings and from a container's own."""

import warnings
from dataclasses import replace
from pathlib import Path

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.genie_decoding import GREEDY, Sampler
from buildlib.container.layout import has_file
from buildlib.container.manifest import CLIPPED_ADAPTERS
from buildlib.errors import ModelWarning
from buildlib.speculative.agreement import bound_turns
from harness.errors import PromptTooLongError, WrongUseError
from harness.runtimes.base import Framing
from harness.runtimes.context_limit import ContextLimit
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.files import check_limits, target_of

_WITHOUT_DEPTH = frozenset({"spd", "ssd-q1", "eaglet", "lade", "multistream"})
"""Dialogs without a second query: they take words alone, go on to the end, or lose tokens."""


def config_of(settings: DialogSettings, container: GenAIContainer) -> GenieConfig:
    """Give the configuration of a container with settings of a dialog."""
    config = container.genie_config
    if settings.genie_config is not None:
        config = GenieConfig.from_file(Path(settings.genie_config))
        check_limits(config, settings.genie_config, target_of(container))
        for name in config.referenced_files:
            if not has_file(container.metadata.files, name):
                raise WrongUseError(
                    f"{settings.genie_config} names {name}, which is not in {container.path}"
                )
    if config.dialog.type == "lade" and config.dialog.embedding is not None:
        raise WrongUseError(
            f"{container.path} looks tokens up on the host, which dialogs of type lade do not "
            "do: build it without --embedding-lut"
        )
    for name, strength in (settings.lora or {}).items():
        _check_adapter(name, strength, config, container)
    return config.with_dialog(sampler=_sampler_of(settings), stop_sequence=settings.stop)


def framed(config: GenieConfig, framing: Framing | None) -> GenieConfig:
    """Give the configuration of a dialog whose prompts bring their own special tokens.

    Genie 1.21 puts the first end-of-sequence token after an answer that another one ended, or none.
    """
    if framing is None:
        return config
    first = () if framing.end_token is None else (framing.end_token,)
    others = (token for token in eos_tokens(config) if token not in first)
    return config.with_special_tokens(bos_token=-1, eos_token=(*first, *others))


def eos_tokens(config: GenieConfig) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of a dialog."""
    eos = config.dialog.context.eos_token
    return eos if isinstance(eos, tuple) else (eos,)


def _sampler_of(settings: DialogSettings) -> Sampler:
    """Return Genie's sampler: a dialog is greedy by `top-k` 1, since Genie ignores `greedy`."""
    if settings.is_greedy:
        return GREEDY
    return Sampler.model_validate(settings.sampling)


def _check_adapter(
    name: str, strength: float, config: GenieConfig, container: GenAIContainer
) -> None:
    """Refuse an adapter that the container does not have, or not in that strength."""
    found = config.dialog.target_engine.model.lora
    if found is None:
        raise WrongUseError(
            f"{container.path} has no LoRA adapters: `qnnfarm build --lora` makes some"
        )
    known = [adapter.name for adapter in found.adapters]
    if name not in known:
        raise WrongUseError(f"{container.path} has no adapter {name!r}: it has {', '.join(known)}")
    _check_strength(container, name, strength)


def _check_strength(container: GenAIContainer, name: str, strength: float) -> None:
    """Refuse a strength that the graphs cannot take; warn of one that their ranges do not cover."""
    from buildlib.lora.config import MAX_STRENGTH

    if not 0.0 <= strength <= MAX_STRENGTH:
        raise WrongUseError(
            f"--lora {name}={strength:g}: the graphs take strengths from 0 to {MAX_STRENGTH:g}; a "
            "use case of the build (`use_cases` of its LoRA file) can have any weight"
        )
    clipped = str(container.metadata.model.quantization.get(CLIPPED_ADAPTERS, "")).split(", ")
    reason = None
    if name in clipped and strength:
        reason = "leaves the ranges of the container, which keep to the model without adapters"
    elif strength > 1.0:
        reason = "is stronger than 1, which the ranges of the container are made for"
    if reason is not None:
        warnings.warn(
            f"adapter {name}={strength:g} {reason}: its values are clipped, and text and "
            "perplexity may be worse",
            ModelWarning,
            stacklevel=2,
        )


def check_depth(config: GenieConfig) -> None:
    """Refuse a type of dialog that has no query before a prompt."""
    if config.dialog.type in _WITHOUT_DEPTH:
        raise WrongUseError(
            f"depth_tokens: a dialog of type {config.dialog.type} answers one prompt, and a "
            "depth is a query before it: leave the depth out, or measure a basic dialog"
        )


def dialog_limit(limit: ContextLimit, config: GenieConfig) -> ContextLimit:
    """Give the limit of a dialog in a container: one with a sliding window outgrows its graphs."""
    dialog = config.dialog
    if dialog.target_engine.longcontext is None:
        return replace(limit, context_length=min(limit.context_length, dialog.context.size))
    return replace(limit, context_length=dialog.context.size, slides=True)


def added_tokens(config: GenieConfig, *, after_empty_answer: bool = False) -> int:
    """Return how many tokens Genie 1.21 puts before a prompt of text or tokens.

    Bos, unless the configuration has -1 for it. Before a query after one that was to answer nothing
    there is one more, and with an embedding table on the host another: Genie then generates one
    token even so.
    """
    added = int(config.dialog.context.bos_token >= 0)
    if after_empty_answer:
        added += 1 + (config.dialog.embedding is not None)
    return added


def alpha_tensor(config: GenieConfig) -> str:
    """Return the name of the tensor that takes an adapter's strength."""
    lora = config.dialog.target_engine.model.lora
    return (lora.alpha_tensor_name if lora else None) or "alpha"


def bound_answer(
    config: GenieConfig, limit: ContextLimit, prompt_tokens: int, new_tokens: int
) -> GenieConfig:
    """Bound what one query generates, by what its type of dialog obeys.

    Dialogs of type `lade` and `multistream` ignore `max-num-tokens` and go on to the end of their
    context; so they get a smaller one. Genie loses all streams of a dialog that comes closer to the
    end of the graphs' context than one prefill call.

    Args:
        prompt_tokens: with bos.
    """
    dialog = config.dialog
    size = dialog.context.size
    if dialog.multistream is not None:
        size = prompt_tokens + dialog.multistream.n_streams * new_tokens
        if size > limit.longest_prompt:
            raise PromptTooLongError(
                prompt_tokens, size - prompt_tokens, limit.longest_prompt, limit.longest_prompt
            )
    elif dialog.type == "lade":
        ahead = limit.prefill_ar
        if dialog.lade is not None:
            ahead = dialog.lade.tokens_per_step or ahead
        size = min(size, prompt_tokens + new_tokens + ahead)
    return bound_turns(config, new_tokens).with_dialog(context_size=size)
