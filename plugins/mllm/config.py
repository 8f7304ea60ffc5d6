"""The two configurations of mllm's ahead-of-time flow: of the model, and of its compilation.

Keys as mllm's own readers have them (https://github.com/UbiquitousLearning/mllm, MIT licence:
`mllm/models/qwen3/configuration_qwen3.hpp`, `examples/llama_qnn_aot/configuration_llama3.hpp`,
`mllm/backends/qnn/aot/QnnTargetMachineParser.cpp` and the passes beside it). Those check little and
end in an assertion, or in a model that answers garbage; here all of it is checked first.

The context length is `max_cache_length` of the model's file, and the block size that of its linear
layers: nothing else here says either, and `check_pair` refuses files that do.
"""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from buildlib.checkpoint.config import CheckpointConfig
from buildlib.checkpoint.layout import MAX_CONFIG_BYTES
from buildlib.errors import InputFileError, InvalidOptionError
from buildlib.files import atomic_write_bytes, check_file
from buildlib.targets import Soc, catalog
from buildlib.validation import NoEffect, first_fault

Family = Literal["qwen3", "qwen2", "llama"]
BlockSize = Literal[16, 32, 64]
PdSession = Literal["HtpSignedPd", "HtpUnsignedPd"]
HeadBits = Literal[4, 8, 16]
_Chipset = Literal[
    "SA8255", "SA8295", "SM8350", "SM8450", "SM8475", "SM8550", "SM8650", "SM8750", "SM8845",
    "SM8850", "SSG2115P", "SSG2125P", "SXR1230P", "SXR2230P", "SXR2330P", "QCS9100", "SAR2230P",
    "SW6100",
]  # fmt: skip
FAMILIES: Final[tuple[Family, ...]] = get_args(Family)
RUNNER_CL: Final = 1024
"""CL that mllm compiles into its own compilers and runners."""
_COMPILED_BLOCKS: Mapping[str, int] = {"qwen3": 16, "qwen2": 32, "llama": 32}
"""Block sizes that it compiles into its models."""
_IMPLEMENTATION = re.compile(r"QNN_LPBQ_w4a16o16_G(\d+)")
_LIKELY, _ALL_BUT_EQUAL = 0.8, 0.9
_Size = Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
_TokenId = Annotated[int, Field(ge=0, strict=True)]


