"""Interpreter that reads the source node by node and writes the canonical graph."""

from collections import Counter

import numpy as np
import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of, inherit
from buildlib.error_base import one_line
from buildlib.graph import interface
from buildlib.graph.folding import Refusal
from plugins.onnx_exports import array_layout as layout
from plugins.onnx_exports.attention import Attention
from plugins.onnx_exports.attention_writer import AttentionWriter
from plugins.onnx_exports.constants import compute, constant, initializer, shape_of
from plugins.onnx_exports.elementwise import Elementwise
from plugins.onnx_exports.encoding_transfer import transfer_from_view
from plugins.onnx_exports.precision import precision_of
from plugins.onnx_exports.probe import Probe
from plugins.onnx_exports.projections import Projections
from plugins.onnx_exports.resolver import ActivationResolver
from plugins.onnx_exports.roles import Role
from plugins.onnx_exports.root_tensors import PastCache, RootTensors, TokenIds
from plugins.onnx_exports.rotation_encodings import transfer_rotation_encodings
from plugins.onnx_exports.symbolic_layout import SymbolicLayout, describe
from plugins.onnx_exports.values import AbstractValue, AttentionScores, Concrete, LinearForm, Weight
from plugins.onnx_exports.writer import Writer

_HOLD_ALL = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})
_HOLD_ACTIVATIONS = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_HOLD_TOKENS = frozenset({
    ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT32, ir.DataType.UINT64,
})  # fmt: skip
_ILL_TYPED = (ValueError, IndexError, KeyError, TypeError, ArithmeticError, MemoryError)
"""Exceptions of numpy and onnx_ir for shapes and attributes that do not fit."""


