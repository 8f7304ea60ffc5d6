"""`genie_config.json`: the dialog that Genie creates, as typed models.

Keys: "Genie Dialog JSON configuration", docs.qualcomm.com 80-63442-10. Required keys, and keys that
exclude each other, are those of the parser of libGenie 1.21 (`buildlib.container.genie_validator`).
A key that is `None` is not written, and Genie takes its own default.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, PlainSerializer, model_validator

from buildlib.config_model import (
    WRITTEN,
    Count,
    GenieBlock,
    Number,
    One,
    OneOrSeveral,
    Positive,
    Several,
    Size,
    Text,
    Texts,
    Version,
    refuse,
)
from buildlib.container.genie_decoding import (
    GREEDY,
    Eaglet,
    KvShare,
    Lade,
    Multistream,
    Sampler,
    Spd,
    Ssd,
)
from buildlib.container.genie_engine import (
    Backend,
    Binaries,
    Engine,
    Lora,
    ModelBlock,
    PositionalEncoding,
    QnnHtp,
    RopeScaling,
    check_blocks,
)
from buildlib.container.manifest import HTP_CONFIG, TOKENIZER
from buildlib.validation import RULE, Fault

GenieDatatype = Literal["float32", "native", "ufixed8", "ufixed16", "sfixed8", "sfixed16"]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Grammar(GenieBlock):
    """Form that answers must have; `file` holds its definition."""

    type: Literal["json-schema", "regex", "ebnf"] | None = None
    backend: Literal["xgrammar"] | None = None
    file: str | None = None


class Context(GenieBlock):
    """Sizes and special tokens of the model.

    Attributes:
        bos_token: put before a dialog; -1 for none.
        eot_token: ends a turn.
        n_embd: length of an embedding vector.
        grammar: of every answer.
        draft_n_vocab: vocabulary of a draft model that knows fewer tokens.
    """

    version: Version = 1
    size: Count
    n_vocab: Count
    bos_token: Annotated[int, Field(ge=-1, le=2**31 - 1)]
    eos_token: Annotated[
        Annotated[TokenId, One] | Annotated[tuple[TokenId, ...], Field(min_length=1), Several],
        OneOrSeveral,
    ]
    eot_token: TokenId | None = None
    pad_token: TokenId | None = None
    n_embd: Count | None = None
    draft_n_vocab: Count | None = None
    grammar: Grammar | None = None

    def notes(self) -> Iterator[Fault]:
        """Yield special tokens beyond the vocabulary."""
        for key in ("bos-token", "eot-token", "pad-token", "eos-token"):
            value = getattr(self, key.replace("-", "_"))
            for index, token in enumerate(value if isinstance(value, tuple) else (value,)):
                place = (key, index) if isinstance(value, tuple) else (key,)
                yield from outside(token, self.n_vocab, *place)


def outside(token: int | None, n_vocab: int, *place: str | int) -> Iterator[Fault]:
    """Yield a note on a token beyond `n-vocab`: Genie 1.21 feeds it to the graph all the same."""
    if token is not None and token >= n_vocab:
        reason = f"{token} is beyond n-vocab {n_vocab}: queries fail if the graph has no row for it"
        yield Fault(place, RULE, reason)


class Tokenizer(GenieBlock):
    """File of the tokenizer, relative to the working folder of the runtime."""

    version: Version = 1
    path: Annotated[Text, WRITTEN] = TOKENIZER


def _shortest(value: float) -> float | int:
    return int(value) if value.is_integer() else value


class QuantParam(GenieBlock):
    """An integer q of a table means (q + offset) * scale."""

    scale: Positive
    offset: Annotated[Number, PlainSerializer(_shortest)]


class Embedding(GenieBlock):
    """Embedding vectors of tokens, from the host instead of the graph.

    A table (`lut`) is looked up by Genie; otherwise the program hands vectors over, and answers for
    generated tokens by a callback. Genie accepts signed types, but looks up in them for graphs with
    signed inputs alone. It rounds float32 down onto the grid of the graph's input; a table on that
    very grid is copied.

    Attributes:
        size: length of a vector.
        datatype: of the table, or of the vectors that are handed over; `native` is that of the
            graph's input.
    """

    version: Version = 1
    type: Literal["lut", "callback"] | None = None
    lut_path: Text | None = None
    size: Count
    datatype: GenieDatatype | None = None
    quant_param: QuantParam | None = None

    @model_validator(mode="after")
    def _table_is_whole(self) -> Self:
        if self.type != "lut":
            if self.lut_path is not None:
                raise refuse("it belongs to embeddings of type lut", "lut-path")
            return self
        if self.lut_path is None:
            reason = "it is missing: an embedding of type lut needs it"
            raise refuse(reason, "lut-path", kind="missing")
        if self.datatype is None:
            return self
        if self.datatype == "native":
            raise refuse("Genie looks up in no native table: name its integers", "datatype")
        has_grid = self.quant_param is not None
        if self.datatype == "float32" and has_grid:
            raise refuse("a table of float32 has none", "quant-param")
        if "fixed" in self.datatype and not has_grid:
            raise refuse(f"a table of {self.datatype} needs it", "quant-param", kind="missing")
        return self


DialogType = Literal["basic", "ssd-q1", "lade", "spd", "multistream", "eaglet", "kv-share"]
_OPTIONAL_BLOCKS = ("lade", "kv-share")
_ROLES: Mapping[str, tuple[str, str]] = {
    "spd": ("target", "draft"),
    "eaglet": ("target", "draft"),
    "kv-share": ("primary", "secondary"),
}


class DialogBlock(GenieBlock):
    """A conversation with one model, or with two of which one works for the other.

    Attributes:
        max_num_tokens: bounds the answer to one query; without it only the context length does.
        accumulator_size: bytes of embeddings that a node gathers of other nodes.
    """

    version: Version = 1
    type: Annotated[DialogType, WRITTEN] = "basic"
    max_num_tokens: Size | None = None
    stop_sequence: Texts | None = None
    context: Context
    sampler: Annotated[Sampler, WRITTEN] = GREEDY
    tokenizer: Tokenizer
    embedding: Embedding | None = None
    lade: Lade | None = None
    spd: Spd | None = None
    ssd: Annotated[Ssd | None, Field(alias="ssd-q1")] = None
    multistream: Multistream | None = None
    eaglet: Eaglet | None = None
    kv_share: KvShare | None = None
    accumulator_size: Size | None = None
    engine: Annotated[
        Annotated[Engine, One] | Annotated[tuple[Engine, Engine], Several], OneOrSeveral
    ]

    @model_validator(mode="after")
    def _type_and_blocks_agree(self) -> Self:
        blocks: dict[str, object | None] = {
            "ssd-q1": self.ssd,
            "lade": self.lade,
            "spd": self.spd,
            "multistream": self.multistream,
            "eaglet": self.eaglet,
            "kv-share": self.kv_share,
        }
        check_blocks(self.type, blocks, optional=_OPTIONAL_BLOCKS, what="dialog")
        return self

    @model_validator(mode="after")
    def _type_and_engines_agree(self) -> Self:
        roles = _ROLES.get(self.type)
        if roles is None:
            if isinstance(self.engine, tuple) or self.engine.role is not None:
                raise refuse(
                    f"a dialog of type {self.type} has one engine, without a role", "engine"
                )
        elif sorted(engine.role or "" for engine in self.engines) != sorted(roles):
            reason = f"a dialog of type {self.type} has an engine of each role: {', '.join(roles)}"
            raise refuse(reason, "engine")
        return self

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engine, or both: as they stand."""
        return self.engine if isinstance(self.engine, tuple) else (self.engine,)

    @property
    def target_engine(self) -> Engine:
        """The engine that generates the text; of a dialog that shares a KV cache, the first."""
        return next(e for e in self.engines if e.role not in {"draft", "secondary"})


