"""Writes the reference model as GGUF, llama.cpp's format, by the package `gguf`.

`python -m tools.tiny_llama.gguf_file OUT.gguf` writes it in float32. Keys and tensors are
those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and `convert_hf_to_gguf.py`.
"""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from suites.models import tiny_llama
from tools.tiny_llama.architecture import Architecture
from tools.tiny_llama.numpy_model import Array, load_weights

if TYPE_CHECKING:
    import gguf

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Tensors of a layer, by Hugging Face's names."""


def write_gguf(path: Path, folder: Path | None = None) -> Path:
    """Write a checkpoint of the reference model's architecture in float32.

    Args:
        folder: the checkpoint; by default the reference model.
    """
    import gguf

    folder = folder or tiny_llama.folder()
    model = Architecture.load(folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_hidden_layers)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.num_key_value_heads)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_vocab_size(model.vocab_size)
    _add_tokenizer(writer, folder, model)
    weights = load_weights(folder)
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    heads = {"attn_q": model.num_attention_heads, "attn_k": model.num_key_value_heads}
    for index in range(model.num_hidden_layers):
        for theirs, ours in _LAYER.items():
            tensor = weights[f"model.layers.{index}.{theirs}.weight"]
            if ours in heads:
                tensor = _interleave(tensor, heads[ours])
            writer.add_tensor(f"blk.{index}.{ours}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleave(weight: Array, heads: int) -> Array:
    """Reorder the rows of each head `[head_dim, hidden]` for RoPE over neighbours.

    Hugging Face turns element i with element i + head_dim/2, and llama.cpp 2i with 2i + 1.
    """
    rows, hidden = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, hidden)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, hidden))


def _add_tokenizer(writer: "gguf.GGUFWriter", folder: Path, model: Architecture) -> None:
    """Add the byte-level BPE; its words are split by GPT-2's pattern, as `ByteLevel` does."""
    import gguf

    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL
            for token, _ in vocabulary
        ]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(model.bos_token_id)
    writer.add_eos_token_id(model.eos_token_id)
    writer.add_add_bos_token(tokenizer["post_processor"] is not None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write tiny_llama as GGUF.")
    parser.add_argument("out", type=Path)
    if find_spec("gguf") is None:
        parser.error("it needs the package gguf: pip install gguf")
    write_gguf(parser.parse_args().out)
