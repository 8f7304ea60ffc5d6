"""`genie_config.json`: the dialog that Genie creates, as typed models.

Keys: "Genie Dialog JSON configuration", docs.qualcomm.com 80-63442-10, as far as a basic dialog on
HTP needs them. What is required, and what excludes what, is what `libGenie.so` 1.21 enforces; see
`buildlib.container.referee`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from buildlib.container.config_model import ConfigModel, kebab
from buildlib.container.layout import HTP_CONFIG, TOKENIZER

Version = Literal[1]
TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]


class _Genie(ConfigModel):
    model_config = ConfigDict(alias_generator=kebab)


class Context(_Genie):
    """Sizes and special tokens of the model.

    `bos_token` and `eos_token` lie inside the vocabulary: an id outside it aborts the graph.
    """

    version: Version = 1
    size: Count
    n_vocab: Count
    bos_token: TokenId
    eos_token: TokenId | tuple[TokenId, ...]
    pad_token: TokenId | None = None
    n_embd: Count | None = None

    @model_validator(mode="after")
    def _tokens_are_in_vocabulary(self) -> Self:
        eos = self.eos_token if isinstance(self.eos_token, tuple) else (self.eos_token,)
        for token in (self.bos_token, *eos, self.pad_token or 0):
            if token >= self.n_vocab:
                raise ValueError(f"token {token} is outside the vocabulary of {self.n_vocab}")
        return self


class TokenPenalty(_Genie):
    """How repeated tokens lose probability."""

    version: Version = 1
    penalize_last_n: Size
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class Sampler(_Genie):
    """How the next token is chosen: the most probable if `greedy`, otherwise drawn at random."""

    version: Version = 1
    seed: Annotated[int, Field(ge=-1)] = 42
    temp: Annotated[float, Field(ge=0.0)] = 1.0
    top_k: Size = 1
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    greedy: bool = True
    token_penalty: TokenPenalty | None = None


class Tokenizer(_Genie):
    """File of the tokenizer, relative to the working folder of the runtime."""

    version: Version = 1
    path: str = TOKENIZER


class QnnHtp(_Genie):
    """The HTP backend of an engine.

    Attributes:
        spill_fill_bufsize: bytes shared by the graphs of all binaries; 0 lets each have its own.
        mmap_budget: bytes mapped at a time while loading; 0 for no limit.
        poll: spin while waiting for the processor: fewer microseconds, one busy core.
        cpu_mask: cores of Genie's own threads; `0x0` for any.
        kv_dim: the head dimension.
        pos_id_dim: half the head dimension; `positional_encoding` of the model replaces it.
        rope_theta: as `pos_id_dim`.
    """

    version: Version = 1
    use_mmap: bool = True
    spill_fill_bufsize: Size = 0
    mmap_budget: Size = 0
    poll: bool = True
    cpu_mask: Annotated[str, Field(pattern=r"^0x[0-9a-fA-F]{1,16}$")] = "0xe0"
    kv_dim: Count | None = None
    pos_id_dim: Count | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    data_alignment_size: Size | None = None
    allow_async_init: bool = False
    enable_graph_switching: bool | None = None


class Backend(_Genie):
    """What runs the graphs, and the file with its extensions."""

    version: Version = 1
    type: Literal["QnnHtp"] = "QnnHtp"
    qnn_htp: QnnHtp = Field(validation_alias="QnnHtp", serialization_alias="QnnHtp")
    extensions: str | None = HTP_CONFIG


class RopeScaling(_Genie):
    """Scaling of rotary positions, as `rope_scaling` in a checkpoint's `config.json`."""

    rope_type: Literal["default", "linear", "llama3"]
    factor: Annotated[float, Field(gt=0)] | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: Count | None = None


class PositionalEncoding(_Genie):
    """Rotary positions; `rope_dim` is half the head dimension."""

    type: Literal["rope"] = "rope"
    rope_dim: Count
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: RopeScaling | None = None


class Binaries(_Genie):
    """Context binaries in the order of the splits, relative to the runtime's working folder."""

    version: Version = 1
    ctx_bins: Annotated[tuple[str, ...], Field(min_length=1)]


class Model(_Genie):
    """The context binaries, and what Genie computes for them."""

    version: Version = 1
    type: Literal["binary"] = "binary"
    binary: Binaries
    positional_encoding: PositionalEncoding | None = None


class Engine(_Genie):
    """What runs the model.

    `n_threads` are Genie's own threads on the CPU, for tokenizing, sampling and copying.
    """

    version: Version = 1
    n_threads: Count = 3
    backend: Backend
    model: Model

    @model_validator(mode="after")
    def _positions_are_told_once(self) -> Self:
        htp = self.backend.qnn_htp
        if self.model.positional_encoding and (htp.pos_id_dim or htp.rope_theta):
            raise ValueError(
                "positional-encoding excludes pos-id-dim and rope-theta of QnnHtp: keep one of them"
            )
        return self


class Dialog(_Genie):
    """A conversation with one model.

    `max_num_tokens` bounds what one query generates; without it only the context length does.
    """

    version: Version = 1
    type: Literal["basic"] = "basic"
    max_num_tokens: Count | None = None
    stop_sequence: tuple[str, ...] | None = None
    context: Context
    sampler: Sampler = Sampler()
    tokenizer: Tokenizer
    engine: Engine


class GenieConfig(_Genie):
    """`genie_config.json`."""

    dialog: Dialog

    @property
    def ctx_bins(self) -> tuple[str, ...]:
        """The context binaries in the order of the splits."""
        return self.dialog.engine.model.binary.ctx_bins

    @property
    def referenced_files(self) -> tuple[str, ...]:
        """Every file that Genie opens for this configuration."""
        extensions = self.dialog.engine.backend.extensions
        return (
            *self.ctx_bins,
            self.dialog.tokenizer.path,
            *((extensions,) if extensions else ()),
        )

    def with_dialog(
        self, *, sampler: Sampler | None = None, max_num_tokens: int | None = None
    ) -> "GenieConfig":
        """A copy for one run: another sampler, another bound on what is generated."""
        changes: dict[str, object] = {}
        if sampler is not None:
            changes["sampler"] = sampler
        if max_num_tokens is not None:
            changes["max_num_tokens"] = max_num_tokens
        dialog = self.dialog.model_copy(update=changes)
        return GenieConfig.model_validate(GenieConfig(dialog=dialog).model_dump(by_alias=True))


def basic_dialog(
    *,
    context: Context,
    head_dim: int,
    rope_theta: float,
    rope_scaling: RopeScaling | None,
    ctx_bins: Sequence[str],
    emulator: bool,
) -> GenieConfig:
    """The configuration of a plain dialog with a Llama-like model.

    On the emulator Genie's threads neither spin nor are bound to the big cores that a phone has.
    """
    htp = (
        QnnHtp(kv_dim=head_dim, poll=False, cpu_mask="0x0", use_mmap=False)
        if emulator
        else QnnHtp(kv_dim=head_dim)
    )
    encoding = PositionalEncoding(
        rope_dim=head_dim // 2, rope_theta=rope_theta, rope_scaling=rope_scaling
    )
    return GenieConfig(
        dialog=Dialog(
            context=context,
            tokenizer=Tokenizer(),
            engine=Engine(
                backend=Backend(qnn_htp=htp),
                model=Model(
                    binary=Binaries(ctx_bins=tuple(ctx_bins)), positional_encoding=encoding
                ),
            ),
        )
    )
