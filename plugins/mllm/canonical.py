"""The way back from a `.mllm` file: a checkpoint of float weights, and encodings of its graph.

Quantized again by these encodings, the weights become the integers of the file, and activations lie
on its grids.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.layout import CONFIG_FILE
from buildlib.encodings.model import Encoding, Encodings
from buildlib.files import atomic_write_bytes
from buildlib.quantize.bitwidths import INPUT_STEP
from plugins.mllm.activations import SUFFIX, activations
from plugins.mllm.config import AotConfig, ModelConfig
from plugins.mllm.contents import EMBEDDING, HEAD, Linear, head_bits, linears, norms
from plugins.mllm.tensors import Tensor, write_safetensors

_BITS = 4
_CHUNK_VALUES = 1 << 22


def write_checkpoint(
    tensors: Mapping[str, Tensor], model: ModelConfig, aot: AotConfig, folder: Path
) -> None:
    """Write configuration and float weights in Hugging Face layout.

    Weights of 4 bits are bfloat16, whose rounding is far below half of their step. The output
    projection has weights of its own, tied or not, as it has in the file.

    Args:
        tensors: those that `check_contents` has passed.
        model: configuration of the model.
        aot: how it was quantized.
        folder: gets `config.json` and `model.safetensors`.
    """
    family = aot.quant_recipe.builtin_llm_pass.model
    config = model.model_dump(mode="json", exclude_none=True)
    config |= {"model_type": family, "tie_word_embeddings": False}
    write_safetensors(folder / "model.safetensors", _float_tensors(tensors, model, aot))
    atomic_write_bytes(folder / CONFIG_FILE, json.dumps(config, indent=1).encode())


def restore_encodings(
    tensors: Mapping[str, Tensor], model: ModelConfig, aot: AotConfig
) -> Encodings:
    """Return the encodings of all that the file has a grid for.

    Blocks that PyPI's compiler gets wrong become a scale for each channel and 8 bits: a weight of 4
    bits times the factor of its block, which is 16 at most, is such an integer exactly.
    """
    weights = [_weight_encoding(tensors, one, model, aot) for one in linears(model)]
    tables = [_grid(tensors, name, f"{name}.weight") for name in _tables(model, aot)]
    return Encodings(
        activation_encodings=tuple(_activation_encodings(tensors, model, aot)),
        param_encodings=(*weights, *tables),
    )


def _activation_encodings(
    tensors: Mapping[str, Tensor], model: ModelConfig, aot: AotConfig
) -> Iterator[Encoding]:
    family = aot.quant_recipe.builtin_llm_pass.model
    for one in activations(model, family):
        for value in one.values if one.own else ():
            grid, bits = one.name + SUFFIX, 8 if one.cache else 16
            yield _grid(tensors, grid, value, factor=one.factor, bits=bits)
    heads = "q_norm_output_qdq" if family == "qwen3" else "q_proj_output_qdq"
    for layer in range(model.num_hidden_layers):
        module, ours = f"model.layers.{layer}.self_attn", f"layer_{layer}"
        # Our graph scales queries where mllm's scales scores, and masks by a sum that saturates.
        scale = model.head_dim**-0.5
        yield _grid(tensors, f"{module}.{heads}{SUFFIX}", f"{ours}_q_scaled", factor=scale)
        yield _grid(tensors, f"{module}.where_attn_qdq{SUFFIX}", f"{ours}_masked_scores")


def _grid(
    tensors: Mapping[str, Tensor], grid: str, name: str, *, factor: float = 1.0, bits: int = 16
) -> Encoding:
    return Encoding(
        name=name,
        dtype="INT",
        enc_type="PER_TENSOR",
        bw=bits,
        is_sym=bits == 8,
        scale=(_number(tensors, f"{grid}.scale") * factor,),
        offset=(-int(_number(tensors, f"{grid}.zero_point")),),
    )


def _weight_encoding(
    tensors: Mapping[str, Tensor], one: Linear, model: ModelConfig, aot: AotConfig
) -> Encoding:
    in_blocks = _is_in_blocks(one, aot)
    scales = tensors[f"{one.name}.{'scale2' if in_blocks else 'scale'}"].load().reshape(-1)
    bits = 8 if in_blocks else head_bits(aot)
    blocks: dict[str, Any] = {}
    if in_blocks and one.inputs % INPUT_STEP == 0:
        blocks = {
            "compressed_bw": _BITS,
            "block_size": model.linear_block_size,
            "per_block_int_scale": tensors[f"{one.name}.scale1"].load().tobytes(),
            "block_axis": 1,
        }
    return Encoding(
        name=f"{one.name}.weight",
        dtype="INT",
        enc_type="LPBQ" if blocks else "PER_CHANNEL",
        bw=bits,
        is_sym=True,
        scale=tuple(scales.astype(float).tolist()),
        offset=(-(1 << (bits - 1)),) * len(scales),
        axis=0,
        **blocks,
    )


def _float_tensors(
    tensors: Mapping[str, Tensor], model: ModelConfig, aot: AotConfig
) -> Iterator[Tensor]:
    for one in linears(model):
        dtype = "bfloat16" if _is_in_blocks(one, aot) else "float32"
        load = partial(_float_weight, tensors, one, dtype)
        yield Tensor.computed(f"{one.name}.weight", dtype, (one.outputs, one.inputs), load)
        if one.bias:
            yield tensors[f"{one.name}.bias"]
    for name in _tables(model, aot):
        shape, load = tensors[f"{name}.weight"].shape, partial(_float_table, tensors, name)
        yield Tensor.computed(f"{name}.weight", "float32", shape, load)


def _float_weight(tensors: Mapping[str, Tensor], one: Linear, dtype: str) -> npt.NDArray[Any]:
    """Return weights [out, in]; bfloat16 as its bytes."""
    stored = tensors[f"{one.name}.weight"].load().reshape(one.inputs, one.outputs).T
    in_blocks = dtype == "bfloat16"
    scales = tensors[f"{one.name}.{'scale2' if in_blocks else 'scale'}"].load().reshape(-1, 1)
    factors = np.ones_like(scales)
    if in_blocks:
        factors = tensors[f"{one.name}.scale1"].load().reshape(one.outputs, -1)
    result = np.empty(stored.shape, np.uint16 if in_blocks else np.float32)
    rows = max(1, _CHUNK_VALUES // one.inputs)
    for start in range(0, one.outputs, rows):
        part = slice(start, start + rows)
        integers = stored[part]
        if in_blocks:  # the low half of a byte, two's complement
            half = 1 << (_BITS - 1)
            integers = ((integers & 0x0F) ^ half) - half
        steps = (factors[part] * scales[part])[..., None]
        floats = (integers.reshape(*steps.shape[:2], -1) * steps).reshape(integers.shape)
        if in_blocks:
            result[part] = floats.astype(ml_dtypes.bfloat16).view(np.uint16)
        else:
            result[part] = floats
    return result


def _float_table(tensors: Mapping[str, Tensor], name: str) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = tensors[f"{name}.weight"].load().astype(np.float32)
    values -= np.float32(_number(tensors, f"{name}.zero_point"))
    values *= np.float32(_number(tensors, f"{name}.scale"))
    return values


def _tables(model: ModelConfig, aot: AotConfig) -> list[str]:
    return [EMBEDDING, *(name for name, _ in norms(model, aot))]


def _is_in_blocks(one: Linear, aot: AotConfig) -> bool:
    return one.name != HEAD or head_bits(aot) == _BITS


def _number(tensors: Mapping[str, Tensor], name: str) -> float:
    return float(tensors[name].load().reshape(-1)[0])
