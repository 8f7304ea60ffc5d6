"""Random small language models of Hugging Face's classes, the same for the same seed."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

TOKENS = 12
"""Length of the token sequence that every sample runs."""

_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True)
class Recipe:
    """Model to build: a configuration class of transformers, and its differences from `_COMMON`."""

    config_class: str
    seed: int
    changes: dict[str, Any] = field(default_factory=dict)


_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

RECIPES: dict[str, Recipe] = {
    "llama": Recipe("LlamaConfig", 1),
    "llama-one-layer": Recipe("LlamaConfig", 7, {"num_hidden_layers": 1}),
    "llama3-rope": Recipe("LlamaConfig", 2, {"rope_parameters": _LLAMA3_ROPE, "head_dim": 12}),
    "qwen2": Recipe("Qwen2Config", 3, {"tie_word_embeddings": True}),
    "qwen3": Recipe("Qwen3Config", 4, {"head_dim": 12, "tie_word_embeddings": True}),
    "mistral": Recipe("MistralConfig", 5, {"head_dim": 8, "sliding_window": None}),
    "phi3": Recipe(
        "Phi3Config",
        6,
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
            "sliding_window": None,
        },
    ),
    "llama-yarn": Recipe("LlamaConfig", 8, {"rope_parameters": _YARN_ROPE}),
    "phi3-longrope": Recipe(
        "Phi3Config",
        9,
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [1.2, 3.0, 5.0],
            },
        },
    ),
    "gemma2": Recipe(
        "Gemma2Config",
        10,
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": 6,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
}


def make_model(recipe: Recipe, attention: str) -> transformers.PreTrainedModel:
    """Return a model in float32 and evaluation mode, `attention` being `eager` or `sdpa`.

    Weights are larger than the library's own start values: with those attention is close to
    uniform and the residual stream close to the embedding, so that many mistakes do not show.
    """
    config = getattr(transformers, recipe.config_class)(**(_COMMON | recipe.changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            values = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias"):
                weight.copy_(0.3 * values)
            elif weight.ndim == 1:
                weight.copy_(1.0 + 0.1 * values)
            elif "embed_tokens" in name:
                weight.copy_(0.5 * values)
            else:
                weight.copy_(1.2 * values / weight.shape[1] ** 0.5)
    return model.eval().requires_grad_(requires_grad=False)


def sample_tokens(recipe: Recipe) -> torch.Tensor:
    """Return token ids [1, TOKENS], without the special ones."""
    generator = torch.Generator().manual_seed(recipe.seed + 1000)
    return torch.randint(3, _COMMON["vocab_size"], (1, TOKENS), generator=generator)
