"""Any supported export of a decoder as the canonical graph: `read_export`, with its checks."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from buildlib.builder.canonical import Export, RopeTables
from buildlib.encodings.attachment import inherit
from buildlib.error_base import one_line
from buildlib.graph import interface
from buildlib.graph.folding import Refusal
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import infer_shapes, remove_unused
from plugins.onnx_exports.encoding_transfer import check_caches
from plugins.onnx_exports.head_rows import UnequalHalvesRefusal
from plugins.onnx_exports.interpreter import Interpreter
from plugins.onnx_exports.precision import SINGLE, precision_of
from plugins.onnx_exports.probe import Probe, find_probe
from plugins.onnx_exports.resolver import Placement
from plugins.onnx_exports.roles import find_roles
from plugins.onnx_exports.root_tensors import PastCache
from plugins.onnx_exports.source_runner import SourceRunner
from plugins.onnx_exports.values import LinearForm

_OLDEST_OPSET = 7  # the first with today's broadcasting
_SOFTMAX_OPSET = 13  # over its last axis unless it says otherwise

open_export = SourceRunner


def read_export(
    model: ir.Model, shape: GraphShape | None, *, keeps_fixed: bool, operations: Collection[str]
) -> Export:
    """See `ExportReader.read_export`."""
    _check_opset(model)
    if model.functions:
        InlinePass(lambda one: f"{one.domain}::{one.name}" not in operations)(model)
    roles = find_roles(model)
    check_caches(model, roles)
    probe = find_probe(roles)
    try:
        interpreter = Interpreter(model, roles, probe)
        interpreter.run()
    except UnequalHalvesRefusal:
        interpreter = Interpreter(model, roles, replace(probe, full_tables=True))
        interpreter.run()
    if shape is None or (keeps_fixed and probe.is_fixed):
        shape = _own_shape(probe)
    tables = interpreter.attention.tables
    takes_rotations = any(role.kind == "cos" for role in roles)
    rope = None
    if tables is not None and not takes_rotations:
        rope = RopeTables(probe.past, *tables, tolerance=interpreter.roots.precision.tolerance)
    return Export(_assemble(model, interpreter, shape), rope, takes_rotations)


def is_coarse(model: ir.Model) -> bool:
    """See `ExportReader.is_coarse`."""
    return precision_of(model) != SINGLE


def _check_opset(model: ir.Model) -> None:
    """Refuse operators that meant something else in their opset."""
    opset = model.opset_imports.get("", 0)
    if opset < _OLDEST_OPSET:
        raise Refusal(f"it has opset {opset}; the oldest that is understood is {_OLDEST_OPSET}")
    for node in model.graph:
        if node.op_type == "Softmax" and "axis" not in node.attributes and opset < _SOFTMAX_OPSET:
            raise Refusal(f"is over axis 1 and all behind it in opset {opset}", node)


def _own_shape(probe: Probe) -> GraphShape:
    if not probe.is_fixed:
        raise Refusal("it has symbolic sizes, so AR and CL must be given")
    return GraphShape(probe.ar, probe.cl)


def _assemble(model: ir.Model, interpreter: Interpreter, shape: GraphShape) -> ir.Model:
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
