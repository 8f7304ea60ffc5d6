"""Settings of a dialog: one model for commands, plans and tests, and Genie's configuration of it.

The keys have the names of Genie's configuration, with underscores in plans and hyphens on the
command line.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.genie_decoding import GREEDY, Sampler
from buildlib.container.layout import has_file
from buildlib.container.manifest import CLIPPED_ADAPTERS
from buildlib.speculative.agreement import bound_turns
from harness.errors import PromptTooLongError, WrongUseError
from harness.results.records import JsonScalar
from harness.runtimes.context_limit import ContextLimit
from harness.runtimes.files import check_limits, target_of
from harness.runtimes.genie.speculation import refuse_wrong_dialogs

_Text = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"\A[^\x00]+\Z")]
_Strength = Annotated[float, Field(ge=-1000, le=1000, allow_inf_nan=False)]
_TEMP = 1.0
_SEED = 42
_RANDOM_SEED = -1


class AdapterRangeWarning(UserWarning):
    """An adapter leaves the ranges of a container's graphs."""


class DialogSettings(BaseModel):
    """Settings of a dialog; with none of `temp`, `top_k`, `top_p` and `seed` it is greedy.

    If one of these four is given, the others are: temperature 1, all tokens, seed 42.

    Attributes:
        temp: of the distribution; 0 is greedy.
        top_k: number of candidates; 1 is greedy.
        top_p: sum of the candidates' probabilities.
        seed: of the random numbers; the same seed gives the same text, -1 another one each time.
        stop: sequences that end an answer; it is cut before them.
        lora: the adapter to apply, and its strength; the container names its adapters.
        genie_config: file of another `genie_config.json` for the container's files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="python-re")

    temp: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    stop: Annotated[tuple[_Text, ...], Field(max_length=64, strict=False)] | None = None
    lora: Annotated[Mapping[_Text, _Strength], Field(max_length=64)] | None = None
    genie_config: _Text | None = None

    @field_validator("lora")
    @classmethod
    def _one_at_a_time(cls, value: Mapping[str, float] | None) -> Mapping[str, float] | None:
        if value is not None and len(value) != 1:
            raise ValueError(
                f"{len(value)} adapters: Genie applies one at a time; a use case of the build "
                "(`use_cases` of its LoRA file) mixes several"
            )
        return value

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is chosen each time."""
        given = (self.temp, self.top_k, self.top_p, self.seed)
        return self.top_k == 1 or self.temp == 0 or all(value is None for value in given)

    @property
    def is_reproducible(self) -> bool:
        """True if the same query gives the same text again."""
        return self.is_greedy or self.seed != _RANDOM_SEED

    @property
    def sampler(self) -> Sampler:
        """Genie's sampler: a dialog is greedy by `top-k` 1, since Genie ignores `greedy`."""
        if self.is_greedy:
            return GREEDY
        return Sampler(
            seed=_SEED if self.seed is None else self.seed,
            temp=_TEMP if self.temp is None else self.temp,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
        )

    def record(self) -> dict[str, JsonScalar]:
        """Describe the settings in the store; runs of other settings are not compared."""
        sampler = self.sampler
        found: dict[str, JsonScalar] = {"greedy": True}
        if not self.is_greedy:
            found = {
                "seed": sampler.seed,
                "temp": sampler.temp,
                "top-k": sampler.top_k,
                "top-p": sampler.top_p,
            }
        if self.stop:
            found["stop"] = json.dumps(list(self.stop), ensure_ascii=False)
        for name, strength in (self.lora or {}).items():
            found["lora"] = f"{name}={strength:g}"
        if self.genie_config is not None:
            found["genie_config"] = Path(self.genie_config).name
        return found

    def config_of(
        self, container: GenAIContainer, resolve: Callable[[str], Path] = Path
    ) -> GenieConfig:
        """Give Genie's configuration with these settings.

        Args:
            resolve: finds the file of `genie_config`.

        Raises:
            WrongUseError: the container has no such adapter, or not all files of `genie_config`, or
                Genie cannot run the two together.
            BuildError: `genie_config` cannot be read.
            ConfigurationLimitError: the container's target cannot run `genie_config`.
        """
        config = container.genie_config
        if self.genie_config is not None:
            config = GenieConfig.from_file(resolve(self.genie_config))
            check_limits(config, self.genie_config, target_of(container))
            for name in config.referenced_files:
                if not has_file(container.metadata.files, name):
                    raise WrongUseError(
                        f"{self.genie_config} names {name}, which is not in {container.path}"
                    )
        if config.dialog.type == "lade" and config.dialog.embedding is not None:
            raise WrongUseError(
                f"{container.path} looks tokens up on the host, which dialogs of type lade do not "
                "do: build it without --embedding-lut"
            )
        if self.lora:
            self._check_adapters(config, container)
        return config.with_dialog(sampler=self.sampler, stop_sequence=self.stop)

    def check_dialog(self, container: GenAIContainer, prompt_tokens: int, new_tokens: int) -> None:
        """Refuse what the container cannot run, before any device is involved.

        A dialog of another `genie_config` is judged when it runs: a plan's file is relative to it.

        Raises:
            WrongUseError: see `config_of`.
            ConfigurationLimitError: see `refuse_wrong_dialogs`.
            PromptTooLongError: prompt and answer do not fit into the context.
        """
        if self.genie_config is None:
            config = self.config_of(container)
            refuse_wrong_dialogs(config, container)
            ContextLimit.of(container).of_dialog(config).check(prompt_tokens, new_tokens)

    def _check_adapters(self, config: GenieConfig, container: GenAIContainer) -> None:
        found = config.dialog.target_engine.model.lora
        if found is None:
            raise WrongUseError(
                f"{container.path} has no LoRA adapters: `qnnfarm build --lora` makes some"
            )
        known = [adapter.name for adapter in found.adapters]
        strange = next((name for name in self.lora or {} if name not in known), None)
        if strange is not None:
            raise WrongUseError(
                f"{container.path} has no adapter {strange!r}: it has {', '.join(known)}"
            )
        for name, strength in (self.lora or {}).items():
            _check_strength(container, name, strength)


SETTING_KEYS = tuple(DialogSettings.model_fields)


def _check_strength(container: GenAIContainer, name: str, strength: float) -> None:
    """Refuse a strength that the graphs cannot take; warn of one that their ranges do not cover.

    Raises:
        WrongUseError: it is outside the grid of the input.
    """
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
            AdapterRangeWarning,
            stacklevel=2,
        )


def parse_lora(text: str) -> tuple[str, float]:
    """Read `NAME=STRENGTH`, or `NAME` for strength 1.

    Raises:
        WrongUseError: it is neither.
    """
    name, equals, strength = text.partition("=")
    try:
        return name, float(strength) if equals else 1.0
    except ValueError:
        raise WrongUseError(f"--lora {text[:60]!r} is no NAME=STRENGTH, as in red=0.5") from None


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

    Raises:
        PromptTooLongError: the answers of all streams do not fit.
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
