"""Inputs and outputs by which Genie recognises the graph of a text encoder.

Four int32 inputs [1, ctx], all of which Genie 1.21 insists on, and `pooled_output` [1, embed] or
`sequence_output` [1, ctx, embed], or both: `pooled-output` of the configuration chooses.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

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

MODULES = "modules.json"
"""File by which a folder is one of sentence-transformers, and which tells its modules."""
POOLING = "1_Pooling/config.json"
"""File of the pooling, where no other folder is named."""
LENGTHS = "sentence_bert_config.json"
"""File of the number of tokens that sentence-transformers takes of a text."""

PoolingMode = Literal["mean", "cls"]


@dataclass(frozen=True)
class Pooling:
    """Way from the tokens of a text to its vector.

    Attributes:
        mode: the mean of all tokens, or the first one.
        normalized: whether the vector is scaled to a length of 1.
    """

    mode: PoolingMode = "mean"
    normalized: bool = False


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


def is_sentence_transformer(folder: Path) -> bool:
    """Return whether a folder is one of sentence-transformers."""
    return (folder / MODULES).is_file()


def sentence_files(folder: Path) -> frozenset[Path]:
    """Return the files of sentence-transformers in a folder that decide a build."""
    paths = {folder / name for name in (MODULES, POOLING, LENGTHS)}
    return frozenset(path for path in (*paths, _pooling_file(folder)) if path.is_file())


def longest_text(folder: Path) -> int | None:
    """Return the number of tokens that sentence-transformers takes of a text, if a file says it."""
    values = _read_json(folder / LENGTHS)
    length = values.get("max_seq_length") if isinstance(values, dict) else None
    return length if type(length) is int and length > 0 else None


def read_pooling(folder: Path) -> Pooling:
    """Return how sentence-transformers makes the vector of a text, the mean if nothing says it.

    Raises:
        ModelFileError: in a way, or by a module, that is not built here.
    """
    modules = dict(_modules(folder))
    other = {path: kind for path, kind in modules.items() if kind not in _MODULES}
    if other:
        path, kind = next(iter(other.items()))
        what = f"{path or kind} is a module of kind {kind}"
        raise ModelFileError(folder / MODULES, f"{what}; built here are {', '.join(_MODULES)}")
    order = [_MODULES.index(kind) for kind in modules.values()]
    if modules and order not in ([0, 1], [0, 1, 2]):
        reason = f"its modules are {', '.join(modules.values())}; built here are"
        raise ModelFileError(folder / MODULES, f"{reason} {', '.join(_MODULES)}, in this order")
    return Pooling(_pooling_mode(_pooling_file(folder)), "Normalize" in modules.values())


_MODULES = ("Transformer", "Pooling", "Normalize")


def _modules(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield folder and kind of each module, in order."""
    path, values = folder / MODULES, _read_json(folder / MODULES)
    for module in [] if values is None else values if isinstance(values, list) else [values]:
        where, kind = (module.get(key) if isinstance(module, dict) else 0 for key in _MODULE_KEYS)
        if not isinstance(where, str) or not isinstance(kind, str) or Path(where).name != where:
            raise ModelFileError(path, f"{str(module)[:80]} is no module with a path and a type")
        yield where, kind.rpartition(".")[2]


_MODULE_KEYS = ("path", "type")


def _pooling_file(folder: Path) -> Path:
    found = [path for path, kind in _modules(folder) if kind == "Pooling"]
    return folder / found[0] / "config.json" if found else folder / POOLING


def _pooling_mode(path: Path) -> PoolingMode:
    config = _read_json(path)
    items = config.items() if isinstance(config, dict) else ()
    modes = [str(value) for key, value in items if key == "pooling_mode"]
    modes += [
        key.removeprefix("pooling_mode_")
        for key, value in items
        if key.startswith("pooling_mode_") and value is True
    ]
    found = {mode.removesuffix("_tokens").removesuffix("_token") for mode in modes}
    if found <= {"mean"}:
        return "mean"
    if found == {"cls"}:
        return "cls"
    raise ModelFileError(path, f"pooling by {', '.join(modes)}; mean and cls are built here")


def _read_json(path: Path) -> object:
    """Read a file; None without one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(path, f"it cannot be read ({str(error)[:80]})") from error
