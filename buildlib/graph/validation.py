"""Validation of ONNX models from any source, before stages work on them.

`check_model` is for a model as it was loaded, the others for one in canonical form.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from buildlib.checkpoint.checkpoint import MAY_BE_ZERO, ZEROS
from buildlib.checkpoint.config import DecoderConfig
from buildlib.error_base import one_line
from buildlib.errors import BuildError, ModelFileError
from buildlib.graph import interface
from buildlib.graph.files import tensor_array
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import infer_shapes, static_shape

_LONGEST_NAME = 1000
_LONGEST_SHAPE = 64
_CHUNK = 1 << 22
_FEW = 1 << 10
_WEIGHED = frozenset({"Conv", "Gather", "Gemm", "MatMul", "Transpose"})
_OF_TYPES = ("inconsistent type", "unsupported type")
_REAL = frozenset({
    ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE,
})  # fmt: skip


def check_model(model: ir.Model, path: Path) -> None:
    """Check names, operators against the opset, and that weights are finite numbers, not all 0.

    Reads every weight once, mapped: some 5 GB/s from the file cache.
    """
    if not len(model.graph):
        raise ModelFileError(path, "it holds no graph")
    if model.ir_version > onnx.IR_VERSION:
        reason = f"it is of ONNX IR version {model.ir_version}; known are versions up to"
        raise ModelFileError(path, f"{reason} {onnx.IR_VERSION}")
    for name in _names(model):
        # onnx_ir keeps bytes that are no UTF-8
        if not (isinstance(name, str) and name.isprintable() and len(name) <= _LONGEST_NAME):
            begin = f"{name[:40]!r}..., {len(name)} characters"
            raise ModelFileError(path, f"a name in it cannot be used: {begin}")
    for node in model.graph:
        _check_opset(node, model, path)
    _check_operand_types(model, path)
    _check_repeated(model, path)
    for value in model.graph.initializers.values():
        if value.const_value is None:
            raise ModelFileError(path, f"initializer {value.name!r} has no value")
        fault = _tensor_fault(value.const_value)
        if fault is None and _is_weight(value) and not _has_values(value.const_value):
            fault = ZEROS
        if fault is not None:
            raise ModelFileError(path, f"tensor {str(value.name)!r} {fault}")
    for node in model.graph:
        _check_reshape(node, path)


def check_interface(model: ir.Model, path: Path) -> None:
    """Check that a canonical model has logits, and a new key and value for each of its caches."""
    ends = {
        "in": ("input", {str(value.name) for value in model.graph.inputs}),
        "out": ("output", {str(value.name) for value in model.graph.outputs}),
    }
    n_layers = _n_layers(name for _, names in ends.values() for name in names) or 1
    for end, (word, names) in ends.items():
        ports = [interface.LOGITS] if end == "out" else []
        for layer in range(n_layers):
            ports += [interface.past_key(layer, end), interface.past_value(layer, end)]
        absent = next((name for name in ports if name not in names), None)
        if absent is not None:
            raise ModelFileError(path, f"{word} {absent} is missing")


def check_sizes(model: ir.Model, config: DecoderConfig, path: Path) -> None:
    """Check that `config.json`, which configures Genie, belongs to this canonical model."""
    values = (*model.graph.inputs, *model.graph.outputs)
    shapes = {str(value.name): static_shape(value) for value in values}
    sizes: dict[str, tuple[int, str, int]] = {
        "num_key_value_heads": (config.num_key_value_heads, interface.past_key(0, "in"), 0),
        "head_dim": (config.head_dim, interface.past_key(0, "in"), 2),
        "vocab_size": (config.vocab_size, interface.LOGITS, 2),
        "rotary dimensions / 2": (config.rotary_dim // 2, interface.COS, 3),
        "hidden_size": (config.hidden_size, interface.INPUTS_EMBEDS, 2),
    }
    pairs = {"num_hidden_layers": (config.num_hidden_layers, _n_layers(shapes))}
    for key, (size, name, axis) in sizes.items():
        pairs[key] = (size, next(iter((shapes.get(name) or ())[axis : axis + 1]), None))
    for key, (size, actual) in pairs.items():
        if actual is not None and actual != size:
            raise ModelFileError(path, f"{key} is {size}, the ONNX model has {actual}")


def check_types(model: ir.Model, path: Path) -> None:
    """Check that shapes and types of a canonical model fit, from its inputs to its outputs.

    Changes `model`: inner shapes become those that follow from the inputs.
    """
    try:
        shape = interface.model_shape(model)
    except BuildError as error:
        raise ModelFileError(path, str(error)) from error
    if shape is None:
        raise ModelFileError(path, "it has no attention mask [1, 1, AR, CL] to tell AR and CL from")
    ends = {value: static_shape(value) for value in (*model.graph.inputs, *model.graph.outputs)}
    for value, dims in ends.items():
        name = str(value.name)
        if value.dtype in {None, ir.DataType.UNDEFINED}:
            raise ModelFileError(path, f"{name} has no type")
        if interface.is_kv(name) and (
            dims is None or len(dims) != 4 or interface.dims_at(name, dims, shape) != dims
        ):
            sizes = f"the mask says AR {shape.ar} and CL {shape.cl}"
            raise ModelFileError(path, f"{name} is {value.shape}, {sizes}")
    for value in model.graph.inputs:
        leading = _leading_dims(str(value.name), shape)
        if leading is not None and (ends[value] or ())[: len(leading)] != leading:
            reason = f"{value.name} is {value.shape}, it must begin with {list(leading)}"
            raise ModelFileError(path, reason)
    try:
        infer_shapes(model)
    except onnx.shape_inference.InferenceError as error:
        reason = f"its operators do not fit ({str(error).splitlines()[0][:200]})"
        raise ModelFileError(path, reason) from error
    for value, dims in ends.items():
        if static_shape(value) != dims:
            raise ModelFileError(path, f"{value.name} is {value.shape} by its inputs, not {dims}")
    for node in model.graph:
        _check_bias(node, path)


def _leading_dims(name: str, shape: GraphShape) -> tuple[int, ...] | None:
    """Return the first dimensions that an input must have; None for key/value inputs."""
    if name in {interface.INPUT_IDS, interface.INPUTS_EMBEDS}:
        return 1, shape.ar
    return (1, 1, shape.ar) if name in {interface.COS, interface.SIN} else None


def _check_bias(node: ir.Node, path: Path) -> None:
    """Check that a Gemm's third input fits its product, which ONNX's inference does not."""
    bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
    if bias is None:
        return
    dims, product = static_shape(bias), static_shape(node.outputs[0])
    if dims is None or product is None:
        return
    pairs = zip(reversed(dims), reversed(product), strict=False)
    if len(dims) > len(product) or any(one not in {1, other} for one, other in pairs):
        reason = f"Gemm {str(node.name)!r} adds {bias.name}, {list(dims)}, to {list(product)}"
        raise ModelFileError(path, reason)


def _check_operand_types(model: ir.Model, path: Path) -> None:
    """Check that no operator gets a type it cannot take; symbolic shapes are ignored."""
    try:
        proto = ir.to_proto(model)
        del proto.graph.value_info[:]
        onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        text = str(error).splitlines()[0]
        if any(words in text for words in _OF_TYPES):
            reason = f"its operators do not fit ({one_line(text, 200)})"
            raise ModelFileError(path, reason) from error
    except Exception as error:  # protobuf, onnx and onnx_ir raise many kinds
        raise ModelFileError(path, f"not a sound ONNX model ({type(error).__name__})") from error


def _check_opset(node: ir.Node, model: ir.Model, path: Path) -> None:
    """Check that a standard operator exists in the model's opset, with its attributes."""
    where = f"{node.op_type} ({str(node.name)!r})"
    version = model.opset_imports.get(node.domain)
    if version is None:
        raise ModelFileError(path, f"it names no opset for its {where}")
    newest = onnx.defs.onnx_opset_version()
    if not node.domain and version > newest:
        raise ModelFileError(path, f"it has opset {version}; known are opsets up to {newest}")
    if not onnx.defs.has(node.op_type, node.domain):
        return
    if not onnx.defs.has(node.op_type, version, node.domain):
        raise ModelFileError(path, f"it has opset {version}, which has no {where}")
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    for word, ends, least, most in (
        ("inputs", node.inputs, schema.min_input, schema.max_input),
        ("outputs", node.outputs, schema.min_output, schema.max_output),
    ):
        if not least <= len(ends) <= most:
            count = f"{least}" if least == most else f"{least} to {most}"
            raise ModelFileError(path, f"{where} has {len(ends)} {word}, it takes {count}")
    for name, attribute in node.attributes.items():
        if name not in schema.attributes:
            reason = f"{where} has an attribute {one_line(name)!r}, unknown to opset {version}"
            raise ModelFileError(path, reason)
        kind = str(schema.attributes[name].type).rpartition(".")[2]
        if attribute.type.name != kind:
            reason = f"{where} has {one_line(name)!r} as {attribute.type.name}, not {kind}"
            raise ModelFileError(path, reason)