class ModelConfig(BaseModel):
    """`config_X.json`: the model.

    Other keys of a checkpoint's `config.json` may stand in it, which nothing reads; one that is
    nearly a key that is missing, or all but one that is there, is taken for a mistake.

    Attributes:
        max_cache_length: context length (CL) in tokens.
        linear_impl_type: `QNN_LPBQ_w4a16o16_G32` for blocks of 32.
        linear_block_size: inputs that share a scale; that of `linear_impl_type` if it is not there.
        eos_token_id: one id; mllm's reader takes no list.
        rope_scaling: as in the checkpoint's file. mllm reads the rotations that come of it from the
            parameters; builds of our own need it.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    model_type: Family | None = None
    hidden_size: _Size
    head_dim: _Size
    intermediate_size: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=1024, strict=True)]
    max_position_embeddings: _Size
    vocab_size: _Size
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    rope_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool
    tie_word_embeddings: Annotated[
        bool,
        NoEffect("a `.mllm` file holds the output projection beside the embedding", "ort-qnn"),
    ]
    bos_token_id: _TokenId
    eos_token_id: _TokenId
    max_cache_length: _Size
    linear_impl_type: str
    linear_block_size: BlockSize

    @model_validator(mode="before")
    @classmethod
    def _misspelt(cls, data: Any) -> Any:  # noqa: ANN401  (raw JSON)
        if not isinstance(data, dict):
            return data
        fields = set(cls.model_fields)
        absent = fields - data.keys()
        for key in data.keys() - fields:
            near = get_close_matches(str(key), absent, 1, _LIKELY)
            near = near or get_close_matches(str(key), fields, 1, _ALL_BUT_EQUAL)
            if near:
                msg = f"unknown key {str(key)[:80]!r}: did you mean {near[0]}?"
                raise ValueError(msg)
        return data if "linear_block_size" in data else cls._with_block_size(data)

    @classmethod
    def _with_block_size(cls, data: dict[str, Any]) -> dict[str, Any]:
        kind = _IMPLEMENTATION.fullmatch(str(data.get("linear_impl_type")))
        if kind is None and "linear_impl_type" in data:
            msg = (
                "linear_impl_type is none of QNN's, such as QNN_LPBQ_w4a16o16_G32: it is the file "
                "of another backend"
            )
            raise ValueError(msg)
        return data if kind is None else {**data, "linear_block_size": int(kind[1])}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        kind = _IMPLEMENTATION.fullmatch(self.linear_impl_type)
        faults = {
            f"linear_impl_type is {self.linear_impl_type[:60]!r}, and QNN's for linear_block_size "
            f"{self.linear_block_size} is QNN_LPBQ_w4a16o16_G{self.linear_block_size}": kind is None
            or int(kind[1]) != self.linear_block_size,
            "num_attention_heads is not a multiple of num_key_value_heads": self.num_attention_heads
            % self.num_key_value_heads,
            f"max_cache_length is {self.max_cache_length}, and the model has "
            f"{self.max_position_embeddings} positions (max_position_embeddings)": (
                self.max_cache_length > self.max_position_embeddings
            ),
        }
        faults |= {
            f"linear_block_size {self.linear_block_size} does not divide {key} {inputs}": inputs
            % self.linear_block_size
            for key, inputs in (
                ("hidden_size", self.hidden_size),
                ("intermediate_size", self.intermediate_size),
                ("the inputs of o_proj,", self.num_attention_heads * self.head_dim),
            )
        }
        for fault, present in faults.items():
            if present:
                raise ValueError(fault)
        return self

    @property
    def family(self) -> Family | None:
        """Family of the model: its `model_type`, or that of its `architectures`."""
        classes = str((self.model_extra or {}).get("architectures", "")).lower()
        return self.model_type or next(
            (name for name in FAMILIES if f"'{name}for" in classes), None
        )


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetMachine(_Section):
    """The SoC that is compiled for.

    Attributes:
        htp_security_pd_session: `HtpSignedPd` needs a QNN that knows the option for it; others end
            with "Unsupported config option 2".
        htp_vtcm_capability_in_mb: of the SoC; mllm's compiler ignores it and gives graphs 8.
    """

    htp_arch: Literal["V68", "V69", "V73", "V75", "V79", "V81"]
    htp_chipset: _Chipset
    htp_try_best_performance: Literal[
        "HtpDefault", "HtpSustainedHighPerformance", "HtpBurst", "HtpHighPerformance",
        "HtpPowerSaver", "HtpLowPowerSaver", "HtpHighPowerSaver", "HtpLowBalanced", "HtpBalanced",
    ]  # fmt: skip
    htp_security_pd_session: PdSession
    htp_vtcm_capability_in_mb: Annotated[int, Field(ge=1, le=64, strict=True)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        soc = next((soc for soc in catalog() if chipset_of(soc) == self.htp_chipset), None)
        if soc is not None and soc.dsp_arch.upper() != self.htp_arch:
            msg = f"{self.htp_chipset} is {soc.dsp_arch.upper()}, not {self.htp_arch}"
            raise ValueError(msg)
        return self


class WeightRecipe(_Section):
    """Quantization of the weights of some layers."""

    method: Literal["LPBQ", "per-channel"]
    sym: Literal[True]
    precision: Literal["w4a16", "w8a16", "w16a16"]
    block_size: BlockSize | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.method == "LPBQ") != (self.precision == "w4a16"):
            msg = f"{self.method} is not of {self.precision}: LPBQ is w4a16, per-channel is not"
            raise ValueError(msg)
        if (self.method == "LPBQ") != (self.block_size is not None):
            msg = f"{self.method} needs {'a' if self.block_size is None else 'no'} block_size"
            raise ValueError(msg)
        return self


class CacheRecipe(_Section):
    """Quantization of keys or values: uint8 around 128."""

    method: Literal["per-tensor"]
    sym: Literal[True]
    precision: Literal["w8a8"]


class KvCacheRecipe(_Section):
    """Quantization of the cache."""

    key: CacheRecipe
    value: CacheRecipe


class BuiltinLlmPass(_Section):
    """Quantization of each part of a language model.

    Attributes:
        linear: by a regular expression of the names of layers; `fallback` is for all others.
        lm_head: the same of the output projection; mllm's compiler reads `linear` for it, too.
    """

    model: Family
    lm_head: dict[str, WeightRecipe]
    linear: dict[str, WeightRecipe]
    kv_cache: KvCacheRecipe

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for key, recipes in (("linear", self.linear), ("lm_head", self.lm_head)):
            if "fallback" not in recipes:
                msg = f"{key} has no fallback"
                raise ValueError(msg)
            for pattern in recipes:
                try:
                    re.compile(pattern)
                except re.error as error:
                    msg = f"{key} has {pattern[:60]!r}, which is no regular expression: {error}"
                    raise ValueError(msg) from error
        return self


class QuantRecipe(_Section):
    """Quantization of the model."""

    llm_recipe: Literal[True]
    layers: Annotated[int, Field(ge=1, le=1024, strict=True)]
    builtin_llm_pass: BuiltinLlmPass


class AotConfig(_Section):
    """`qnn_aot_cfg_X.json`: the compilation.

    Attributes:
        graph_on_qnn: graphs of mllm's trace that QNN runs.
        op_on_qnn: operations outside of them that QNN runs, too.
        split_graph: contexts that the model is split into; mllm takes 1 alone.
    """

    target_machine: TargetMachine
    graph_on_qnn: Annotated[tuple[str, ...], Field(min_length=1)]
    op_on_qnn: tuple[str, ...]
    split_graph: Literal[1]
    quant_recipe: QuantRecipe


_Model = TypeVar("_Model", bound=BaseModel)


def read_model_config(path: Path) -> ModelConfig:
    """Read and check a `config_X.json`."""
    return _read(path, ModelConfig)


def read_aot_config(path: Path) -> AotConfig:
    """Read and check a `qnn_aot_cfg_X.json`."""
    return _read(path, AotConfig)


def write_config(path: Path, config: ModelConfig | AotConfig) -> None:
    """Write either configuration as mllm's own examples are formatted."""
    data = config.model_dump(mode="json", exclude_none=True)
    atomic_write_bytes(path, f"{json.dumps(data, indent=4)}\n".encode())


