"""The sizes of a Llama, read from a Hugging Face `config.json`."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Architecture:
    """A Llama with grouped-query attention and one embedding for input and output."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    bos_token_id: int
    eos_token_id: int

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `folder/config.json`, keeping what this class knows."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by Hugging Face's names, in order of use; a projection is `[out, in]`."""
        hidden, mlp = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        return {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            **{
                f"model.layers.{index}.{name}.weight": shape
                for index in range(self.num_hidden_layers)
                for name, shape in layer.items()
            },
            "model.norm.weight": (hidden,),
        }

    def parameter_count(self) -> int:
        """Count the trained parameters."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())
