"""The blocks of dialogs that generate several tokens a step.

Which keys are needed and what bounds them is what `libGenie.so` 1.21 answers to them.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from buildlib.container.config_model import Count, GenieModel, Size, Version


class Lade(GenieModel):
    """Lookahead decoding: n-grams that the model itself has seen coming are verified at once."""

    version: Version = 1
    window: Count
    ngram: Annotated[int, Field(ge=2)]
    gcap: Count
    update_mode: Literal["ALWAYS_FWD_ONE", "FWD_MAX_HIT", "FWD_LEVEL"] | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one call: an AR of at least as many is needed."""
        return (self.window + self.gcap) * (self.ngram - 1)


class Spd(GenieModel):
    """Speculative decoding: a small model drafts tokens, the large one verifies them."""

    version: Version = 1
    draft_len: Count


class Ssd(GenieModel):
    """Self-speculative decoding: trained tokens after a trained prefix forecast the next ones.

    Attributes:
        branches: candidates of each forecast token that are verified.
        forecast_prefix: its length in tokens.
        forecast_prefix_name: its folder, relative to the runtime's working folder.
    """

    version: Version = 1
    ssd_version: Count = 1
    forecast_token_count: Count
    branches: Annotated[tuple[Count, ...], Field(min_length=1)]
    forecast_prefix: Count
    forecast_prefix_name: Annotated[str, Field(min_length=1)]

    @model_validator(mode="after")
    def _forecasts_cover_branches(self) -> Self:
        if len(self.branches) > self.forecast_token_count:
            raise ValueError(
                f"{len(self.branches)} branches of {self.forecast_token_count} forecast tokens"
            )
        return self


class Eaglet(GenieModel):
    """A draft head on the hidden states of the target proposes a tree of tokens."""

    version: Version = 1
    eaglet_version: Size
    draft_len: Count
    n_branches: Count
    max_tokens_target_can_evaluate: Count
    draft_kv_cache: bool
