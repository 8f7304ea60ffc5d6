"""Settings of a dialog: one model for commands, plans, tests and all runtimes.

The keys have the names of Genie's configuration, with underscores in plans and hyphens on the
command line.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from harness.results.records import JsonScalar

_Text = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"\A[^\x00]+\Z")]
_Strength = Annotated[float, Field(ge=-1000, le=1000, allow_inf_nan=False)]
_TEMP = 1.0
_SEED = 42
_RANDOM_SEED = -1


def _one_at_a_time(adapters: Mapping[str, float]) -> Mapping[str, float]:
    if len(adapters) != 1:
        raise ValueError(
            f"{len(adapters)} adapters: Genie applies one at a time; a use case of the build "
            "(`use_cases` of its LoRA file) mixes several"
        )
    return adapters


Lora = Annotated[Mapping[_Text, _Strength], Field(max_length=64), AfterValidator(_one_at_a_time)]
"""The adapter to apply, and its strength."""


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
    lora: Lora | None = None
    genie_config: _Text | None = None

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is chosen each time."""
        samplers = (self.temp, self.top_k, self.top_p, self.seed)
        return self.top_k == 1 or self.temp == 0 or all(value is None for value in samplers)

    @property
    def is_reproducible(self) -> bool:
        """True if the same query gives the same text again."""
        return self.is_greedy or self.seed != _RANDOM_SEED

    @property
    def sampling(self) -> Mapping[str, float]:
        """Parameters of the sampler, by Genie's names; none for a greedy dialog."""
        if self.is_greedy:
            return {}
        return {
            "seed": _SEED if self.seed is None else self.seed,
            "temp": _TEMP if self.temp is None else self.temp,
            "top-k": self.top_k or 0,
            "top-p": 1.0 if self.top_p is None else self.top_p,
        }

    def record(self) -> dict[str, JsonScalar]:
        """Describe the settings in the store; runs of other settings are not compared."""
        record: dict[str, JsonScalar] = {"greedy": True} if self.is_greedy else {**self.sampling}
        if self.stop:
            record["stop"] = json.dumps(list(self.stop), ensure_ascii=False)
        for name, strength in (self.lora or {}).items():
            record["lora"] = f"{name}={strength:g}"
        if self.genie_config is not None:
            record["genie_config"] = Path(self.genie_config).name
        return record

    def resolved(self, resolve: Callable[[str], Path]) -> "DialogSettings":
        """Return the settings alone, with the path of `genie_config` as `resolve` finds it."""
        values = {key: getattr(self, key) for key in SETTING_KEYS}
        if self.genie_config is not None:
            values["genie_config"] = str(resolve(self.genie_config))
        return DialogSettings.model_construct(**values)


SETTING_KEYS = tuple(DialogSettings.model_fields)