class Interpreter:
    """Interprets one model once.

    Attributes:
        values: abstract values that are still needed.
        marks: values that depend on positions and have an encoding, since the last attention.
    """

    def __init__(self, model: ir.Model, roles: list[Role], probe: Probe) -> None:
        self.model = model
        self.probe = probe
        self.roots = RootTensors(probe.ar, precision_of(model))
        self.writer = Writer(self.roots)
        self.layers = AttentionWriter(self.writer)
        self.resolver = ActivationResolver(self.roots, self.writer, self.layers.write_attention)
        self.layers.resolver = self.resolver
        self.attention = Attention(self.roots, probe, probe.fed_tables(roles))
        self.projections = Projections(self.writer, self.resolver)
        self.elementwise = Elementwise(self.writer, self.resolver, self.projections, self.attention)
        self.values: dict[ir.Value, AbstractValue] = {}
        self.marks: list[tuple[LinearForm, ir.Value]] = []
        self.tokens: ir.Value | None = None
        self._symbolic_layout = SymbolicLayout(self.roots)
        for parameter in model.graph.initializers.values():
            self.values[parameter] = initializer(parameter)
        self._caches: dict[ir.Value, PastCache] = {}
        for role in roles:
            value = self._input(role)
            if value is not None:
                self.values[role.value] = value

    def run(self) -> None:
        """Interpret all nodes."""
        outputs = set(self.model.graph.outputs)
        uses = Counter(value for node in self.model.graph for value in node.inputs)
        for node in self.model.graph:
            inputs = [self._value(value) if value is not None else None for value in node.inputs]
            results = self._results(node, inputs)
            for value, result in zip(node.outputs, results, strict=False):
                self.values[value] = result
                self._inherit(result, value)
            self._follow_rotations()
            uses.subtract(node.inputs)
            for operand in set(node.inputs):
                if operand is not None and not uses[operand] and operand not in outputs:
                    del self.values[operand]

    def _results(self, node: ir.Node, inputs: list[AbstractValue | None]) -> list[AbstractValue]:
        """Return the abstract values of a node's outputs; refusals name the node."""
        try:
            return self._read(node, inputs)
        except Refusal as refusal:
            if refusal.node is None:
                refusal.node = node
            raise
        except _ILL_TYPED as error:
            text = one_line(str(error), 100)
            reason = f"does not fit its inputs ({type(error).__name__}: {text})"
            raise Refusal(reason, node) from error

    def _read(self, node: ir.Node, inputs: list[AbstractValue | None]) -> list[AbstractValue]:
        kind = node.op_type
        first = inputs[0] if inputs else None
        if kind == "Constant":
            return [constant(node)]
        if kind == "Shape" and first is not None:
            return [shape_of(node, first)]
        if node.op_identifier() in self.model.functions:  # all others are inlined
            return [self.elementwise.of_op_package(node, inputs)]
        if all(part is None or isinstance(part, Concrete | Weight) for part in inputs):
            return compute(node, inputs, self.model.opset_imports.get("", 0))
        if node.domain not in {"", "ai.onnx"} and kind != "SimplifiedLayerNormalization":
            raise Refusal(
                f"is an operator of {node.domain}; one of an op package needs the package for "
                "x86_64 (op_packages), and a function of the model that says what it computes",
                node,
            )
        if kind == "Split":
            return self._symbolic_layout.split(node, inputs)
        return [self._result(node, inputs)]

    def _check_cast(self, node: ir.Node, value: AbstractValue) -> None:
        if node.op_type == "Cast":
            to = ir.DataType(node.attributes["to"].as_int())
        elif node.op_type == "CastLike" and (like := node.inputs[1]) is not None and like.dtype:
            to = like.dtype
        else:
            return
        if to in _HOLD_ALL:
            return
        base = self.roots.single_owner(value.ids[0]) if isinstance(value, LinearForm) else None
        if to not in (_HOLD_TOKENS if isinstance(base, TokenIds) else _HOLD_ACTIVATIONS):
            raise Refusal(f"turns {describe(value)} into {to.name}", node)

    def _value(self, value: ir.Value) -> AbstractValue:
        """Return the abstract value of a value; large ids of caches are made when needed."""
        cache = self._caches.pop(value, None)
        if cache is not None:
            self.values[value] = self.roots.form_of(cache, cache.dims)
        return self.values[value]

    def _input(self, role: Role) -> AbstractValue | None:
        dims = self.probe.dims(role)
        size = int(np.prod(dims))
        if role.kind in {"key", "value"}:
            self._caches[role.value] = self.roots.add(PastCache(size, role.value, role, dims))
            return None
        if role.kind == "ids":
            self.tokens = ir.Value(name=interface.INPUT_IDS, type=ir.TensorType(ir.DataType.INT32))
            return self.roots.form_of(self.roots.add(TokenIds(size, role.value)), dims)
        if role.kind == "embeds":
            real = ir.TensorType(ir.DataType.FLOAT)
            self.tokens = ir.Value(name=interface.INPUTS_EMBEDS, type=real)
            rows = self.writer.activation(self.tokens, role.value, dims[-1], stacked=True)
            return self.roots.form_of(rows, dims)
        table = {"mask": self.layers.mask, "cos": self.layers.cos, "sin": self.layers.sin}
        if role.kind in table and len(dims) == 4:
            inherit(table[role.kind], role.value)
        return Concrete(self.probe.numbers(role), varies=True)

    def _embedding(self, node: ir.Node, table: Weight, ids: LinearForm) -> LinearForm:
        base = self.roots.single_owner(ids.ids[0])
        if not ids.is_plain or not isinstance(base, TokenIds):
            raise Refusal("looks up something other than token ids", node)
        if layout.axis_of(node) != 0 or len(table.dims) != 2 or table.transposed:
            raise Refusal("looks tokens up along another axis than the first", node)
        assert self.tokens is not None  # noqa: S101  (there are token ids)
        weight = self.writer.parameter(table.source, table.dims)
        value = self.writer.op("Gather", [weight, self.tokens], str(node.outputs[0].name), axis=0)
        width = table.dims[1]
        rows = self.writer.activation(value, node.outputs[0], width, stacked=True)
        token = ids.ids[0] - base.offset
        return LinearForm((rows.offset + token[..., None] * width + np.arange(width),))

    def _result(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        match node.op_type, inputs:
            case kind, [value, *_] if kind in layout.PASS_THROUGH and value is not None:
                self._check_cast(node, value)
                return value
            case "Concat", _:
                return self._symbolic_layout.concatenated(node, inputs)
            case "Gather", [Weight() as table, LinearForm() as ids]:
                return self._embedding(node, table, ids)
            case kind, [value, *parameters] if kind in layout.LAYOUT and value is not None:
                return self._symbolic_layout.rearranged(node, value, parameters)
            case "MatMul", [LinearForm() as queries, LinearForm() as keys]:
                return self.attention.score(node, queries, keys)
            case "MatMul", [AttentionScores() as weights, LinearForm() as values]:
                return self.attention.attend_values(node, weights, values)
            case "MatMul", [LinearForm() as form, Weight() as weight]:
                return self.projections.matmul(node, form, weight)
            case "MatMul", [first, second]:
                raise Refusal(f"multiplies {describe(first)} with {describe(second)}", node)
            case "Gemm", [LinearForm() as form, Weight() as weight, *bias]:
                return self.projections.gemm(node, form, weight, bias[0] if bias else None)
            case "Conv", [LinearForm() as form, Weight() as weight, *bias]:
                return self.projections.conv(node, form, weight, bias[0] if bias else None)
        return self.elementwise.apply(node, inputs)

    def _follow_rotations(self) -> None:
        """Transfer encodings marked since the last attention to its rotations."""
        if not self.layers.rotations_written:
            return
        tables = self.attention.tables
        for rotation in self.layers.rotations_written:
            if tables is not None:
                transfer_rotation_encodings(self.roots, rotation, tables, self.marks)
        self.layers.rotations_written.clear()
        self.marks.clear()

    def _inherit(self, result: AbstractValue, value: ir.Value) -> None:
        """Give an encoding on a mere rearrangement to the rearranged value."""
        if isinstance(result, Weight):
            transfer_from_view(result, value)
        if not isinstance(result, LinearForm) or encoding_of(value) is None:
            return
        if result.varies:
            self.marks.append((result, value))
        if not result.is_plain:
            return
        ids = result.ids[0]
        if not ids.size:
            return
        base = self.roots.owner(int(ids.reshape(-1)[0]))
        if base.origin is not value and encoding_of(base.origin) is None and base.size == ids.size:
            inherit(base.origin, value)
