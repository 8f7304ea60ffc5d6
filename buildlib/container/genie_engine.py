"""The engine of a dialog: backend, model files, positions, adapters, long contexts.

Keys: "Genie Dialog JSON configuration", docs.qualcomm.com 80-63442-10, and those that the parser of
libGenie 1.21 requires. A key that is `None` is not written, and Genie takes its own default.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from buildlib.config_model import (
    WRITTEN,
    Count32,
    GenieBlock,
    One,
    OneOrSeveral,
    Positive,
    Several,
    Size,
    Size32,
    Text,
    Texts,
    Version,
    Whole,
    refuse,
)
from buildlib.validation import FormerKey

RopeType = Literal[
    "default", "linear", "llama3", "longrope", "qwen2vl-mrope", "qwen3vl-mrope", "proportional"
]
_NEEDED_BY: Mapping[str, tuple[str, ...]] = {
    "llama3": (
        "factor",
        "low-freq-factor",
        "high-freq-factor",
        "original-max-position-embeddings",
    ),
    "longrope": ("factor", "original-max-position-embeddings", "short-factor", "long-factor"),
}
_MROPE = ("qwen2vl-mrope", "qwen3vl-mrope")
_SCALINGS_OF: Mapping[str, tuple[str, ...]] = {
    "low-freq-factor": ("llama3",),
    "high-freq-factor": ("llama3",),
    "short-factor": ("longrope",),
    "long-factor": ("longrope",),
    "mrope-section": _MROPE,
    "time-step": _MROPE,
    "spatial-merge-size": _MROPE,
    "partial-rotary-factor": ("proportional",),
}


class RopeScaling(GenieBlock):
    """Scaling of rotary positions, as `rope_scaling` in a checkpoint's `config.json`.

    Attributes:
        short_factor: of each rotary dimension, within the original context length (longrope).
        long_factor: the same beyond it.
        mrope_section: rotary dimensions of time, height and width, for models that see.
        partial_rotary_factor: part of the head's dimensions that turn (proportional).
    """

    rope_type: RopeType
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count32 | None = None
    short_factor: tuple[Positive, ...] | None = None
    long_factor: tuple[Positive, ...] | None = None
    mrope_section: tuple[Size32, Size32, Size32] | None = None
    time_step: Count32 | None = None
    spatial_merge_size: Count32 | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _keys_are_of_the_type(self) -> Self:
        for key in _NEEDED_BY.get(self.rope_type, ()):
            if getattr(self, key.replace("-", "_")) is None:
                raise refuse(f"it is missing: {self.rope_type} needs it", key, kind="missing")
        for key, types in _SCALINGS_OF.items():
            is_set = getattr(self, key.replace("-", "_")) is not None
            if is_set and self.rope_type not in types:
                raise refuse(f"it belongs to {' and '.join(types)}, not to {self.rope_type}", key)
        return self

    def dimensions(self) -> dict[str, int]:
        """Return the rotary dimensions that its lists are made for, by key."""
        lengths = {}
        for key, factors in (
            ("short-factor", self.short_factor),
            ("long-factor", self.long_factor),
        ):
            if factors is not None:
                lengths[key] = len(factors)
        if self.mrope_section is not None:
            lengths["mrope-section"] = sum(self.mrope_section)
        return lengths


class PositionalEncoding(GenieBlock):
    """Positions of tokens; `rope_dim` is half of the dimensions of a head that turn.

    `absolute` hands `position_ids` to the graph, as encoders want them.

    Attributes:
        prefix: stands before the names of the inputs that take cosines and sines; so layers can
            turn by several bases.
    """

    type: Annotated[Literal["rope", "alibi", "absolute", "none"], WRITTEN] = "rope"
    rope_dim: Count32 | None = None
    rope_theta: Positive | None = None
    rope_scaling: RopeScaling | None = None
    prefix: Text | None = None

    @model_validator(mode="after")
    def _rope_keys_are_of_rope(self) -> Self:
        keys = {
            "rope-dim": self.rope_dim,
            "rope-theta": self.rope_theta,
            "rope-scaling": self.rope_scaling,
        }
        for key, value in keys.items():
            if value is not None and self.type != "rope":
                raise refuse(f"positions of type {self.type} have no {key}", key)
        lists = self.rope_scaling.dimensions() if self.rope_scaling else {}
        for key, n in lists.items():
            if self.rope_dim is not None and n != self.rope_dim:
                reason = f"it is made for {n} rotary dimensions, and rope-dim is {self.rope_dim}"
                raise refuse(reason, "rope-scaling", key)
        return self


KvUpdateMethod = Literal["POINTER_SHIFT", "SHIFT_CONCAT", "SMART_MASK", "NATIVE_KV"]


class QnnHtp(GenieBlock):
    """The HTP backend of an engine.

    Attributes:
        spill_fill_bufsize: bytes shared by the graphs of all binaries; 0 lets each have its own.
        mmap_budget: bytes mapped at a time while loading; 0 for no limit.
        poll: spin while waiting for the processor: fewer microseconds, one busy core.
        cpu_mask: cores of Genie's own threads; `0x0` for any.
        kv_dim: the head dimension; without it no dialog can be created.
        pos_id_dim: half the head dimension; `positional_encoding` of the model replaces it.
        rope_theta: as `pos_id_dim`.
        data_alignment_size: bytes that inputs and outputs are aligned to; 0 for no alignment.
        allow_async_init: load the context binaries at the same time.
        enable_graph_switching: keep the graph in use alone in memory.
        graph_switching_lora_policy: apply an adapter to a graph when it is first used, or at once.
        kv_update_method: of the KV cache between calls.
        direct_io: read the binaries past the page cache.
        shared_engine: let several dialogs run on one engine; needs `allow_async_init`.
    """

    version: Version = 1
    use_mmap: Annotated[bool, WRITTEN] = True
    spill_fill_bufsize: Annotated[Size, WRITTEN] = 0
    mmap_budget: Annotated[Size, WRITTEN] = 0
    poll: Annotated[bool, WRITTEN] = True
    cpu_mask: Annotated[str, Field(pattern=r"^0x[0-9a-fA-F]{1,16}$"), WRITTEN] = "0xe0"
    kv_dim: Count32
    pos_id_dim: Count32 | None = None
    rope_theta: Positive | None = None
    data_alignment_size: Size | None = None
    allow_async_init: bool | None = None
    enable_graph_switching: bool | None = None
    graph_switching_lora_policy: Literal["lazy", "eager"] | None = None
    kv_update_method: KvUpdateMethod | None = None
    skip_lora_validation: bool | None = None
    direct_io: bool | None = None
    shared_engine: bool | None = None

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.graph_switching_lora_policy == "lazy" and not self.enable_graph_switching:
            reason = "lazy needs enable-graph-switching: true"
            raise refuse(reason, "graph-switching-lora-policy")
        if self.shared_engine and not self.allow_async_init:
            raise refuse("true needs allow-async-init: true", "shared-engine")
        return self


class QnnGpu(GenieBlock):
    """The GPU backend; it has no options."""

    version: Version = 1


class QnnGenAiTransformer(GenieBlock):
    """The backend of Genie's own transformer library, on the CPU.

    Attributes:
        n_logits: logit vectors that a call returns.
        n_layer: decoder layers of the model.
        n_embd: length of an embedding vector.
        n_heads: attention heads.
        n_kv_heads: key/value heads.
        kv_quantization: keep the KV cache quantized.
    """

    version: Version = 1
    n_logits: Size | None = None
    n_layer: Size | None = None
    n_embd: Size | None = None
    n_heads: Size | None = None
    n_kv_heads: Size | None = None
    kv_quantization: bool | None = None
    use_mmap: bool | None = None


Extensions = Annotated[Annotated[str, One] | Annotated[tuple[str, ...], Several], OneOrSeveral]
BackendType = Literal["QnnHtp", "QnnGpu", "QnnGenAiTransformer"]


class Backend(GenieBlock):
    """Backend that runs the graphs, and its extensions file, or several of them."""

    version: Version = 1
    type: Annotated[BackendType, WRITTEN] = "QnnHtp"
    qnn_htp: Annotated[QnnHtp | None, Field(alias="QnnHtp")] = None
    qnn_gpu: Annotated[QnnGpu | None, Field(alias="QnnGpu")] = None
    qnn_genai_transformer: Annotated[
        QnnGenAiTransformer | None, Field(alias="QnnGenAiTransformer")
    ] = None
    extensions: Extensions | None = None

    @model_validator(mode="after")
    def _block_is_of_the_type(self) -> Self:
        blocks = {
            "QnnHtp": self.qnn_htp,
            "QnnGpu": self.qnn_gpu,
            "QnnGenAiTransformer": self.qnn_genai_transformer,
        }
        check_blocks(self.type, blocks, optional=("QnnGpu",), what="backend")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """Names of its extensions files."""
        given = self.extensions or ()
        return (given,) if isinstance(given, str) else given


def check_blocks(
    kind: str, blocks: Mapping[str, object | None], *, optional: Iterable[str] = (), what: str
) -> None:
    """Require the block that is called as the type of its object, and refuse all others."""
    for name, block in blocks.items():
        if name == kind and block is None and name not in optional:
            reason = f"it is missing: a {what} of type {kind} needs it"
            raise refuse(reason, name, kind="missing")
        if name != kind and block is not None:
            raise refuse(f"a {what} of type {kind} has no {name}", name)


class LoraAdapter(GenieBlock):
    """An adapter: for version 1 a folder of float32 `{input}.raw` files, one for each input.

    Later versions have `bin_sections`, a file of updated weights for each context binary, and
    `alphas`, the names of their strengths.
    """

    version: Version = 1
    name: Text
    path: Annotated[Text | None, FormerKey("lora-weights-dir")] = None
    bin_sections: tuple[str, ...] | None = None
    alphas: Texts | None = None


class LoraGroup(GenieBlock):
    """Adapters that share the quantization of the model, kept in `quant_bin_sections`."""

    version: Version = 1
    name: Text
    members: Texts
    quant_bin_sections: tuple[str, ...]


class Lora(GenieBlock):
    """Adapters of a model; `alpha_tensor_name` takes the strength of one.

    Version 1 are inputs of the graphs; without a version adapters are sections of binaries.
    """

    version: Version = 1
    lora_version: Annotated[Literal[1, 2, 3] | None, Whole] = None
    alpha_tensor_name: Text | None = None
    adapters: Annotated[tuple[LoraAdapter, ...], Field(min_length=1)]
    groups: tuple[LoraGroup, ...] | None = None

    @model_validator(mode="after")
    def _adapters_are_of_the_version(self) -> Self:
        inputs = self.lora_version == 1
        needed, foreign = ("path", "bin-sections") if inputs else ("bin-sections", "path")
        about = f"lora-version {self.lora_version}" if self.lora_version else "no lora-version"
        for index, adapter in enumerate(self.adapters):
            keys = {"path": adapter.path, "bin-sections": adapter.bin_sections}
            if keys[needed] is None:
                reason = f"it is missing: adapters of {about} have it"
                raise refuse(reason, "adapters", index, needed, kind="missing")
            if keys[foreign] is not None:
                reason = f"adapters of {about} have {needed} instead"
                raise refuse(reason, "adapters", index, foreign)
        if inputs and self.groups is not None:
            raise refuse("groups are of bin-sections: not of lora-version 1", "groups")
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [adapter.name for adapter in self.adapters]
        if len(set(names)) != len(names):
            raise refuse(f"an adapter stands twice in {names}", "adapters")
        for index, group in enumerate(self.groups or ()):
            strangers = sorted(set(group.members) - set(names))
            if strangers:
                reason = f"there is no adapter {strangers[0]}"
                raise refuse(reason, "groups", index, "members")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """Folders of adapters, or files of sections."""
        found = [name for a in self.adapters for name in (a.path, *(a.bin_sections or ())) if name]
        for group in self.groups or ():
            found += [name for name in group.quant_bin_sections if name]
        return tuple(found)


class Binaries(GenieBlock):
    """Context binaries in the order of the splits, relative to the runtime's working folder."""

    version: Version = 1
    ctx_bins: Annotated[Texts, Field(min_length=1)]
    lora: Lora | None = None


