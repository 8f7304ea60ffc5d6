"""`config.json` of a GGUF's model, from its keys and the names of its tensors.

What a key means, and what holds where it is missing, is as llama.cpp reads it
(https://github.com/ggml-org/llama.cpp, MIT: `src/models/*.cpp`; `conversion/*.py` writes the keys).
What a GGUF does not keep, nobody can bring back: the sliding window of a Mistral, and the
activation of a Llama that is not SiLU. llama.cpp computes such a model without them, and so do we.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isclose, pi
from typing import Any

import numpy as np

from buildlib.checkpoint.architectures import FAMILIES, SupportedLLMs
from buildlib.checkpoint.rotary import FULL, SLIDING
from buildlib.errors import ModelFileError
from buildlib.gguf import GgufHeader

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_DIVISORS, ROPE_LONG, ROPE_SHORT = (
    "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight",
)  # fmt: skip
_WRITTEN_AS = "4.57.0"
"""Release of transformers whose keys are written; later ones read them too."""
_LLAMA3_LENGTHS = (8192, 16, 32, 64, 128, 1024, 2048, 4096, 16384, 32768, 65536, 131072)
"""Original lengths that the divisors of a Llama 3 are looked for with, the published one first."""

Keys = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, as a family.

    Attributes:
        keys: of the family's `config.json`, beyond those of all.
        permuted: whether rows of queries and keys are stored for rotations of neighbours.
        gain_shift: what was added to the gains of norms.
    """

    family: SupportedLLMs
    keys: Callable[["Metadata"], Keys] = lambda _: {}
    permuted: bool = False
    gain_shift: float = 0.0