def _check_repeated(model: ir.Model, path: Path) -> None:
    """Check that no two values and no two nodes have one name."""
    names = [str(value.name) for value in model.graph.inputs]
    names += [str(value.name) for node in model.graph for value in node.outputs if value.name]
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise ModelFileError(path, f"value {name!r} is made {count} times")
    for name, count in Counter(str(node.name) for node in model.graph if node.name).most_common(1):
        if count > 1:
            raise ModelFileError(path, f"{count} nodes have the name {name!r}")


def _check_reshape(node: ir.Node, path: Path) -> None:
    """Check that a stored target shape is of int64, with no dimension below -1, for the rest."""
    to = node.inputs[1] if node.op_type == "Reshape" and len(node.inputs) > 1 else None
    if to is None or to.const_value is None or to.const_value.size > _LONGEST_SHAPE:
        return
    kind = to.const_value.dtype
    if kind != ir.DataType.INT64:
        raise ModelFileError(path, f"Reshape ({str(node.name)!r}) has a shape of {kind.name}")
    least = min(map(int, tensor_array(to.const_value).reshape(-1)), default=0)
    if least < -1:
        raise ModelFileError(path, f"Reshape ({str(node.name)!r}) has a dimension {least}")


def _names(model: ir.Model) -> Iterator[str | bytes]:
    yield model.graph.name or ""
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        yield value.name or ""
    for node in model.graph:
        yield from (node.name or "", node.op_type, node.domain)
        ends = (*node.inputs, *node.outputs)
        yield from (value.name or "" for value in ends if value is not None)