class Library(GenieBlock):
    """The model of Genie's own transformer library, in its own format."""

    version: Version = 1
    model_bin: Text
    lora: Lora | None = None


class ModelBlock(GenieBlock):
    """The files of the model, and the inputs that Genie computes for them.

    Attributes:
        draft_token_map: JSON that maps the tokens of a draft model to those of the target.
    """

    version: Version = 1
    type: Annotated[Literal["binary", "library"], WRITTEN] = "binary"
    binary: Binaries | None = None
    library: Library | None = None
    positional_encoding: (
        Annotated[
            Annotated[PositionalEncoding, One]
            | Annotated[tuple[PositionalEncoding, ...], Field(min_length=1), Several],
            OneOrSeveral,
        ]
        | None
    ) = None
    draft_token_map: Text | None = None

    @model_validator(mode="after")
    def _block_is_of_the_type(self) -> Self:
        blocks = {"binary": self.binary, "library": self.library}
        check_blocks(self.type, blocks, what="model")
        return self

    @property
    def ctx_bins(self) -> tuple[str, ...]:
        """The context binaries; none for a library."""
        return self.binary.ctx_bins if self.binary else ()

    @property
    def lora(self) -> Lora | None:
        """Adapters of the model."""
        block = self.binary or self.library
        return block.lora if block else None

    def with_lora(self, lora: Lora | None) -> Self:
        """Return a copy with these adapters, or with none."""
        blocks = {
            name: block.model_copy(update={"lora": lora})
            for name, block in (("binary", self.binary), ("library", self.library))
            if block is not None
        }
        return self.model_copy(update=blocks)

    def with_ctx_bins(self, names: tuple[str, ...]) -> Self:
        """Return a copy of a model of context binaries that lie elsewhere."""
        return self.model_copy(update={"binary": Binaries(ctx_bins=names, lora=self.lora)})

    def files(self) -> Iterator[str]:
        """Yield files and folders that Genie opens for it."""
        yield from self.ctx_bins
        if self.library is not None:
            yield self.library.model_bin
        if self.draft_token_map is not None:
            yield self.draft_token_map
        if self.lora is not None:
            yield from self.lora.files


