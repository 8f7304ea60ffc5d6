"""Inputs and outputs by which Genie recognises the graph of a text encoder.

Four int32 inputs [1, ctx], all of which Genie 1.21 insists on, and `pooled_output` [1, embed] or
`sequence_output` [1, ctx, embed], or both: `pooled-output` of the configuration chooses.
"""

import json
from pathlib import Path
from typing import Self

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from buildlib.checkpoint.tokenizer import load_tokenizer, words_around
from buildlib.errors import ModelFileError
from buildlib.validation import first_fault

INPUT_IDS = "input_ids"
TOKEN_TYPE_IDS = "token_type_ids"  # noqa: S105  (no password)
POSITION_IDS = "position_ids"
ATTENTION_MASK = "attention_mask"
INPUTS = (INPUT_IDS, TOKEN_TYPE_IDS, POSITION_IDS, ATTENTION_MASK)
POOLED_OUTPUT = "pooled_output"
SEQUENCE_OUTPUT = "sequence_output"

POOLED_NAMES = (POOLED_OUTPUT, "sentence_embedding")
"""Name that Genie and sentence-transformers use. The `pooler_output` of BERT is another thing."""
SEQUENCE_NAMES = (SEQUENCE_OUTPUT, "last_hidden_state", "token_embeddings")

POOLING = "1_Pooling/config.json"
"""File of sentence-transformers beside a model."""


class EncoderConfig(BaseModel):
    """Fields of an encoder's `config.json` that the builder reads (BERT's names)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: str = "encoder"
    vocab_size: int = Field(ge=2)
    pad_token_id: int | None = Field(default=0, ge=0)
    max_position_embeddings: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _padding_is_a_token(self) -> Self:
        if self.padding >= self.vocab_size:
            raise ValueError(f"pad_token_id {self.padding} is outside the vocabulary")
        return self

    @property
    def padding(self) -> int:
        """Token that fills short texts; it is masked, so any will do."""
        return self.pad_token_id or 0

    @classmethod
    def from_text(cls, text: str, path: Path) -> Self:
        """Read a configuration; errors call it `path`."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ModelFileError(path, str(first_fault(error, cls))) from error


def is_encoder(model: ir.Model) -> bool:
    """Return whether an ONNX model is a text encoder: tokens in, vectors out, no caches."""
    inputs = {str(value.name) for value in model.graph.inputs}
    outputs = {str(value.name) for value in model.graph.outputs}
    vectors = outputs & {*POOLED_NAMES, *SEQUENCE_NAMES}
    return INPUT_IDS in inputs and inputs <= {*INPUTS} and bool(vectors)


def prompt_template(tokenizer: Path) -> tuple[str, str]:
    """Return the tokens that a tokenizer puts around a text, such as `[CLS]` and `[SEP]`.

    Genie reads special tokens from the text, and adds none by itself.
    """
    return words_around(load_tokenizer(tokenizer))


def read_pooling(model_folder: Path) -> str:
    """Return how sentence-transformers pools the tokens of this model: `mean` or `cls`."""
    path = model_folder / POOLING
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "mean"
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(path, f"it cannot be read ({str(error)[:80]})") from error
    modes = [
        key.removeprefix("pooling_mode_")
        for key, value in (config.items() if isinstance(config, dict) else ())
        if key.startswith("pooling_mode_") and value is True
    ]
    if modes in (["mean_tokens"], []):
        return "mean"
    if modes == ["cls_token"]:
        return "cls"
    raise ModelFileError(path, f"pooling by {', '.join(modes)}; mean and cls are built here")
