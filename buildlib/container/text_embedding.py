"""`genie_config.json` of a text encoder: the embedding that Genie creates, as typed models.

Keys: "Genie Embedding JSON configuration string", docs.qualcomm.com 80-63442-10, as far as encoders
on HTP need them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from buildlib.container.config_model import Count, GenieModel, Size, Version
from buildlib.container.genie_config import GenieConfig, TokenId, Tokenizer
from buildlib.container.genie_engine import Binaries, Model
from buildlib.container.layout import HTP_CONFIG


class EncoderContext(GenieModel):
    """Sizes of the encoder; shorter texts are filled with `pad_token`."""

    version: Version = 1
    n_vocab: Count
    ctx_size: Count
    embed_size: Count
    pad_token: TokenId

    @model_validator(mode="after")
    def _padding_is_in_vocabulary(self) -> Self:
        if self.pad_token >= self.n_vocab:
            raise ValueError(f"token {self.pad_token} is outside the vocabulary of {self.n_vocab}")
        return self


class PromptTemplate(GenieModel):
    """Text that Genie puts before and after each prompt, such as `[CLS]` and `[SEP]`."""

    version: Version = 1
    prompt_template: tuple[str, str] = ("", "")


class EncoderHtp(GenieModel):
    """The HTP backend of an encoder.

    Attributes:
        pooled_output: Genie answers with `pooled_output`, else with `sequence_output`, a row for
            each token.
        disable_kv_cache: an encoder has none.
    """

    version: Version = 1
    spill_fill_bufsize: Size = 0
    data_alignment_size: Size | None = None
    use_mmap: bool = True
    allow_async_init: bool = False
    pooled_output: bool = True
    disable_kv_cache: bool = True


class EncoderBackend(GenieModel):
    """Backend that runs the graph, and its extensions file."""

    version: Version = 1
    type: Literal["QnnHtp"] = "QnnHtp"
    qnn_htp: EncoderHtp = Field(validation_alias="QnnHtp", serialization_alias="QnnHtp")
    extensions: str | None = HTP_CONFIG


class EncoderEngine(GenieModel):
    """Engine that runs the encoder; `n_threads` are Genie's own threads on the CPU."""

    version: Version = 1
    n_threads: Count = 3
    backend: EncoderBackend
    model: Model


class TextEmbedding(GenieModel):
    """A text encoder.

    Attributes:
        truncate_input: cut texts that are longer than the context; without it they are an error.
    """

    version: Version = 1
    context: EncoderContext
    prompt: PromptTemplate = PromptTemplate()
    tokenizer: Tokenizer = Tokenizer()
    truncate_input: bool = True
    engine: EncoderEngine


class TextEmbeddingConfig(GenieModel):
    """`genie_config.json` of a text encoder."""

    embedding: TextEmbedding

    @property
    def context_length(self) -> int:
        """Tokens of the longest text."""
        return self.embedding.context.ctx_size

    @property
    def ctx_bins(self) -> tuple[str, ...]:
        """The context binaries of the encoder."""
        binary = self.embedding.engine.model.binary
        return () if binary is None else binary.ctx_bins

    @property
    def referenced_files(self) -> tuple[str, ...]:
        """Everything that Genie opens for this configuration."""
        extensions = self.embedding.engine.backend.extensions
        names = (*self.ctx_bins, self.embedding.tokenizer.path, extensions)
        return tuple(dict.fromkeys(name for name in names if name))

    def with_output(self, *, pooled: bool) -> "TextEmbeddingConfig":
        """Return a copy that answers with one vector for a text, or with one for each token."""
        values = self.embedding.model_dump(by_alias=True, exclude_none=True)
        values["engine"]["backend"]["QnnHtp"]["pooled-output"] = pooled
        return TextEmbeddingConfig.model_validate({"embedding": values})


Configuration = GenieConfig | TextEmbeddingConfig
"""What the `genie_config.json` of a container may hold."""


def read_configuration(path: Path) -> Configuration:
    """Read the configuration of a container, of whichever kind it is.

    Raises:
        GenieConfigError: it cannot be read, or is neither a dialog nor an embedding.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None  # what is wrong is said by the class below
    embeds = isinstance(found, dict) and "embedding" in found
    return (TextEmbeddingConfig if embeds else GenieConfig).from_file(path)


def text_embedding(
    context: EncoderContext,
    ctx_bins: Sequence[str],
    template: tuple[str, str],
    *,
    emulator: bool,
) -> TextEmbeddingConfig:
    """The configuration of an encoder with a pooled output."""
    htp = EncoderHtp(use_mmap=not emulator)
    return TextEmbeddingConfig(
        embedding=TextEmbedding(
            context=context,
            prompt=PromptTemplate(prompt_template=template),
            engine=EncoderEngine(
                backend=EncoderBackend(qnn_htp=htp),
                model=Model(binary=Binaries(ctx_bins=tuple(ctx_bins))),
            ),
        )
    )