def check_pair(model: ModelConfig, aot: AotConfig, path: Path) -> None:
    """Refuse a compilation that is not of this model.

    Args:
        path: of the file of the compilation, for errors.
    """
    recipe = aot.quant_recipe
    pairs: dict[str, tuple[object, object, str]] = {
        "quant_recipe/layers": (recipe.layers, model.num_hidden_layers, "num_hidden_layers"),
        "quant_recipe/builtin_llm_pass/model": (
            recipe.builtin_llm_pass.model,
            model.family or recipe.builtin_llm_pass.model,
            "model_type",
        ),
    }
    parts = {"linear": recipe.builtin_llm_pass.linear, "lm_head": recipe.builtin_llm_pass.lm_head}
    for part, recipes in parts.items():
        for name, weights in recipes.items():
            where = f"quant_recipe/builtin_llm_pass/{part}/{name}/block_size"
            size = weights.block_size or model.linear_block_size
            pairs[where] = (size, model.linear_block_size, "linear_block_size")
    for where, (one, other, key) in pairs.items():
        if one != other:
            reason = f"/{where} is {one}, and the model's configuration has {key} {other}"
            raise InputFileError(str(path), reason)


def fixed_by_mllm(model: ModelConfig, aot: AotConfig) -> tuple[str, ...]:
    """Return the differences of mllm's own compiler or runner from these files.

    It has some values compiled in (as of b9c3070, July 2026), which users meet as garbage.
    """
    recipe = aot.quant_recipe.builtin_llm_pass
    block_size = _COMPILED_BLOCKS[recipe.model]
    head = recipe.lm_head["fallback"]
    remarks = {
        f"CL: mllm's compiler and runner have {RUNNER_CL} compiled in, and max_cache_length is "
        f"{model.max_cache_length}": model.max_cache_length != RUNNER_CL,
        f"block size: mllm's {recipe.model} has {block_size} compiled in, and linear_block_size is "
        f"{model.linear_block_size}": model.linear_block_size != block_size,
        f"head: mllm's compiler reads the recipe of linear layers for it, and lm_head is "
        f"{head.method} {head.precision}": head.method != "LPBQ",
        "head: mllm's compiler has one for tied embeddings alone, and tie_word_embeddings is "
        "false": not model.tie_word_embeddings,
        "biases: mllm's compiler drops those of q, k and v, and attention_bias is true": (
            model.attention_bias
        ),
    }
    return tuple(remark for remark, present in remarks.items() if present)


