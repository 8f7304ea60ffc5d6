"""Inputs and outputs by which Genie recognises a graph, and the meaning of each dimension.

Per layer i: `past_key_{i}_in` [n_kv, 1, head_dim, CL-AR], `past_value_{i}_in` [n_kv, 1, CL-AR,
head_dim], `past_key_{i}_out` [n_kv, 1, head_dim, AR], `past_value_{i}_out` [n_kv, 1, AR, head_dim].
All other values between parts are hidden states [1, AR, hidden].
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from buildlib.checkpoint.config import DecoderConfig
from buildlib.errors import ModelFileError
from buildlib.graph.files import load_proto
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import declared_shape, static_shape

INPUT_IDS = "input_ids"
INPUTS_EMBEDS = "inputs_embeds"
ATTENTION_MASK = "attention_mask"
COS = "position_ids_cos"
SIN = "position_ids_sin"
LOCAL_PREFIX = "local_"
"""By which Genie tells a second set of rotations from the first."""
LOCAL_COS = LOCAL_PREFIX + COS
LOCAL_SIN = LOCAL_PREFIX + SIN
ROTATIONS = frozenset({COS, SIN, LOCAL_COS, LOCAL_SIN})
WINDOW_MASK = "window_mask"
"""Value inside of graphs: the mask of layers that look back a sliding window only."""
LOGITS = "logits"
HIDDEN_STATES = "hidden_states"
"""Input of a draft head: the target's hidden states."""
LAST_HIDDEN_STATES = "last_hidden_states"
"""Output of a draft head and of its target: hidden states after the final norm."""
LORA = "lora"
"""Part of the name of every input that takes an adapter; Genie knows them by it."""

MASKED = -10000.0
"""Additive mask of a position that must not be seen; 0 of one that may. As uint16: 0 and 65535.

Scores of a Qwen 2.5 lie up to 1,800 apart in a layer: with -100, hidden tokens showed through.
"""

_KV = re.compile(r"past_(key|value)_(\d+)_(in|out)")


def past_key(layer: int, end: str) -> str:
    """Return the name of a key tensor; `end` is `in` or `out`."""
    return f"past_key_{layer}_{end}"


def past_value(layer: int, end: str) -> str:
    """Return the name of a value tensor; `end` is `in` or `out`."""
    return f"past_value_{layer}_{end}"


def kv_output(name: str) -> str:
    """Return the output whose values are fed back as key/value input `name`."""
    return f"{name.removesuffix('_in')}_out"


def token_axis(name: str) -> int:
    """Return the axis of a key/value tensor that counts tokens."""
    return 3 if name.startswith("past_key") else 2


def is_kv(name: str) -> bool:
    """Return whether `name` is a key/value input or output."""
    return _KV.fullmatch(name) is not None


def kv_layer(name: str) -> int | None:
    """Return the layer of a key/value tensor, or None for any other name."""
    match = _KV.fullmatch(name)
    return int(match[2]) if match else None


def input_shapes(config: DecoderConfig, shape: GraphShape) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a whole model's inputs, in order."""
    ar, cl, past = shape.ar, shape.cl, shape.past
    kv, dim = config.num_key_value_heads, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        INPUT_IDS: (1, ar),
        ATTENTION_MASK: (1, 1, ar, cl),
        COS: (1, 1, ar, config.rotary_dim // 2),
        SIN: (1, 1, ar, config.rotary_dim // 2),
    }
    layers = range(config.num_hidden_layers)
    if any(map(config.has_local_rope, layers)):
        shapes[LOCAL_COS] = shapes[LOCAL_SIN] = shapes[COS]
    for layer in layers:
        shapes[past_key(layer, "in")] = (kv, 1, dim, past)
        shapes[past_value(layer, "in")] = (kv, 1, past, dim)
    return shapes


def shape_of(inputs: Mapping[str, Sequence[int]]) -> GraphShape | None:
    """Return the (AR, CL) of a model or part, read from its mask, or None without a mask."""
    mask = inputs.get(ATTENTION_MASK)
    return GraphShape(mask[2], mask[3]) if mask is not None and len(mask) == 4 else None


def model_shape(model: ir.Model) -> GraphShape | None:
    """Return the (AR, CL) of a model, or None."""
    inputs = {str(value.name): static_shape(value) for value in model.graph.inputs}
    return shape_of({name: dims for name, dims in inputs.items() if dims is not None})


def require_shape(path: Path) -> GraphShape:
    """Return the (AR, CL) of the model in a file."""
    inputs = {value.name: declared_shape(value) for value in load_proto(path).graph.input}
    shape = shape_of({name: dims for name, dims in inputs.items() if dims is not None})
    if shape is None:
        raise ModelFileError(path, "it has no attention mask to tell AR and CL from")
    return shape


def dims_at(name: str, dims: Sequence[int], shape: GraphShape) -> tuple[int, ...]:
    """Return the dimensions of input or output `name`, now `dims`, at another (AR, CL)."""
    kv = _KV.fullmatch(name)
    if kv:
        length = shape.past if kv[3] == "in" else shape.ar
        axis = token_axis(name)
        return (*dims[:axis], length, *dims[axis + 1 :])
    if name == ATTENTION_MASK:
        return (*dims[:2], shape.ar, shape.cl)
    if name in ROTATIONS:
        return (*dims[:2], shape.ar, *dims[3:])
    if LORA in name:
        return tuple(dims)
    return (dims[0], shape.ar, *dims[2:])
