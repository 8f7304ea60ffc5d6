"""`Checkpoint`: configuration and lazily readable tensors of one model folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from buildlib.checkpoint.config import LlamaConfig, load_checkpoint_config
from buildlib.checkpoint.layout import CONFIG_FILE, TOKENIZER_FILE
from buildlib.checkpoint.tensor_file import TensorRef, read_header
from buildlib.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A model in Hugging Face layout whose files have been checked against its configuration.

    Attributes:
        tensors: by checkpoint name, such as `model.layers.0.mlp.up_proj.weight`. With tied
            embeddings there may be no `lm_head.weight`; `lm_head` says what to use.
    """

    folder: Path
    config: LlamaConfig
    tensors: Mapping[str, TensorRef]

    @classmethod
    def load(cls, folder: Path) -> "Checkpoint":
        """Read the configuration and all tensor headers of `folder`, no tensor data.

        Raises:
            CheckpointError: a file is missing, corrupt, or disagrees with the configuration.
            UnsupportedModelError: the model is sound but not one that can be built.
        """
        if not folder.is_dir():
            raise CheckpointError(folder, "no such folder")
        config = load_checkpoint_config(folder / CONFIG_FILE)
        tensors = _read_tensors(folder)
        for name, shape in expected_tensors(config).items():
            ref = tensors.get(name)
            if ref is None:
                raise CheckpointError(folder, f"tensor {name!r} is missing")
            if ref.shape != shape:
                found = f"tensor {name!r} is {list(ref.shape)}, config.json says {list(shape)}"
                raise CheckpointError(ref.path, found)
        return cls(folder, config, MappingProxyType(tensors))

    @property
    def tokenizer_path(self) -> Path:
        """Path of `tokenizer.json` beside the model, which may be missing."""
        return self.folder / TOKENIZER_FILE

    @property
    def lm_head(self) -> TensorRef:
        """The output projection `[vocab, hidden]`: the embedding itself when tied."""
        tied = self.config.tie_word_embeddings
        return self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the graph reads, with the shape that `config` implies."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (mlp, hidden),
            prefix + "mlp.up_proj.weight": (mlp, hidden),
            prefix + "mlp.down_proj.weight": (hidden, mlp),
        }
        if config.qkv_bias:
            for name, size in (("q", queries), ("k", keys), ("v", keys)):
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        if config.output_bias:
            shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            for name in ("q", "k"):
                shapes[f"{prefix}self_attn.{name}_norm.weight"] = (config.head_dim,)
    return shapes


def _read_tensors(folder: Path) -> dict[str, TensorRef]:
    index = folder / _INDEX
    if (folder / _SINGLE).exists() or not index.exists():
        return read_header(folder / _SINGLE)
    weight_map = _read_index(index)
    files = {name: read_header(folder / name) for name in sorted(set(weight_map.values()))}
    tensors: dict[str, TensorRef] = {}
    for name, file_name in weight_map.items():
        if name not in files[file_name]:
            raise CheckpointError(folder / file_name, f"tensor {name[:80]!r} is missing")
        tensors[name] = files[file_name][name]
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointError(path, "larger than any index")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(path, error.strerror or "cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"not valid JSON ({error})") from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, "holds no weight_map")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            reason = f"names a file outside its folder: {str(file_name)[:80]!r}"
            raise CheckpointError(path, reason)
    return weight_map
