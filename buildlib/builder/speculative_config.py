"""`speculative_config`: dialogs that generate several tokens a step, as options of a build.

The plugin `speculation` builds them: self-speculation (SSD) needs the tensors of a training, and
Eaglet the ONNX of a trained draft head. Lookahead (LADE) needs nothing but the model, and drafting
(SPD) a second container with the same tokens.

Names and defaults: `qairt.gen_ai_api.configs`, docs.qualcomm.com 80-87189-2.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from buildlib.config_model import Count
from buildlib.errors import InvalidOptionError
from buildlib.paths import user_path
from buildlib.validation import first_fault

_OPTION = "speculative_config"

UserPath = Annotated[Path, AfterValidator(user_path)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LadeBuilderConfig(_Config):
    """Lookahead decoding: calls of (window + gcap) * (ngram - 1) tokens.

    Attributes:
        for_other_genie: build it though the installed Genie gives another text than plain decoding,
            for a device with another Genie; the first run there compares the two.
    """

    window: Count = 8
    ngram: Annotated[int, Field(ge=2)] = 5
    gcap: Count = 8
    for_other_genie: bool = False


class SpdBuilderConfig(_Config):
    """Speculative decoding: the container of a smaller model drafts `draft_len` tokens a step.

    Attributes:
        for_other_genie: as of `LadeBuilderConfig`.
    """

    draft_container: UserPath
    draft_len: Count = 4
    for_other_genie: bool = False


class SsdBuilderConfig(_Config):
    """Self-speculative decoding with tensors that were trained with the model.

    Attributes:
        forecast_token_count: tokens that are forecast behind each verified one.
        forecast_prefix: length of the trained prefix, in tokens.
        branches: candidates of the first forecast token, of the second, and so on.
        ssd_tensor_file: as `plugins/speculation/ssd_tensors.py` describes it.
    """

    forecast_token_count: Count = 4
    forecast_prefix: Count = 16
    branches: Annotated[tuple[Count, ...], Field(min_length=1)] = (3, 2)
    ssd_tensor_file: UserPath

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one call: Genie hangs where the largest AR is smaller."""
        candidates = sum(
            math.prod(self.branches[:depth]) for depth in range(len(self.branches) + 1)
        )
        return candidates * (1 + len(self.branches))


class EagletBuilderConfig(_Config):
    """A trained draft head on the hidden states of the target.

    Attributes:
        draft_len: tokens that are drafted one after the other.
        n_branches: candidates that are kept at each of them.
        draft_model_path: the head as ONNX; `plugins/speculation/draft_model.py` says its form.
        draft_token_map: JSON list of the ids of a draft's tokens in the target's vocabulary, for a
            draft that knows fewer of them.
        max_tokens_target_can_evaluate: of the tree that is verified; by default the largest AR.
    """

    draft_len: Count = 6
    n_branches: Count = 6
    draft_model_path: UserPath
    draft_token_map: UserPath | None = None
    eaglet_version: Annotated[int, Field(ge=1)] = 2
    max_tokens_target_can_evaluate: Count | None = None
    draft_kv_cache: bool = True


SpeculativeConfig = LadeBuilderConfig | SpdBuilderConfig | SsdBuilderConfig | EagletBuilderConfig
SPECULATIONS: Mapping[str, type[SpeculativeConfig]] = {
    "lade": LadeBuilderConfig,
    "spd": SpdBuilderConfig,
    "ssd-q1": SsdBuilderConfig,
    "eaglet": EagletBuilderConfig,
}
"""Kinds by Genie's names of the dialogs."""


def speculation_of(values: Mapping[str, object]) -> SpeculativeConfig:
    """Return the configuration of speculative decoding that keys of `speculative_config` make."""
    key, fields = f"{_OPTION}.type", dict(values)
    kind = fields.pop("type", None) or _kind_of(fields)
    if kind is None:
        raise InvalidOptionError(key, "it is missing", tuple(SPECULATIONS))
    model = SPECULATIONS.get(str(kind))
    if model is None:
        raise InvalidOptionError(key, f"there is no {kind!r}", tuple(SPECULATIONS))
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        fault = first_fault(error, model)
        reason = f"{fault.reason} (of {kind})"
        raise InvalidOptionError(f"{_OPTION}.{fault.key}", reason, ()) from error


def _kind_of(given: Mapping[str, object]) -> str | None:
    """Return the kind that one of these keys is required by: each kind but `lade` needs a file."""
    for kind, model in SPECULATIONS.items():
        if any(field.is_required() and name in given for name, field in model.model_fields.items()):
            return kind
    return None