_ON_EMULATOR: Mapping[str, object] = {"poll": False, "cpu_mask": "0x0", "use_mmap": False}
"""Options of `QnnHtp` on the emulator: threads neither spin nor keep to a phone's big cores."""


class GenieConfig(GenieBlock):
    """`genie_config.json`."""

    dialog: DialogBlock

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together."""
        return self.dialog.context.size

    @property
    def ctx_bins(self) -> tuple[str, ...]:
        """The context binaries of the (target) model in the order of the splits."""
        return self.dialog.target_engine.model.ctx_bins

    @property
    def referenced_files(self) -> tuple[str, ...]:
        """Files that Genie opens for this configuration; folders of adapters and prefixes."""
        dialog = self.dialog
        names = list(self.ctx_bins)
        for engine in dialog.engines:
            names += engine.model.ctx_bins
        names.append(dialog.tokenizer.path)
        if dialog.embedding is not None and dialog.embedding.lut_path is not None:
            names.append(dialog.embedding.lut_path)
        for engine in dialog.engines:
            names += engine.files()
        if dialog.ssd is not None:
            names.append(dialog.ssd.forecast_prefix_name)
        if dialog.context.grammar is not None and dialog.context.grammar.file:
            names.append(dialog.context.grammar.file)
        return tuple(dict.fromkeys(names))

    def with_dialog(
        self,
        *,
        sampler: Sampler | None = None,
        max_num_tokens: int | None = None,
        stop_sequence: tuple[str, ...] | None = None,
        context_size: int | None = None,
    ) -> "GenieConfig":
        """Return a copy for one run, with other bounds on the answer, or another sampler."""
        changes: dict[str, object | None] = {
            "sampler": sampler,
            "max_num_tokens": max_num_tokens,
            "stop_sequence": stop_sequence,
        }
        if context_size is not None:
            changes["context"] = self.dialog.context.model_copy(update={"size": context_size})
        return self._changed({key: value for key, value in changes.items() if value is not None})

    def with_turns_of(self, new_tokens: int) -> "GenieConfig":
        """Bound the tokens of each turn: `eaglet` gives one token less than `max-num-tokens`."""
        return self.with_dialog(max_num_tokens=new_tokens + (self.dialog.type == "eaglet"))

    def with_special_tokens(self, bos_token: int, eos_token: tuple[int, ...]) -> "GenieConfig":
        """Return a copy with other tokens before a dialog (-1 for none) and after answers."""
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        return self._changed({"context": self.dialog.context.model_copy(update=tokens)})

    def as_basic(self) -> "GenieConfig":
        """Return a plain dialog with the model that generates the text."""
        blocks = ("lade", "spd", "ssd", "multistream", "eaglet", "kv_share")
        engine = self.dialog.target_engine.model_copy(update={"role": None})
        return self._changed({"type": "basic", "engine": engine, **dict.fromkeys(blocks)})

    def with_embedding(self, embedding: Embedding) -> "GenieConfig":
        """Return a copy that looks tokens up on the host."""
        return self._changed({"embedding": embedding})

    def with_lora(self, lora: Lora) -> "GenieConfig":
        """Return a copy with adapters in the (target) engine."""
        target = self.dialog.target_engine

        def adapted(engine: Engine) -> Engine:
            if engine is not target:
                return engine
            return engine.model_copy(update={"model": engine.model.with_lora(lora)})

        return self._with_engines(adapted)

    def with_type(
        self, kind: str, *, draft: Engine | None = None, **block: GenieBlock
    ) -> "GenieConfig":
        """Return a copy of another type, with that type's block.

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

    def for_emulator(self) -> "GenieConfig":
        """Return a copy for the emulator, where threads must not spin."""

        def adapted(engine: Engine) -> Engine:
            htp = engine.backend.qnn_htp
            if htp is None:
                return engine
            backend = {"qnn_htp": htp.model_copy(update=_ON_EMULATOR)}
            return engine.model_copy(update={"backend": engine.backend.model_copy(update=backend)})

        return self._with_engines(adapted)

    def _with_engines(self, change: Callable[[Engine], Engine]) -> "GenieConfig":
        engine = self.dialog.engine
        engines = tuple(map(change, engine)) if isinstance(engine, tuple) else change(engine)
        return self._changed({"engine": engines})

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
    local_rope_theta: float | None = None,
) -> GenieConfig:
    """Return the configuration of a plain dialog with a Llama-like model.

    Args:
        local_rope_theta: base of a second set of rotations, with the prefix `local_` of its inputs.
    """
    changed = _ON_EMULATOR if emulator else {}
    htp = QnnHtp.model_validate({"kv_dim": head_dim, "allow_async_init": False, **changed})
    first = PositionalEncoding(
        rope_dim=rotary_dim // 2, rope_theta=rope_theta, rope_scaling=rope_scaling
    )
    positions: PositionalEncoding | tuple[PositionalEncoding, ...] = first
    if local_rope_theta is not None:
        from buildlib.graph.interface import LOCAL_PREFIX  # readers of containers need no onnx

        local = {"rope_theta": local_rope_theta, "rope_scaling": None, "prefix": LOCAL_PREFIX}
        positions = (first, first.model_copy(update=local))
    return GenieConfig(
        dialog=DialogBlock(
            context=context,
            sampler=GREEDY,
            tokenizer=Tokenizer(),
            engine=Engine(
                backend=Backend(qnn_htp=htp, extensions=HTP_CONFIG),
                model=ModelBlock(
                    binary=Binaries(ctx_bins=tuple(ctx_bins)), positional_encoding=positions
                ),
            ),
        )
    )
