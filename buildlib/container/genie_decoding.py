"""The choice of tokens: sampler, and the kinds of dialog that decode several at a time.

Keys: "Genie Dialog JSON configuration", docs.qualcomm.com 80-63442-10. A key that is `None` is not
written, and Genie takes its own default.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from buildlib.config_model import (
    INT64,
    Count,
    Count32,
    Float32,
    GenieBlock,
    Size,
    Size32,
    Text,
    Version,
    refuse,
)
from buildlib.validation import RULE, Fault


class TokenPenalty(GenieBlock):
    """Penalty of the tokens that stand among the last ones."""

    version: Version = 1
    penalize_last_n: Size32 | None = None
    repetition_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None


class Sampler(GenieBlock):
    """Choice of the next token.

    Genie reads `greedy` and ignores it: `top_k` 1 or `temp` 0 is greedy. A dialog that was created
    with `top_k` 1 keeps choosing so, even if a sampler is applied to it later.

    Attributes:
        seed: of the random numbers; -1 for another one each time.
        top_k: candidates; 1 for the most probable token.
        callback_name: function that the program has registered; the whole of a custom sampler.
    """

    version: Version = 1
    type: Literal["basic", "custom"] | None = None
    seed: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    temp: Annotated[Float32, Field(ge=0.0)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    greedy: bool | None = None
    token_penalty: TokenPenalty | None = None
    callback_name: Text | None = None

    def notes(self) -> Iterator[Fault]:
        """Yield a wish for greedy choices that nothing grants."""
        if self.greedy and self.type != "custom" and not self.is_greedy:
            reason = "Genie ignores it and draws at random: top-k 1 or temp 0 is greedy"
            yield Fault(("greedy",), RULE, reason)

    @model_validator(mode="after")
    def _custom_is_a_callback(self) -> Self:
        if self.type != "custom":
            if self.callback_name is not None:
                raise refuse("it belongs to samplers of type custom", "callback-name")
            return self
        if self.callback_name is None:
            reason = "it is missing: a sampler of type custom needs it"
            raise refuse(reason, "callback-name", kind="missing")
        for key in ("seed", "temp", "top-k", "top-p", "greedy", "token-penalty"):
            if getattr(self, key.replace("-", "_")) is not None:
                raise refuse("a sampler of type custom has a callback-name alone", key)
        return self

    @property
    def is_greedy(self) -> bool:
        """True if it takes the most probable token each time."""
        return self.type != "custom" and (self.top_k == 1 or self.temp == 0)


GREEDY = Sampler(seed=42, temp=1.0, top_k=1, top_p=1.0)


SPECULATIVE = frozenset({"lade", "spd", "ssd-q1", "eaglet"})
"""Types of dialogs whose greedy text is that of plain decoding."""


class Lade(GenieBlock):
    """Lookahead decoding: n-grams that the model itself has seen coming are verified at once."""

    version: Version = 1
    window: Count | None = None
    ngram: Annotated[int, Field(ge=2, le=INT64)] | None = None
    gcap: Count | None = None
    update_mode: Literal["ALWAYS_FWD_ONE", "FWD_MAX_HIT", "FWD_LEVEL"] | None = None

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of one call: an AR of at least as many is needed; `None` if Genie chooses."""
        if self.window is None or self.ngram is None or self.gcap is None:
            return None
        return (self.window + self.gcap) * (self.ngram - 1)


class Spd(GenieBlock):
    """Speculative decoding: a small model drafts tokens, the large one verifies them."""

    version: Version = 1
    draft_len: Count


class Ssd(GenieBlock):
    """Self-speculative decoding: trained tokens after a trained prefix forecast the next ones.

    Attributes:
        branches: candidates of each forecast token that are verified.
        forecast_prefix: its length in tokens.
        forecast_prefix_name: its folder, relative to the runtime's working folder.
        n_streams: answers to one query, decoded together.
        p_threshold: least probability of a first token to become a stream.
    """

    version: Version = 1
    ssd_version: Version = 1
    forecast_token_count: Count32
    branches: Annotated[tuple[Count, ...], Field(min_length=1)]
    forecast_prefix: Count
    forecast_prefix_name: Text
    n_streams: Count | None = None
    p_threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None

    @model_validator(mode="after")
    def _forecasts_cover_branches(self) -> Self:
        if len(self.branches) > self.forecast_token_count:
            reason = f"{len(self.branches)} branches of {self.forecast_token_count} forecast tokens"
            raise refuse(reason, "branches")
        if self.p_threshold and (self.n_streams or 0) < 2:
            raise refuse("it needs n-streams of at least 2", "p-threshold")
        return self


class Multistream(GenieBlock):
    """Several answers to one query, each from another first token.

    Genie decodes each stream to a token that ends text: `max_num_tokens` does not bound them.

    Attributes:
        p_threshold: least probability of a first token to become a stream.
    """

    version: Version = 1
    n_streams: Count
    p_threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None


class Eaglet(GenieBlock):
    """A draft head on the hidden states of the target proposes a tree of tokens."""

    version: Version = 1
    eaglet_version: Size
    draft_len: Count
    n_branches: Count
    max_tokens_target_can_evaluate: Count
    draft_kv_cache: bool


class KvShare(GenieBlock):
    """Block of a dialog with one engine that reads the prompt and a second one that answers."""
