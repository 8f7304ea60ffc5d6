"""Tensors that a model has in mllm's files: names, types and shapes.

As mllm's C++ models of Qwen 3, Qwen 2 and Llama look them up (`examples/*_qnn_aot/modeling_*.hpp`
in https://github.com/UbiquitousLearning/mllm, MIT licence). Weights of 4 bits take a byte each,
`[1, 1, in, out]` as of a convolution, with a step `scale2[out] * scale1[out, block]`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.errors import InputFileError
from plugins.mllm.activations import SUFFIX, activations
from plugins.mllm.config import AotConfig, HeadBits, ModelConfig
from plugins.mllm.tensors import Tensor

Kind = tuple[str, tuple[int, ...]]
"""Type and shape of a tensor."""
EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
ROTATIONS = {"cos": "model.mllm_max_cos_embedding", "sin": "model.mllm_max_sin_embedding"}


@dataclass(frozen=True)
class Linear:
    """A linear layer: its name, and its numbers of outputs and inputs."""

    name: str
    outputs: int
    inputs: int
    bias: bool = False


def head_bits(aot: AotConfig) -> HeadBits:
    """Return the bits of the output projection."""
    bits: dict[str, HeadBits] = {"w4a16": 4, "w8a16": 8, "w16a16": 16}
    return bits[aot.quant_recipe.builtin_llm_pass.lm_head["fallback"].precision]


def linears(model: ModelConfig) -> Iterator[Linear]:
    """Yield the linear layers of all decoder layers, and the output projection."""
    hidden, mlp = model.hidden_size, model.intermediate_size
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    for layer in range(model.num_hidden_layers):
        module = f"model.layers.{layer}"
        yield Linear(f"{module}.self_attn.q_proj", queries, hidden, model.attention_bias)
        yield Linear(f"{module}.self_attn.k_proj", keys, hidden, model.attention_bias)
        yield Linear(f"{module}.self_attn.v_proj", keys, hidden, model.attention_bias)
        yield Linear(f"{module}.self_attn.o_proj", hidden, queries)
        yield Linear(f"{module}.mlp.gate_proj", mlp, hidden)
        yield Linear(f"{module}.mlp.up_proj", mlp, hidden)
        yield Linear(f"{module}.mlp.down_proj", hidden, mlp)
    yield Linear(HEAD, model.vocab_size, hidden)


def norms(model: ModelConfig, aot: AotConfig) -> Iterator[tuple[str, int]]:
    """Yield name and width of each norm."""
    for layer in range(model.num_hidden_layers):
        module = f"model.layers.{layer}"
        yield f"{module}.input_layernorm", model.hidden_size
        if aot.quant_recipe.builtin_llm_pass.model == "qwen3":
            yield f"{module}.self_attn.q_norm", model.head_dim
            yield f"{module}.self_attn.k_norm", model.head_dim
        yield f"{module}.post_attention_layernorm", model.hidden_size
    yield NORM, model.hidden_size


def size_name(model: ModelConfig) -> str:
    """Return the size of a model as names of models have it, such as `1.7B` or `15M`."""
    size = model.vocab_size * model.hidden_size
    size += sum(
        one.outputs * one.inputs
        for one in linears(model)
        if one.name != HEAD or not model.tie_word_embeddings
    )
    return f"{size / 1e6:.0f}M" if size < 1e8 else f"{size / 1e9:.1f}B".replace(".0B", "B")


def expected_tensors(model: ModelConfig, aot: AotConfig) -> dict[str, Kind]:
    """Return type and shape of every tensor of a model, by name."""
    tensors: dict[str, Kind] = {}
    for one in linears(model):
        tensors |= _linear(one, model.linear_block_size, head_bits(aot))
    tables = {name: (width,) for name, width in norms(model, aot)}
    for name, shape in {**tables, EMBEDDING: (model.vocab_size, model.hidden_size)}.items():
        tensors[f"{name}.weight"] = ("uint16", shape)
        tensors |= _grid(name)
    for name in ROTATIONS.values():
        tensors[name] = ("uint16", (1, model.max_cache_length, model.head_dim))
    for activation in activations(model, aot.quant_recipe.builtin_llm_pass.model):
        tensors |= _grid(activation.name + SUFFIX)
    return tensors


def _grid(name: str) -> dict[str, Kind]:
    return {f"{name}.scale": ("float32", (1,)), f"{name}.zero_point": ("int32", (1,))}


def _linear(one: Linear, block_size: int, bits: HeadBits) -> dict[str, Kind]:
    name, shape = one.name, (1, 1, one.inputs, one.outputs)
    bias: dict[str, Kind] = {f"{name}.bias": ("float32", (one.outputs,))} if one.bias else {}
    if name != HEAD or bits == 4:
        return bias | {
            f"{name}.weight": ("int8", shape),
            f"{name}.scale1": ("uint8", (one.outputs * one.inputs // block_size,)),
            f"{name}.scale2": ("float32", (one.outputs,)),
        }
    channels = (1, 1, 1, one.outputs)
    return {
        f"{name}.weight": (f"int{bits}", shape),
        f"{name}.scale": ("float32", channels),
        f"{name}.zero_point": ("int32", channels),
    }


def check_contents(
    path: Path, tensors: Mapping[str, Tensor], model: ModelConfig, aot: AotConfig
) -> None:
    """Refuse a file that does not hold the model of two configurations.

    Tensors beyond those are left alone: pymllm also writes those of its observers.

    Args:
        path: of the file, for errors.
        tensors: in it.
    """
    for name, (dtype, shape) in expected_tensors(model, aot).items():
        tensor = tensors.get(name)
        if tensor is None:
            raise InputFileError(str(path), f"tensor {name} is missing")
        if (tensor.dtype, tensor.shape) == (dtype, shape):
            continue
        reason = f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}"
        raise InputFileError(str(path), reason + _explain(tensor, shape, model))


def _explain(tensor: Tensor, shape: tuple[int, ...], model: ModelConfig) -> str:
    """Describe the key of the configuration that a shape contradicts."""
    n_values = math.prod(tensor.shape)
    if tensor.name.endswith(".scale1") and n_values:
        size = model.linear_block_size * shape[0] / n_values
        return f": its blocks are of {size:g}, and linear_block_size is {model.linear_block_size}"
    if tensor.name in ROTATIONS.values() and len(tensor.shape) == len(shape):
        cl = model.max_cache_length
        return f": it was made for a CL of {tensor.shape[1]}, and max_cache_length is {cl}"
    return ""