class SlidingWindow(GenieBlock):
    """Keep the last `window_size` tokens."""

    version: Version = 1
    window_size: Count32


class KeyDiff(GenieBlock):
    """Keep the tokens that a scoring network, a context binary, ranks highest."""

    version: Version = 1
    scoring_network: Text
    update_frequency: Count32


class LongContext(GenieBlock):
    """Treatment of the KV cache when a dialog outgrows it.

    Attributes:
        reserved_tokens: first tokens that are always kept.
    """

    version: Version = 1
    type: Literal["sliding-window", "keydiff"]
    reserved_tokens: Size32 | None = None
    sliding_window: SlidingWindow | None = None
    keydiff: KeyDiff | None = None

    @model_validator(mode="after")
    def _block_is_of_the_type(self) -> Self:
        blocks = {"sliding-window": self.sliding_window, "keydiff": self.keydiff}
        check_blocks(self.type, blocks, optional=blocks, what="longcontext")
        return self


class CacheGroup(GenieBlock):
    """Tensors of the KV cache, by the prefix of their names, with a long context of their own."""

    version: Version = 1
    prefix: Text
    attention_mask_tensor_name: Text | None = None
    cache_index_tensor_name: Text | None = None
    longcontext: LongContext | None = None


Role = Literal["target", "draft", "primary", "secondary"]


