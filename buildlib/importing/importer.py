"""Import pass: from any supported export of a decoder to the canonical graph."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.attachment import inherit
from buildlib.error_base import one_line
from buildlib.errors import ModelFileError
from buildlib.graph import interface
from buildlib.graph.builder import OPSET
from buildlib.graph.files import tensor_array
from buildlib.graph.rope import rope_tables, rotation_length
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import infer_shapes, remove_unused, static_shape
from buildlib.importing.encoding_transfer import check_caches
from buildlib.importing.head_rows import UnequalHalvesRefusal
from buildlib.importing.interpreter import Interpreter
from buildlib.importing.probe import Probe, find_probe
from buildlib.importing.refusal import Refusal
from buildlib.importing.resolver import Placement
from buildlib.importing.roles import find_roles
from buildlib.importing.root_tensors import PastCache
from buildlib.importing.values import Floats, LinearForm
from buildlib.passes.arcl import ArClConversion
from buildlib.passes.base import SORTED, STATIC, Pass

_OLDEST_OPSET = 7  # the first with today's broadcasting
_SOFTMAX_OPSET = 13  # over its last axis unless it says otherwise
_PLAIN = (
    "Add", "CumSum", "Less", "MatMul", "Mul", "Reshape", "Sigmoid", "Slice", "Sub", "Tanh", "Where",
)  # fmt: skip
_OPERATORS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    **{name: {} for name in _PLAIN},
    "Cast": {"to": ()},
    "Concat": {"axis": (-1, 2, 3)},
    "Gather": {"axis": (0,)},
    "Gelu": {"approximate": ("none", "tanh")},
    "Gemm": {"transB": (0, 1)},
    "LayerNormalization": {"axis": (-1,), "epsilon": ()},
    "RMSNormalization": {"axis": (-1,), "epsilon": ()},
    "Softmax": {"axis": (-1,)},
    "Split": {"axis": (-1,), "num_outputs": ()},
    "Transpose": {"perm": ((0, 1, 3, 2), (1, 2, 0, 3), (2, 0, 1, 3))},
}
"""Operators and attributes of a canonical model; an empty tuple allows any value."""

_TOLERANCE = 2e-3  # precision of a float16 cosine; coarser types have their own tolerance


@dataclass(frozen=True)
class RopeTables:
    """Rotary embedding that a source computes itself, to compare with that of hosts.

    Attributes:
        first: the position of the first row.
        cos, sin: [positions, rope_dim/2].
        tolerance: largest error of the type in which they are computed.
    """

    first: int
    cos: Floats
    sin: Floats
    tolerance: float = 0.0


class ImportModel(Pass):
    """Rewrites an export to the canonical graph, by interpreting its computation.

    A model in canonical form is only brought to the shape.

    Attributes:
        shape: target shape; None keeps the export's own.
        operations: of op packages, as `my.package::Scale`; nodes of them are kept.
        fixed_keep_theirs: the shape applies to exports with symbolic sizes only.
        rope: after a run, the rotary embedding that the source computes itself.
        takes_rotations: after a run, whether a source in another form takes it from its host.
    """

    name = "import"
    sorts_nodes = True  # some tools append inserted nodes, and ONNX Runtime accepts any order
    requires = (SORTED,)
    ensures = (SORTED, STATIC)

    def __init__(
        self,
        shape: GraphShape | None = None,
        *,
        fixed_keep_theirs: bool = False,
        operations: Collection[str] = (),
    ) -> None:
        self.shape = shape
        self.operations = operations
        self.fixed_keep_theirs = fixed_keep_theirs
        self.rope: RopeTables | None = None
        self.takes_rotations = False
        self._path = Path()

    def run(self, source: Path, target: Path) -> Path:
        """See `Pass.run`."""
        self._path = source
        return super().run(source, target)

    def transform(self, model: ir.Model) -> ir.Model:
        """Return a new model, or `model` itself if it is canonical."""
        if is_canonical(model):
            own = interface.model_shape(model)
            if self.shape is None or self.fixed_keep_theirs or self.shape == own:
                return model
            return ArClConversion(self.shape).transform(model)
        try:
            return self._imported(model)
        except Refusal as refusal:
            raise _unsupported_error(self._path, model, refusal) from refusal

    def _imported(self, model: ir.Model) -> ir.Model:
        _check_opset(model)
        if model.functions:
            names = self.operations
            InlinePass(lambda one: f"{one.domain}::{one.name}" not in names)(model)
        roles = find_roles(model)
        check_caches(model, roles)
        probe = find_probe(roles)
        try:
            interpreter = Interpreter(model, roles, probe)
            interpreter.run()
        except UnequalHalvesRefusal:
            interpreter = Interpreter(model, roles, replace(probe, full_tables=True))
            interpreter.run()
        own = self.shape is None or (self.fixed_keep_theirs and probe.is_fixed)
        shape = _own_shape(probe) if self.shape is None or own else self.shape
        tables = interpreter.attention.tables
        self.takes_rotations = any(role.kind == "cos" for role in roles)
        if tables is not None and not self.takes_rotations:
            tolerance = interpreter.roots.precision.tolerance
            self.rope = RopeTables(probe.past, *tables, tolerance=tolerance)
        return _assemble(model, interpreter, shape)


def is_canonical(model: ir.Model) -> bool:
    """Return whether a model has the canonical interface, and no (AR, CL) in its operators."""
    inputs = {str(value.name): static_shape(value) for value in model.graph.inputs}
    names = set(inputs)
    needed = {interface.ATTENTION_MASK, interface.past_key(0, "in"), interface.past_value(0, "in")}
    mask = inputs.get(interface.ATTENTION_MASK)
    if not needed <= names or mask is None or len(mask) != 4:
        return False
    if model.opset_imports.get("") != OPSET or mask[:2] != (1, 1):
        return False
    return all(_is_canonical(node) for node in model.graph)


def _is_canonical(node: ir.Node) -> bool:
    attributes = _OPERATORS.get(node.op_type)
    if attributes is None or not set(node.attributes) <= set(attributes):
        return False
    for name, values in attributes.items():
        attribute = node.attributes.get(name)
        if attribute is not None and values and attribute.value not in values:
            return False
    match node.op_type:
        case "Add":  # masked scores go through a softmax, else the mask hides nothing
            is_mask = any(v is not None and v.name == interface.ATTENTION_MASK for v in node.inputs)
            users = node.outputs[0].consumers()
            return not is_mask or all(user.op_type == "Softmax" for user in users)
        case "Cast":  # of weights that are kept in another type
            return all(value is not None and value.is_initializer() for value in node.inputs)
        case "MatMul":
            return not any(map(_is_weight, node.inputs))
        case "Gemm" | "LayerNormalization" | "RMSNormalization":
            return [_is_weight(value) for value in node.inputs[:2]] == [False, True]
        case "Gather":
            return [_is_weight(value) for value in node.inputs] == [True, False]
        case "Concat":  # the past comes first
            return not any(v is not None and v.is_graph_input() for v in node.inputs[1:])
        case "Reshape":
            to = node.inputs[1] if len(node.inputs) > 1 else None
            target = to.const_value if to is not None else None
            return target is not None and -1 in tensor_array(target)
    return True


def _is_weight(value: ir.Value | None) -> bool:
    """Return whether a value is stored in the file, possibly in another type than it is used in."""
    if value is None:
        return False
    maker = value.producer()
    if maker is not None and maker.op_type == "Cast":
        value = maker.inputs[0]
    return value is not None and value.is_initializer()


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


def _unsupported_error(path: Path, model: ir.Model, refusal: Refusal) -> ModelFileError:
    node = refusal.node
    if node is None:
        return ModelFileError(path, refusal.reason)
    count = Counter(other.op_type for other in model.graph)[node.op_type]
    where = f"{node.op_type} {node.name!r} ({count} of this operator)"
    return ModelFileError(path, f"{where} {refusal.reason}")


def check_rotation(importing: ImportModel, config: DecoderConfig, path: Path) -> None:
    """Compare the rotary embedding of an imported source with the one that hosts will feed.

    Args:
        importing: after its run.
        config: configuration that hosts compute theirs from.
        path: path of the configuration, for messages.
    """
    length = rotation_length(config)
    if importing.takes_rotations and length != 1.0:
        reason = (
            f"rope_scaling makes cosines {length:.4g} times as long, and the ONNX takes them from "
            "its host, which feeds none longer than 1; export it with its own"
        )
        raise ModelFileError(path, reason)
    rope = importing.rope
    if rope is None:
        return
    count, width = rope.cos.shape
    tables = [table[rope.first :] for table in rope_tables(config, rope.first + count)]
    if tables[0].shape[1] != width:
        reason = f"heads turn {2 * width} dimensions in the ONNX, and {config.rotary_dim} by it"
        raise ModelFileError(path, reason)
    worst = max(
        float(np.abs(own - ours).max())
        for own, ours in zip((rope.cos, rope.sin), tables, strict=True)
    )
    if not worst <= max(_TOLERANCE, rope.tolerance):
        reason = (
            "rotary positions of the ONNX are others than rope_theta and rope_scaling give "
            f"(cosines differ by up to {worst:.2g})"
        )
        raise ModelFileError(path, reason)


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
