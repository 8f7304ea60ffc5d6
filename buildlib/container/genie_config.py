"""`genie_config.json`: the dialog that Genie creates, as typed models.

Keys: "Genie Dialog JSON configuration", docs.qualcomm.com 80-63442-10, as far as dialogs on HTP
need them. What is required, and what excludes what, is what `libGenie.so` 1.21 enforces; see
`buildlib.container.genie_validator`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from buildlib.container.config_model import Count, GenieModel, Size, Version
from buildlib.container.genie_engine import (
    Backend,
    Binaries,
    Engine,
    Lora,
    Model,
    PositionalEncoding,
    QnnHtp,
    RopeScaling,
)
from buildlib.container.layout import TOKENIZER


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


GenieDatatype = Literal["float32", "ufixed8", "ufixed16", "sfixed8", "sfixed16"]
TokenId = Annotated[int, Field(ge=0)]


class Context(GenieModel):
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


class TokenPenalty(GenieModel):
    """Penalty of repeated tokens."""

    version: Version = 1
    penalize_last_n: Size
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class Sampler(GenieModel):
    """Choice of the next token: the most probable if `greedy`, otherwise drawn at random."""

    version: Version = 1
    seed: Annotated[int, Field(ge=-1)] = 42
    temp: Annotated[float, Field(ge=0.0)] = 1.0
    top_k: Size = 1
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    greedy: bool = True
    token_penalty: TokenPenalty | None = None


class Tokenizer(GenieModel):
    """File of the tokenizer, relative to the working folder of the runtime."""

    version: Version = 1
    path: str = TOKENIZER


class QuantParam(GenieModel):
    """An integer q of a table means (q + offset) * scale."""

    scale: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    offset: int


class Embedding(GenieModel):
    """The table that tokens are looked up in on the host; `size` is the length of a row.

    Genie accepts signed types, but looks up in them for graphs with signed inputs alone. It rounds
    float32 down onto the grid of the graph's input; a table on that very grid is copied.
    """

    version: Version = 1
    type: Literal["lut"] = "lut"
    lut_path: str
    size: Count
    datatype: GenieDatatype
    quant_param: QuantParam | None = None

    @model_validator(mode="after")
    def _integers_have_a_meaning(self) -> Self:
        if (self.quant_param is None) != (self.datatype == "float32"):
            raise ValueError("quant-param is needed by integer datatypes, and by no other")
        return self


class Dialog(GenieModel):
    """A conversation with one model, or with two of which one drafts for the other.

    `max_num_tokens` bounds what one query generates; without it only the context length does.
    """

    version: Version = 1
    type: Literal["basic", "lade", "spd", "ssd-q1", "eaglet"] = "basic"
    max_num_tokens: Count | None = None
    stop_sequence: tuple[str, ...] | None = None
    context: Context
    sampler: Sampler = Sampler()
    tokenizer: Tokenizer
    embedding: Embedding | None = None
    lade: Lade | None = None
    spd: Spd | None = None
    ssd: Annotated[Ssd | None, Field(alias="ssd-q1")] = None
    eaglet: Eaglet | None = None
    engine: Engine | tuple[Engine, Engine]

    @model_validator(mode="after")
    def _type_and_parts_agree(self) -> Self:
        blocks = {"lade": self.lade, "spd": self.spd, "ssd-q1": self.ssd, "eaglet": self.eaglet}
        for name, block in blocks.items():
            if block is not None and self.type != name:
                raise ValueError(f"a dialog of type {self.type} has no {name}")
        if self.type != "lade" and blocks.get(self.type, self) is None:
            raise ValueError(f"a dialog of type {self.type} needs {self.type}")
        roles = {engine.role for engine in self.engines}
        if self.type in {"spd", "eaglet"}:
            if roles != {"target", "draft"}:
                raise ValueError(f"type {self.type} needs an engine for each role: target, draft")
        elif roles != {None} or isinstance(self.engine, tuple):
            raise ValueError(f"type {self.type} takes one engine, without a role")
        return self

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engine, or both: as they stand."""
        return self.engine if isinstance(self.engine, tuple) else (self.engine,)

    @property
    def target_engine(self) -> Engine:
        """The engine whose tokens are generated."""
        return next(engine for engine in self.engines if engine.role != "draft")


class GenieConfig(GenieModel):
    """`genie_config.json`."""

    dialog: Dialog

    @property
    def ctx_bins(self) -> tuple[str, ...]:
        """The context binaries of the (target) model in the order of the splits."""
        return self.dialog.target_engine.model.binary.ctx_bins

    @property
    def referenced_files(self) -> tuple[str, ...]:
        """Everything that Genie opens for this configuration; of adapters and prefixes, folders."""
        dialog = self.dialog
        names = list(self.ctx_bins)
        for engine in dialog.engines:
            names += engine.model.binary.ctx_bins
        names.append(dialog.tokenizer.path)
        if dialog.embedding is not None:
            names.append(dialog.embedding.lut_path)
        for engine in dialog.engines:
            names += [engine.backend.extensions] if engine.backend.extensions else []
            lora = engine.model.binary.lora
            names += [adapter.path for adapter in lora.adapters] if lora else []
        if dialog.ssd is not None:
            names.append(dialog.ssd.forecast_prefix_name)
        return tuple(dict.fromkeys(names))

    def with_dialog(
        self, *, sampler: Sampler | None = None, max_num_tokens: int | None = None
    ) -> "GenieConfig":
        """A copy for one run: another sampler, another bound on what is generated."""
        changes: dict[str, object] = {}
        if sampler is not None:
            changes["sampler"] = sampler
        if max_num_tokens is not None:
            changes["max_num_tokens"] = max_num_tokens
        return self._changed(changes)

    def with_embedding(self, embedding: Embedding) -> "GenieConfig":
        """A copy that looks tokens up on the host."""
        return self._changed({"embedding": embedding})

    def with_lora(self, lora: Lora) -> "GenieConfig":
        """A copy whose (target) engine has adapters."""

        def adapted(engine: Engine) -> Engine:
            binary = engine.model.binary.model_copy(update={"lora": lora})
            model = engine.model.model_copy(update={"binary": binary})
            return engine.model_copy(update={"model": model})

        engine = self.dialog.engine
        if isinstance(engine, tuple):
            first, second = (adapted(e) if e.role == "target" else e for e in engine)
            return self._changed({"engine": (first, second)})
        return self._changed({"engine": adapted(engine)})

    def with_type(
        self, kind: str, *, draft: Engine | None = None, **block: GenieModel
    ) -> "GenieConfig":
        """A copy that is a dialog of another type, with that type's block.

        Args:
            kind: the type.
            draft: the engine that drafts, for the types that have one.
            block: the field of the type's block, and the block.
        """
        changes: dict[str, object] = {"type": kind, **block}
        if draft is not None:
            target = self.dialog.target_engine
            changes["engine"] = (
                target.model_copy(update={"role": "target"}),
                draft.model_copy(update={"role": "draft"}),
            )
        return self._changed(changes)

    def _changed(self, changes: dict[str, object]) -> "GenieConfig":
        dialog = self.dialog.model_copy(update=changes)
        values = dialog.model_dump(by_alias=True, exclude_none=True)
        return GenieConfig.model_validate({"dialog": values})


def basic_dialog(
    *,
    context: Context,
    head_dim: int,
    rotary_dim: int,
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
        rope_dim=rotary_dim // 2, rope_theta=rope_theta, rope_scaling=rope_scaling
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
