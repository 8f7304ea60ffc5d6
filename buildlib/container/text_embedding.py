"""`genie_config.json` of a text encoder: the embedding that Genie creates, as typed models.

Keys: "Genie Embedding JSON configuration string", docs.qualcomm.com 80-63442-10, and those that the
parser of libGenie 1.21 requires. A key that is `None` is not written, and Genie takes its own
default.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from buildlib.config_model import (
    WRITTEN,
    Count,
    GenieBlock,
    Size,
    Version,
    refuse,
)
from buildlib.container.genie_config import GenieConfig, TokenId, Tokenizer, outside
from buildlib.container.genie_engine import (
    Extensions,
    ModelBlock,
    check_blocks,
    check_model_type,
)
from buildlib.validation import Fault


class EncoderContext(GenieBlock):
    """Sizes of the encoder; shorter texts are filled with `pad_token`."""

    version: Version = 1
    n_vocab: Count
    ctx_size: Count
    embed_size: Count
    pad_token: TokenId

    def notes(self) -> Iterator[Fault]:
        """Yield padding beyond the vocabulary."""
        yield from outside(self.pad_token, self.n_vocab, "pad-token")


class PromptTemplate(GenieBlock):
    """Text that Genie puts before and after each prompt, such as `[CLS]` and `[SEP]`."""

    version: Version = 1
    prompt_template: Annotated[tuple[str, str], WRITTEN] = ("", "")


class EncoderHtp(GenieBlock):
    """The HTP backend of an encoder.

    Attributes:
        pooled_output: Genie answers with `pooled_output`, else with `sequence_output`, a row for
            each token.
        disable_kv_cache: an encoder has none.
    """

    version: Version = 1
    spill_fill_bufsize: Annotated[Size, WRITTEN] = 0
    data_alignment_size: Size | None = None
    use_mmap: Annotated[bool, WRITTEN] = True
    allow_async_init: Annotated[bool, WRITTEN] = False
    pooled_output: Annotated[bool | None, WRITTEN] = True
    disable_kv_cache: bool | None = None
    direct_io: bool | None = None


class EncoderGenAiTransformer(GenieBlock):
    """The CPU backend of an encoder."""

    version: Version = 1
    n_layer: Size | None = None
    n_embd: Size | None = None
    n_heads: Size | None = None


class EncoderBackend(GenieBlock):
    """Backend that runs the graph, and its extensions file."""

    version: Version = 1
    type: Annotated[Literal["QnnHtp", "QnnGenAiTransformer"], WRITTEN] = "QnnHtp"
    qnn_htp: Annotated[EncoderHtp | None, Field(alias="QnnHtp")] = None
    qnn_genai_transformer: Annotated[
        EncoderGenAiTransformer | None, Field(alias="QnnGenAiTransformer")
    ] = None
    extensions: Extensions | None = None

    @model_validator(mode="after")
    def _block_is_of_the_type(self) -> Self:
        blocks = {"QnnHtp": self.qnn_htp, "QnnGenAiTransformer": self.qnn_genai_transformer}
        check_blocks(self.type, blocks, what="backend")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """Names of its extensions files."""
        given = self.extensions or ()
        return (given,) if isinstance(given, str) else given


class EncoderEngine(GenieBlock):
    """Engine that runs the encoder; `n_threads` are Genie's own threads on the CPU."""

    version: Version = 1
    n_threads: Size | None = None
    backend: EncoderBackend
    model: ModelBlock

    @model_validator(mode="after")
    def _model_is_of_an_encoder(self) -> Self:
        check_model_type(self.backend.type, self.model.type)
        if self.model.draft_token_map is not None:
            raise refuse("an encoder has none", "model", "draft-token-map")
        positions = self.model.positional_encoding
        if isinstance(positions, tuple):
            raise refuse("an encoder has one", "model", "positional-encoding")
        if positions is not None and positions.type not in {"rope", "none"}:
            reason = f"an encoder has positions of type rope or none, not {positions.type}"
            raise refuse(reason, "model", "positional-encoding", "type")
        return self


class TextEmbedding(GenieBlock):
    """A text encoder.

    Attributes:
        truncate_input: cut texts that are longer than the context; without it they are an error.
    """

    version: Version = 1
    context: EncoderContext
    prompt: PromptTemplate | None = None
    tokenizer: Annotated[Tokenizer, WRITTEN] = Tokenizer()
    truncate_input: bool | None = None
    engine: EncoderEngine


class TextEmbeddingConfig(GenieBlock):
    """`genie_config.json` of a text encoder."""

    embedding: TextEmbedding

    @property
    def context_length(self) -> int:
        """Tokens of the longest text."""
        return self.embedding.context.ctx_size

    @property
    def ctx_bins(self) -> tuple[str, ...]:
        """The context binaries of the encoder."""
        return self.embedding.engine.model.ctx_bins

    @property
    def referenced_files(self) -> tuple[str, ...]:
        """Files that Genie opens for this configuration."""
        engine = self.embedding.engine
        names = [*engine.model.files(), self.embedding.tokenizer.path]
        names += engine.backend.files
        return tuple(dict.fromkeys(names))


Configuration = GenieConfig | TextEmbeddingConfig
"""Configurations that the `genie_config.json` of a container may hold."""


def read_configuration(path: Path) -> Configuration:
    """Read the configuration of a container, of whichever kind it is."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        values = None  # what is wrong is said by the class below
    embeds = isinstance(values, dict) and "embedding" in values
    return (TextEmbeddingConfig if embeds else GenieConfig).from_file(path)
