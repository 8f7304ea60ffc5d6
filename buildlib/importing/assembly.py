"""Assembly of the canonical model from an interpreted source: inputs, outputs, shapes."""

import numpy as np
import onnx
import onnx_ir as ir

from buildlib.encodings.attachment import inherit
from buildlib.error_base import one_line
from buildlib.graph import interface
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import infer_shapes, remove_unused
from buildlib.importing.interpreter import Interpreter
from buildlib.importing.refusal import Refusal
from buildlib.importing.resolver import Placement
from buildlib.importing.root_tensors import PastCache
from buildlib.importing.values import LinearForm


def assemble(model: ir.Model, interpreter: Interpreter, shape: GraphShape) -> ir.Model:
    """Build the model of everything an interpreter has written."""
    logits = _logits(model, interpreter)
    layers, builder = interpreter.layers, interpreter.writer.builder
    n_layers = len(layers.caches) // 2
    if interpreter.tokens is None:
        raise Refusal("no input holds tokens")
    inputs = [interpreter.tokens, layers.mask]
    if interpreter.attention.width:
        inputs += [layers.cos, layers.sin]
    outputs = [logits]
    for layer in range(n_layers):
        for name in (interface.past_key(layer, "in"), interface.past_value(layer, "in")):
            inputs.append(layers.caches[name])
            outputs.append(layers.outputs[interface.kv_output(name)])
    for value in inputs:
        value.shape = ir.Shape(_dims(value, interpreter.attention.width, shape))
    result = builder.model(inputs, outputs, str(model.graph.name))
    result.meta.update(model.meta)
    for identifier, function in model.functions.items():
        result.functions[identifier] = function
        result.opset_imports[function.domain] = model.opset_imports[function.domain]
    remove_unused(result.graph)
    try:
        infer_shapes(result)
    except onnx.shape_inference.InferenceError as error:
        text = one_line(str(error), 120)
        raise Refusal(f"what was read does not fit together ({text})") from error
    return result


def _dims(value: ir.Value, width: int, shape: GraphShape) -> tuple[int, ...]:
    name = str(value.name)
    if name == interface.INPUT_IDS:
        return (1, shape.ar)
    if name == interface.ATTENTION_MASK:
        return (1, 1, shape.ar, shape.cl)
    if name in {interface.COS, interface.SIN}:
        return (1, 1, shape.ar, width // 2)
    assert value.shape is not None  # noqa: S101  (caches have all but their length)
    dims = [dim if isinstance(dim, int) else shape.past for dim in value.shape]
    return tuple(dims) if interface.is_kv(name) else (1, shape.ar, dims[-1])


def _logits(model: ir.Model, interpreter: Interpreter) -> ir.Value:
    """Return the canonical logits; the source's other outputs must be keys and values."""
    candidates: list[tuple[ir.Value, LinearForm]] = []
    for output in model.graph.outputs:
        form = interpreter.values.get(output)
        if not isinstance(form, LinearForm):
            raise Refusal(f"output {output.name} does not depend on the text")
        if not _is_cache(interpreter, form):
            candidates.append((output, form))
    names = [str(output.name) for output, _ in candidates]
    pairs = [pair for pair in candidates if "logit" in str(pair[0].name).lower()] or candidates
    if len(pairs) != 1:
        raise Refusal(f"no single output holds logits; besides keys and values there are {names}")
    ((output, form),) = pairs
    placed = interpreter.resolver.resolve(form, output)
    if not _is_by_token(placed):
        reason = "does not hold the scores of the vocabulary in order, token by token"
        raise Refusal(f"output {output.name} {reason}")
    writer = interpreter.writer
    value = writer.value(placed.rows, stacked=False)
    shape = writer.builder.shape(1, -1, placed.rows.features)
    if value.name == interface.LOGITS:
        value.name = writer.name("lm_head")
    logits = writer.builder.op("Reshape", [value, shape], interface.LOGITS)
    return inherit(logits, output)


def _is_by_token(placed: Placement) -> bool:
    """Return whether tokens follow each other, and along some axis the features of each."""
    n_features = placed.rows.features
    for axis in (axis for axis, size in enumerate(placed.feature.shape) if size == n_features):
        feature, token = (np.moveaxis(ids, axis, -1) for ids in (placed.feature, placed.token))
        tokens = token[..., 0].reshape(-1)
        if (feature == np.arange(n_features)).all() and (np.diff(tokens) > 0).all():
            return bool((token == token[..., :1]).all())
    return False


def _is_cache(interpreter: Interpreter, form: LinearForm) -> bool:
    """Return whether an output is keys or values: past and new ones, or new ones alone."""
    roots, layers = interpreter.roots, interpreter.layers
    if form.varies:
        return True
    ids = form.ids[0].reshape(-1)
    base = roots.owner(int(ids[0]))
    return isinstance(base, PastCache) or any(
        start <= int(ids[0]) < stop for start, stop in layers.value_ranges
    )