class Metadata:
    """Keys of a GGUF below the name of its architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        architecture = header.architecture
        if architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            what = (
                f"a model of the architecture {architecture[:40]!r}" if architecture else "no model"
            )
            raise self.refuse(f"it holds {what}; known are {known}")
        self.architecture = ARCHITECTURES[architecture]
        if int(header.keys.get("split.count", 1)) > 1:
            raise self.refuse("it is a part of a model: llama-gguf-split --merge makes one file")
        if self.get("expert_count", int, 0):
            raise self.refuse("a mixture of experts cannot be built (expert_count)")

    def refuse(self, reason: str) -> ModelFileError:
        """Return the error of this file."""
        return ModelFileError(self.header.path, reason)

    def get(self, name: str, kind: type, default: Any = None) -> Any:  # noqa: ANN401
        """Return a key's value, or the default if it is missing.

        A float32 becomes the shortest decimal that means it: 1e-6, not 9.999999974752427e-07.
        """
        key = f"{self.header.architecture}.{name}"
        if key in self.header.arrays:
            values = self.header.array(key)
            if len(set(values)) != 1:
                raise self.refuse(f"its layers differ in {key}, which no known family has")
            value = values[0]
        else:
            value = self.header.keys.get(key)
        if value is None:
            return default
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, int | float):
            raise self.refuse(f"its {key} is {str(value)[:40]!r}")
        return float(str(np.float32(value))) if kind is float else kind(value)

    def require(self, name: str) -> int:
        """Return a size that every file has."""
        value = self.get(name, int)
        if value is None:
            raise self.refuse(f"it has no {self.header.architecture}.{name}")
        return int(value)

    def has(self, tensor: str) -> bool:
        """Return whether the first layer has a tensor."""
        return f"blk.0.{tensor}" in self.header.tensors

    def vector(self, tensor: str) -> list[float] | None:
        """Return the values of a small tensor; None if there is none."""
        if tensor not in self.header.tensors:
            return None
        rows = self.header.rows(tensor)
        if len(rows) > 1 << 16:
            raise self.refuse(f"its {tensor} has {len(rows)} values")
        return [float(str(value)) for value in rows[:].astype(np.float32).ravel()]

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        size = self.require("embedding_length") // max(1, self.require("attention.head_count"))
        return int(self.get("attention.key_length", int, size))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.require("block_count")

    @property
    def rotary_share(self) -> float:
        """Share of a head that rotary positions turn."""
        turned = self.get("rope.dimension_count", int, self.head_dim)
        return float(turned / max(1, self.head_dim))

    @property
    def biases(self) -> Keys:
        """Biases of attention and MLP."""
        mlp = self.has("ffn_down.bias")
        return {
            "attention_bias": self.has("attn_q.bias") or self.has("attn_qkv.bias"),
            "mlp_bias": mlp,
        }

    def layer_kinds(self, step: int) -> list[str]:
        """Return the kind of attention of each layer.

        Args:
            step: every layer of this number sees all, where no key says otherwise.
        """
        key = f"{self.header.architecture}.attention.sliding_window_pattern"
        flags = self.header.array(key)
        if not flags:
            step = int(self.header.keys.get(key, step))
            flags = [step == 0 or layer % step < step - 1 for layer in range(self.layers)]
        return [SLIDING if flag else FULL for flag in flags]


def read_config(model: Metadata) -> Keys:
    """Return the content of `config.json`, but for the ids of tokens."""
    family = model.architecture.family
    embedding = model.header.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise model.refuse(f"it has no matrix {EMBEDDING}")
    if not 0 < model.layers <= 1024:
        raise model.refuse(f"it says that it has {model.layers} layers")
    heads = model.require("attention.head_count")
    return {
        "model_type": family.value,
        "architectures": [FAMILIES[family].classes[0]],
        "transformers_version": _WRITTEN_AS,
        "hidden_size": model.require("embedding_length"),
        "intermediate_size": model.require("feed_forward_length"),
        "num_hidden_layers": model.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": model.get("attention.head_count_kv", int, heads),
        "head_dim": model.head_dim,
        "vocab_size": embedding.shape[1],
        "max_position_embeddings": model.require("context_length"),
        "rms_norm_eps": model.get("attention.layer_norm_rms_epsilon", float, 1e-6),
        "rope_theta": model.get("rope.freq_base", float, 10000.0),
        "rope_scaling": _scaling(model),
        "tie_word_embeddings": HEAD not in model.header.tensors,
        "hidden_act": "silu",
        **model.architecture.keys(model),
    }


def _scaling(model: Metadata) -> Keys | None:
    divisors = model.vector(ROPE_DIVISORS)
    if divisors is not None:
        return _of_divisors(model, divisors)
    kind = model.header.keys.get(f"{model.header.architecture}.rope.scaling.type")
    old = model.get("rope.scale_linear", float)
    if kind is None:
        kind = "none" if old is None else "linear"
    factor = model.get("rope.scaling.factor", float, old or 1.0)
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
        case "longrope":
            return None  # the factors are tensors
        case "yarn":
            scaling = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": model.require(
                    "rope.scaling.original_context_length"
                ),
                "beta_fast": model.get("rope.scaling.yarn_beta_fast", float),
                "beta_slow": model.get("rope.scaling.yarn_beta_slow", float),
                "attention_factor": model.get("rope.scaling.yarn_attn_factor", float),
            }
            return {key: value for key, value in scaling.items() if value is not None}
    raise model.refuse(f"its rope.scaling.type is {str(kind)[:40]!r}")


def _of_divisors(model: Metadata, divisors: list[float]) -> Keys:
    """Return the scaling of frequencies that are divided by these numbers.

    Converters write the divisors of a Llama 3 and leave out what they came from. Where the usual
    constants give these numbers, the file says `llama3` again; other ones are kept as they are.
    """
    theta = model.get("rope.freq_base", float, 10000.0)
    count = len(divisors)
    if count != model.head_dim // 2:
        raise model.refuse(f"{ROPE_DIVISORS} has {count} values for heads of {model.head_dim}")
    factor = max(divisors)
    waves = [2 * pi * theta ** (2 * i / model.head_dim) for i in range(count)]
    for original in _LLAMA3_LENGTHS:
        expected = [_llama3_divisor(wave, original, factor) for wave in waves]
        if all(isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    positions = model.require("context_length")
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": positions,
        "short_factor": divisors,
        "long_factor": divisors,
    }


def _llama3_divisor(wave: float, original: int, factor: float) -> float:
    """Return the divisor of a frequency by its wavelength in tokens.

    Source: https://arxiv.org/abs/2407.21783 and the `llama3` scaling of transformers, with low and
    high frequencies set apart at 1 and 4 periods of the original length.
    """
    if wave < original / 4.0:
        return 1.0
    if wave > original:
        return factor
    smooth = (original / wave - 1.0) / 3.0
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _gemma(model: Metadata) -> Keys:
    activation = "gelu_pytorch_tanh"
    return {"hidden_act": activation, "hidden_activation": activation, **_attention_bias(model)}


def _attention_bias(model: Metadata) -> Keys:
    return {"attention_bias": model.biases["attention_bias"]}


def _query_scale(model: Metadata, layers_of_27b: int) -> int:
    """Return whose root divides the scores of Gemma: by its sizes, as no key tells it."""
    if model.layers != layers_of_27b:
        return model.head_dim
    return model.require("embedding_length") // model.require("attention.head_count")


def _gemma2(model: Metadata) -> Keys:
    return {
        **_gemma(model),
        "query_pre_attn_scalar": _query_scale(model, 46),
        "attn_logit_softcapping": model.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": model.get("final_logit_softcapping", float, 30.0),
        "sliding_window": model.get("attention.sliding_window", int, 4096),
        "layer_types": model.layer_kinds(2),
    }


def _gemma3(model: Metadata) -> Keys:
    window = model.get("attention.sliding_window", int, 0)
    return {
        **_gemma(model),
        "query_pre_attn_scalar": _query_scale(model, 62),
        "final_logit_softcapping": model.get("final_logit_softcapping", float),
        "rope_local_base_freq": model.get("rope.freq_base_swa", float, 10000.0),
        "sliding_window": window or 4096,
        "layer_types": model.layer_kinds(6) if window else [FULL] * model.layers,
    }


def _phi3(model: Metadata) -> Keys:
    keys: Keys = {
        "partial_rotary_factor": model.rotary_share,
        "sliding_window": model.get("attention.sliding_window", int, 0) or None,
    }
    positions = model.require("context_length")
    long, short = model.vector(ROPE_LONG), model.vector(ROPE_SHORT)
    original = model.get("rope.scaling.original_context_length", int, positions)
    keys["original_max_position_embeddings"] = original
    if long is not None and short is not None:
        keys["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        keys["rope_scaling"]["factor"] = positions / max(1, original)
    return keys


def _qwen(model: Metadata) -> Keys:
    return {"use_sliding_window": False, "max_window_layers": model.layers}


def _granite(model: Metadata) -> Keys:
    keys = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    values = {key: model.get(name, float) for key, name in keys.items()}
    for key, value in values.items():
        if value is None:
            raise model.refuse(f"it has no granite.{keys[key]}")
    return model.biases | values


def _olmo2(model: Metadata) -> Keys:
    if model.get("attention.sliding_window", int, 0):
        raise model.refuse("OLMo 3 cannot be built: its layers have sliding windows")
    return _attention_bias(model)


def _stablelm(model: Metadata) -> Keys:
    return {
        "layer_norm_eps": model.get("attention.layer_norm_epsilon", float, 1e-5),
        "use_qkv_bias": model.has("attn_q.bias"),
        "use_parallel_residual": model.get("use_parallel_residual", bool, True),
        "qk_layernorm": model.has("attn_q_norm.weight"),
        "partial_rotary_factor": model.rotary_share,
    }


def _smollm3(model: Metadata) -> Keys:
    rotary = [int((layer + 1) % 4 != 0) for layer in range(model.layers)]
    return {**model.biases, "no_rope_layers": rotary, "use_sliding_window": False}


def _glm(model: Metadata) -> Keys:
    if f"{model.header.architecture}.rope.dimension_sections" in model.header.arrays:
        raise model.refuse("a GLM that sees cannot be built (rope.dimension_sections)")
    return {**_attention_bias(model), "partial_rotary_factor": model.rotary_share}


def _seed_oss(model: Metadata) -> Keys:
    return {**model.biases, "attention_out_bias": model.has("attn_output.bias")}


def _baichuan(model: Metadata) -> Keys:
    if model.header.tensors[EMBEDDING].shape[1] == 64000:
        raise model.refuse("the first Baichuan cannot be built, only Baichuan 2")
    return {}


ARCHITECTURES: Mapping[str, Architecture] = {
    "baichuan": Architecture(SupportedLLMs.BAICHUAN, _baichuan, permuted=True),
    "chatglm": Architecture(SupportedLLMs.GLM, _glm),
    "gemma": Architecture(SupportedLLMs.GEMMA, _gemma, gain_shift=1.0),
    "gemma2": Architecture(SupportedLLMs.GEMMA2, _gemma2, gain_shift=1.0),
    "gemma3": Architecture(SupportedLLMs.GEMMA3, _gemma3, gain_shift=1.0),
    "glm4": Architecture(SupportedLLMs.GLM4, _glm),
    "granite": Architecture(SupportedLLMs.GRANITE, _granite, permuted=True),
    "llama": Architecture(SupportedLLMs.LLAMA, lambda model: model.biases, permuted=True),
    "olmo2": Architecture(SupportedLLMs.OLMO2, _olmo2),
    "phi3": Architecture(SupportedLLMs.PHI3, _phi3),
    "qwen2": Architecture(SupportedLLMs.QWEN2, _qwen),
    "qwen3": Architecture(SupportedLLMs.QWEN3, lambda model: _qwen(model) | _attention_bias(model)),
    "seed_oss": Architecture(SupportedLLMs.SEED_OSS, _seed_oss),
    "smollm3": Architecture(SupportedLLMs.SMOLLM3, _smollm3, permuted=True),
    "stablelm": Architecture(SupportedLLMs.STABLELM, _stablelm),
}
"""Those of our families, by llama.cpp's names; Mistral is its `llama`."""
