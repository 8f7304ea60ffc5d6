"""`generation_config.json`: the tokens that end an answer, and how the publisher chooses tokens.

Read are the keys below, with the defaults of transformers 5.24; a key that is null counts as
absent. Without the file answers end at the `eos_token_id` of `config.json`, and a dialog is greedy.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from buildlib.checkpoint.config import Flag, TokenId, read_object
from buildlib.checkpoint.layout import GENERATION_FILE


class GenerationConfig(BaseModel):
    """Keys of the file that act; others are ignored.

    Attributes:
        eos_token_id: one or several; they come before those of `config.json`.
        do_sample: False takes the most probable token each time.
        temperature: divides logits.
        top_k: candidates; 0 for all.
        top_p: sum of the candidates' probabilities.
        repetition_penalty: divides positive logits of tokens that stand in the context already, and
            multiplies negative ones; 1 for none.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    eos_token_id: TokenId | Annotated[tuple[TokenId, ...], Field(min_length=1)] | None = None
    do_sample: Flag = False
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)] = 50
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:  # noqa: ANN401  (raw JSON)
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer; none if the file says none."""
        ids = self.eos_token_id
        return ids if isinstance(ids, tuple) else () if ids is None else (ids,)


def load_generation(folder: Path) -> GenerationConfig:
    """Read the file of a model folder; without one, its defaults.

    Raises:
        ModelFileError: a value that is none, by its key.
    """
    path = folder / GENERATION_FILE
    return read_object(path, GenerationConfig) if path.is_file() else GenerationConfig()