def _tensor_fault(tensor: ir.TensorProtocol) -> str | None:
    if isinstance(tensor, ir.ExternalTensor) and tensor.length not in {None, tensor.nbytes}:
        return f"is {tensor.nbytes} bytes by its shape, its entry says {tensor.length}"
    if isinstance(tensor, ir.TensorProtoTensor) and tensor.size and not _has_data(tensor.raw):
        return f"has no data, {tensor.nbytes} bytes are needed"
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


def _is_weight(value: ir.Value) -> bool:
    """Return whether nodes multiply by a matrix, or look rows up in it, that may not be all 0."""
    users = value.consumers()
    names = (str(value.name), *(str(node.name) for node in users))
    return (
        value.dtype in _REAL
        and len(value.shape or ()) >= 2
        and any(node.op_type in _WEIGHED for node in users)
        and not any(part in name for part in MAY_BE_ZERO for name in names)
    )


def _has_values(tensor: ir.TensorProtocol) -> bool:
    flat = tensor_array(tensor).reshape(-1)
    return bool(flat[:_FEW].any() or flat.any())


def _has_data(proto: onnx.TensorProto) -> bool:
    """Return whether the tensor has data: onnx_ir reads zeros if it has none."""
    kinds = ("float", "int32", "int64", "double", "uint64", "string")
    fields = (getattr(proto, f"{kind}_data") for kind in kinds)
    return proto.HasField("raw_data") or any(len(values) for values in fields)


def _is_finite(chunk: np.ndarray) -> bool:
    """Return whether all terms are finite, by their sum, and one by one if that overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(chunk.sum(dtype=np.float32))) or bool(np.isfinite(chunk).all())


def _n_layers(names: Iterable[str]) -> int | None:
    layers = {interface.kv_layer(name) for name in names} - {None}
    return len(layers) or None