def make_configs(
    config: CheckpointConfig,
    soc: Soc,
    *,
    cl: int | None = None,
    block_size: int | None = None,
    head_bits: int = 4,
    pd_session: PdSession = "HtpUnsignedPd",
) -> tuple[ModelConfig, AotConfig]:
    """Return both configurations for a checkpoint.

    Args:
        config: of the checkpoint.
        soc: to compile for.
        cl: context length; by default that of mllm's runner, or what the model has.
        block_size: by default the one that mllm has compiled in for the family, or 16 where that
            does not divide the inputs of all layers.
        head_bits: of the output projection.
        pd_session: protection domain on the tensor processor.
    """
    if config.model_type not in FAMILIES:
        raise InvalidOptionError("model", f"mllm compiles no {config.model_type}", FAMILIES)
    if chipset_of(soc) not in get_args(_Chipset):
        raise InvalidOptionError("target", f"mllm knows no {soc.name}", get_args(_Chipset))
    if block_size is None:
        block_size = _COMPILED_BLOCKS[config.model_type]
        inputs = (config.hidden_size, config.intermediate_size)
        block_size = 16 if any(size % block_size for size in inputs) else block_size
    for key, value, choices in (
        ("block_size", block_size, get_args(BlockSize)),
        ("head_bits", head_bits, get_args(HeadBits)),
    ):
        if value not in choices:
            raise InvalidOptionError(key, f"it cannot be {value}", tuple(map(str, choices)))
    keys = {key: getattr(config, key) for key in ModelConfig.model_fields if hasattr(config, key)}
    scaling = config.rope_scaling
    keys |= {
        "rope_scaling": None if scaling is None else scaling.model_dump(exclude_none=True),
        "architectures": [f"{config.model_type.capitalize()}ForCausalLM"],
        "bos_token_id": next(iter((*config.begin, *config.eos_token_ids))),
        "eos_token_id": config.eos_token_ids[-1],  # which ends a turn in Llama 3
        "max_cache_length": cl or min(RUNNER_CL, config.max_position_embeddings),
        "linear_block_size": block_size,
        "linear_impl_type": f"QNN_LPBQ_w4a16o16_G{block_size}",
    }
    lpbq = {"method": "LPBQ", "sym": True, "precision": "w4a16", "block_size": block_size}
    plain = {"method": "per-channel", "sym": True, "precision": f"w{head_bits}a16"}
    cache = {"method": "per-tensor", "sym": True, "precision": "w8a8"}
    aot = {
        "target_machine": {
            "htp_arch": soc.dsp_arch.upper(),
            "htp_chipset": chipset_of(soc),
            "htp_try_best_performance": "HtpBurst",
            "htp_security_pd_session": pd_session,
            "htp_vtcm_capability_in_mb": soc.vtcm_mb,
        },
        "graph_on_qnn": ["model"],
        "op_on_qnn": ["lm_head"],
        "split_graph": 1,
        "quant_recipe": {
            "llm_recipe": True,
            "layers": config.num_hidden_layers,
            "builtin_llm_pass": {
                "model": config.model_type,
                "lm_head": {"fallback": lpbq if head_bits == 4 else plain},
                "linear": {"fallback": lpbq},
                "kv_cache": {"key": cache, "value": cache},
            },
        },
    }
    try:
        return ModelConfig.model_validate(keys), AotConfig.model_validate(aot)
    except ValidationError as error:
        raise InvalidOptionError("config", str(first_fault(error)), ()) from error


def chipset_of(soc: Soc) -> str:
    """Return mllm's name of an SoC, which lacks the P of automotive ones."""
    return soc.name.removesuffix("P") if soc.name.startswith("SA") else soc.name


def _read(path: Path, kind: type[_Model]) -> _Model:
    try:
        check_file(path)
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InputFileError(str(path), f"it is larger than {MAX_CONFIG_BYTES:,} bytes")
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputFileError(str(path), error.strerror or "it cannot be read") from error
    except ValidationError as error:
        raise InputFileError(str(path), str(first_fault(error, kind))) from error
