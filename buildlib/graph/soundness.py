"""What must hold of a model before anything is made of it, whoever wrote its files.

`check_model` is for a model as it was loaded, the others for one in canonical form.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from buildlib.checkpoint.config import DecoderConfig
from buildlib.errors import CheckpointError, ModelFileError
from buildlib.graph import interface
from buildlib.graph.files import tensor_array
from buildlib.graph.infer import static_shape

_LONGEST_NAME = 1000
_CHUNK = 1 << 22
_REAL = frozenset({
    ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE,
})  # fmt: skip


def check_model(model: ir.Model, path: Path) -> None:
    """Names that can be printed, each made once; weights that are whole, and numbers.

    Reads every weight once, mapped: some 5 GB/s from the file cache.

    Raises:
        ModelFileError: names the value or tensor.
    """
    for name in _names(model):
        if len(name) > _LONGEST_NAME or not name.isprintable():
            shown = f"{name[:40]!r}..., {len(name)} characters"
            raise ModelFileError(path, f"a name in it cannot be used: {shown}")
    made = [str(value.name) for value in model.graph.inputs]
    made += [str(value.name) for node in model.graph for value in node.outputs if value.name]
    name, count = Counter(made).most_common(1)[0] if made else ("", 1)
    if count > 1:
        raise ModelFileError(path, f"value {name!r} is made {count} times")
    for value in model.graph.initializers.values():
        if value.const_value is None:
            raise ModelFileError(path, f"initializer {value.name!r} has no value")
        fault = _tensor_fault(value.const_value)
        if fault is not None:
            raise ModelFileError(path, f"tensor {str(value.name)!r} {fault}")


def check_ends(model: ir.Model, path: Path) -> None:
    """A canonical model gives logits, and a new key and value for each cache that it takes.

    Raises:
        ModelFileError: names what is missing.
    """
    ends = {
        "in": ("input", {str(value.name) for value in model.graph.inputs}),
        "out": ("output", {str(value.name) for value in model.graph.outputs}),
    }
    n_layers = _n_layers(name for _, names in ends.values() for name in names) or 1
    for end, (word, names) in ends.items():
        wanted = [interface.LOGITS] if end == "out" else []
        for layer in range(n_layers):
            wanted += [interface.past_key(layer, end), interface.past_value(layer, end)]
        missing = [name for name in wanted if name not in names]
        if missing:
            raise ModelFileError(path, f"{word} {missing[0]} is missing")


def check_sizes(model: ir.Model, config: DecoderConfig, path: Path) -> None:
    """That `config.json`, by which Genie is configured, is of this canonical model.

    Raises:
        CheckpointError: names the key, what it says, and what the model has.
    """
    values = (*model.graph.inputs, *model.graph.outputs)
    shapes = {str(value.name): static_shape(value) for value in values}
    said: dict[str, tuple[int, int | None]] = {
        "num_hidden_layers": (config.num_hidden_layers, _n_layers(shapes)),
        "num_key_value_heads": (
            config.num_key_value_heads,
            _dim(shapes, interface.past_key(0, "in"), 0),
        ),
        "head_dim": (config.head_dim, _dim(shapes, interface.past_key(0, "in"), 2)),
        "vocab_size": (config.vocab_size, _dim(shapes, interface.LOGITS, 2)),
        "rotary dimensions / 2": (config.rotary_dim // 2, _dim(shapes, interface.COS, 3)),
        "hidden_size": (config.hidden_size, _dim(shapes, interface.INPUTS_EMBEDS, 2)),
    }
    for key, (wanted, found) in said.items():
        if found is not None and found != wanted:
            raise CheckpointError(path, f"{key} is {wanted}, the ONNX model has {found}")


def _names(model: ir.Model) -> Iterator[str]:
    yield str(model.graph.name or "")
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        yield str(value.name)
    for node in model.graph:
        yield from (str(node.name or ""), node.op_type, node.domain)
        yield from (str(value.name or "") for value in node.outputs)


def _tensor_fault(tensor: ir.TensorProtocol) -> str | None:
    if isinstance(tensor, ir.ExternalTensor) and tensor.length not in {None, tensor.nbytes}:
        return f"is {tensor.nbytes} bytes by its shape, its entry says {tensor.length}"
    try:
        array = tensor_array(tensor)
        flat = array.reshape(-1)
    except Exception as error:  # noqa: BLE001  (numpy and onnx_ir raise many kinds)
        return f"cannot be read ({' '.join(str(error).split())[:120]})"
    if tensor.dtype in _REAL:
        for start in range(0, flat.size, _CHUNK):
            if not _is_finite(flat[start : start + _CHUNK]):
                return "holds what is not finite"
    return None


def _is_finite(chunk: np.ndarray) -> bool:
    """A sum is not finite when a term is not; when it overflows, the terms are looked at."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(chunk.sum(dtype=np.float32))) or bool(np.isfinite(chunk).all())


def _n_layers(names: Iterable[str]) -> int | None:
    layers = {interface.kv_layer(name) for name in names} - {None}
    return len(layers) or None


def _dim(shapes: dict[str, tuple[int, ...] | None], name: str, axis: int) -> int | None:
    shape = shapes.get(name)
    return shape[axis] if shape is not None and len(shape) > axis else None