class Engine(GenieBlock):
    """Engine that runs the model.

    `n_threads` are Genie's own threads on the CPU, for tokenizing, sampling and copying; `role`
    tells the two engines of a dialog apart.
    """

    version: Version = 1
    role: Role | None = None
    n_threads: Annotated[Size, WRITTEN] = 3
    backend: Backend
    model: ModelBlock
    longcontext: LongContext | None = None
    cache_groups: Annotated[tuple[CacheGroup, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _positions_are_given_once(self) -> Self:
        htp = self.backend.qnn_htp
        options = {"pos-id-dim": htp.pos_id_dim, "rope-theta": htp.rope_theta} if htp else {}
        for key, value in options.items():
            if self.model.positional_encoding is not None and value is not None:
                reason = "positional-encoding of the model replaces it: keep one of them"
                raise refuse(reason, "backend", "QnnHtp", key)
        return self

    @model_validator(mode="after")
    def _model_is_of_the_backend(self) -> Self:
        check_model_type(self.backend.type, self.model.type)
        prefixes = [group.prefix for group in self.cache_groups or ()]
        if len(set(prefixes)) != len(prefixes):
            raise refuse("two groups have one prefix", "cache-groups")
        return self

    def files(self) -> Iterator[str]:
        """Yield files and folders that Genie opens for it."""
        yield from self.model.files()
        yield from self.backend.files
        contexts = [self.longcontext, *(group.longcontext for group in self.cache_groups or ())]
        for context in contexts:
            if context is not None and context.keydiff is not None:
                yield context.keydiff.scoring_network


def check_model_type(backend: BackendType, model: str) -> None:
    """Require a library for Genie's own transformer library, and context binaries for QNN."""
    kind = "library" if backend == "QnnGenAiTransformer" else "binary"
    if model != kind:
        raise refuse(f"the backend {backend} runs models of type {kind}", "model", "type")
