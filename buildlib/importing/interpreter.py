"""Reads the source node by node, and writes what it finds to the canonical graph."""

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from buildlib.encodings.attached import encoding_of, inherit
from buildlib.graph import interface
from buildlib.importing import layout
from buildlib.importing.attention import Attention
from buildlib.importing.bases import Bases, Cache, Frozen, Tokens
from buildlib.importing.elementwise import Elementwise
from buildlib.importing.folding import fold
from buildlib.importing.gather import Gatherer
from buildlib.importing.layer import LayerWriter
from buildlib.importing.linear import Projections
from buildlib.importing.probe import Probe
from buildlib.importing.refusal import Refusal
from buildlib.importing.roles import Role
from buildlib.importing.rotations import follow_steps
from buildlib.importing.values import ABSENT, Abstract, Form, Known, Numbers, Scores, Stat, Weight
from buildlib.importing.writer import Writer

_LARGE_RANK = 2
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 2e-3
_ILL_TYPED = (ValueError, IndexError, KeyError, TypeError, ArithmeticError, MemoryError)
"""What numpy and onnx_ir raise for shapes and attributes that do not fit."""

_LAZY = layout.PASSING | {"Transpose", "Reshape", "Squeeze", "Unsqueeze"}


class Interpreter:
    """One reading of one model.

    Attributes:
        values: what is known of the values that are still needed.
        marks: values that depend on positions and have an encoding, since the last attention.
    """

    def __init__(self, model: ir.Model, roles: list[Role], probe: Probe) -> None:
        self.model = model
        self.probe = probe
        self.bases = Bases(probe.ar, _HALF_TOLERANCE if _is_half(model) else _TOLERANCE)
        self.writer = Writer(self.bases)
        self.layers = LayerWriter(self.writer)
        self.gather = Gatherer(self.bases, self.writer, self.layers.attend)
        self.layers.gather = self.gather
        self.attention = Attention(self.bases, probe)
        self.projections = Projections(self.writer, self.gather)
        self.elementwise = Elementwise(self.writer, self.gather, self.projections, self.attention)
        self.values: dict[ir.Value, Abstract] = {}
        self.marks: list[tuple[Form, ir.Value]] = []
        self.tokens: ir.Value | None = None
        self.opset = model.opset_imports.get("", 0)
        for value in model.graph.initializers.values():
            self.values[value] = _initializer(value)
        self._caches: dict[ir.Value, Cache] = {}
        for role in roles:
            known = self._input(role)
            if known is not None:
                self.values[role.value] = known

    def run(self) -> None:
        """Read all nodes.

        Raises:
            Refusal: at the first that has no canonical form.
        """
        outputs = set(self.model.graph.outputs)
        left = Counter(value for node in self.model.graph for value in node.inputs)
        for node in self.model.graph:
            inputs = [self._value(value) if value is not None else None for value in node.inputs]
            results = self._results(node, inputs)
            for value, result in zip(node.outputs, results, strict=False):
                self.values[value] = result
                self._inherit(result, value)
            self._follow_rotations()
            for used in set(node.inputs):
                left[used] -= sum(other is used for other in node.inputs)
                if used is not None and not left[used] and used not in outputs:
                    del self.values[used]

    def _results(self, node: ir.Node, inputs: list[Abstract | None]) -> list[Abstract]:
        """What is known of a node's outputs; refusals name the node."""
        try:
            return self._read(node, inputs)
        except Refusal as refusal:
            if refusal.node is None:
                refusal.node = node
            raise
        except _ILL_TYPED as error:
            text = " ".join(str(error).split())[:100]
            reason = f"does not fit its inputs ({type(error).__name__}: {text})"
            raise Refusal(reason, node) from error

    def _read(self, node: ir.Node, inputs: list[Abstract | None]) -> list[Abstract]:
        kind = node.op_type
        first = inputs[0] if inputs else None
        if kind == "Constant":
            return [_constant(node)]
        if kind == "Shape" and first is not None:
            return [self._shape(node, first)]
        if all(part is None or isinstance(part, Known | Weight) for part in inputs):
            return self._known(node, inputs)
        if node.domain not in {"", "ai.onnx"} and kind != "SimplifiedLayerNormalization":
            raise Refusal(f"is an operator of {node.domain}", node)
        if kind == "Split":
            return self._split(node, inputs)
        return [self._one(node, inputs)]

    def _one(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        kind, first = node.op_type, inputs[0]
        if kind in layout.PASSING and first is not None:
            return first
        if kind == "Concat":
            return self._concat(node, inputs)
        if kind == "Gather" and isinstance(first, Weight) and isinstance(inputs[1], Form):
            return self._embedding(node, first, inputs[1])
        if kind in layout.MOVING and first is not None:
            return self._moved(node, first, inputs[1:])
        return self._computed(node, inputs)

    def _value(self, value: ir.Value) -> Abstract:
        """What is known of a value; ids of caches are large, and made when they are needed."""
        cache = self._caches.pop(value, None)
        if cache is not None:
            self.values[value] = self.bases.form_of(cache, cache.dims)
        return self.values[value]

    def _input(self, role: Role) -> Abstract | None:
        dims = self.probe.dims(role)
        size = int(np.prod(dims))
        if role.kind in {"key", "value"}:
            cache = self.bases.add(Cache(self.bases.end, size, role.value, role, dims))
            self._caches[role.value] = cache
            return None
        if role.kind == "ids":
            self.tokens = ir.Value(name=interface.INPUT_IDS, type=ir.TensorType(ir.DataType.INT32))
            ids = self.bases.add(Tokens(self.bases.end, size, role.value))
            return self.bases.form_of(ids, dims)
        if role.kind == "embeds":
            real = ir.TensorType(ir.DataType.FLOAT)
            self.tokens = ir.Value(name=interface.INPUTS_EMBEDS, type=real)
            rows = self.writer.written(self.tokens, role.value, dims[-1], stacked=True)
            return self.bases.form_of(rows, dims)
        table = {"mask": self.layers.mask, "cos": self.layers.cos, "sin": self.layers.sin}
        if role.kind in table and len(dims) == 4:
            inherit(table[role.kind], role.value)
        return Known(self.probe.numbers(role), varies=True)

    def _shape(self, node: ir.Node, value: Abstract) -> Known:
        start = node.attributes["start"].as_int() if "start" in node.attributes else 0
        end = node.attributes["end"].as_int() if "end" in node.attributes else None
        return Known(np.array(value.shape[start:end], dtype=np.int64))

    def _known(self, node: ir.Node, inputs: list[Abstract | None]) -> list[Abstract]:
        first = inputs[0] if inputs else None
        if isinstance(first, Weight) and node.op_type in _LAZY:
            lazy = self._lazy(node, first, inputs[1:])
            if lazy is not None:
                return [lazy]
        known = [part.known if isinstance(part, Weight) else part for part in inputs]
        varies = any(isinstance(part, Known) and part.varies for part in known)
        source = None
        if node.op_type in _LAZY and isinstance(known[0], Known):
            source = known[0].source if node.op_type != "Transpose" else None
        arrays = [part.array if isinstance(part, Known) else None for part in known]
        if node.op_type in layout.MOVING and arrays[0] is not None:
            move = layout.mover(node, arrays[0].ndim, arrays[1:], self.opset)
            return [Known(np.asarray(move(arrays[0])), varies, source)]
        return [Known(array, varies, source) for array in fold(node, arrays, self.opset)]

    def _lazy(
        self, node: ir.Node, weight: Weight, parameters: list[Abstract | None]
    ) -> Weight | None:
        """A weight seen through an operator that keeps its two dimensions apart."""
        if node.op_type in layout.PASSING:
            to = node.attributes["to"].as_int() if "to" in node.attributes else None
            floating = to is None or ir.DataType(to).is_floating_point()
            return weight if floating else None
        shape = _arrays(parameters)
        move = layout.mover(node, len(weight.dims), shape, self.opset)
        seen = move(np.broadcast_to(np.int8(0), weight.dims))
        dims = tuple(int(dim) for dim in seen.shape)
        if node.op_type == "Transpose":
            if len(weight.dims) != 2:
                return None
            swapped = (
                tuple(node.attributes["perm"].as_ints()) == (1, 0)
                if ("perm" in node.attributes)
                else True
            )
            return Weight(weight.source, dims, weight.transposed != swapped)
        true, was = ([dim for dim in some if dim != 1] for some in (dims, weight.dims))
        return Weight(weight.source, dims, weight.transposed) if true == was else None

    def _moved(self, node: ir.Node, value: Abstract, parameters: list[Abstract | None]) -> Abstract:
        if any(part is not None and not isinstance(part, Known | Weight) for part in parameters):
            raise Refusal("takes shapes or indices that depend on the text", node)
        if isinstance(value, Scores):
            return self._moved_scores(node, value, parameters)
        if not isinstance(value, Form):
            raise Refusal(f"moves {_words(value)}", node)
        move = layout.mover(node, len(value.shape), _arrays(parameters), self.opset)
        ids = tuple(move(part) for part in value.ids)
        coefs = tuple(coef if isinstance(coef, float) else move(coef) for coef in value.coefs)
        return Form(ids, coefs, value.varies)

    def _moved_scores(
        self, node: ir.Node, scores: Scores, parameters: list[Abstract | None]
    ) -> Scores:
        axis = layout.axis_of(node)
        last = axis in {-1, len(scores.shape) - 1}
        if node.op_type not in layout.LAST_AXIS_SAFE and (node.op_type != "Gather" or last):
            raise Refusal("rearranges attention scores", node)
        move = layout.mover(node, len(scores.shape), _arrays(parameters), self.opset)
        rows = move(np.broadcast_to(scores.rows[..., None], scores.shape))
        if rows.shape[-1] != scores.width or (rows != rows[..., :1]).any():
            raise Refusal("rearranges attention scores", node)
        return _with_rows(scores, rows[..., 0])

    def _split(self, node: ir.Node, inputs: list[Abstract | None]) -> list[Abstract]:
        value = inputs[0]
        sizes = _arrays(inputs[1:])
        given = sizes[0] if sizes else None
        if isinstance(value, Scores) and layout.axis_of(node) not in {-1, len(value.shape) - 1}:
            if layout.axis_of(node) < 0:
                raise Refusal("splits attention scores from behind", node)
            return [_with_rows(value, part) for part in layout.split(node, value.rows, given)]
        if not isinstance(value, Form):
            raise Refusal(f"splits {_words(value)}", node)
        ids = [layout.split(node, part, given) for part in value.ids]
        coefs = [
            [coef] * len(ids[0]) if isinstance(coef, float) else layout.split(node, coef, given)
            for coef in value.coefs
        ]
        return [
            Form(tuple(part[i] for part in ids), tuple(part[i] for part in coefs), value.varies)
            for i in range(len(ids[0]))
        ]

    def _concat(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        axis = layout.axis_of(node)
        scores = [part for part in inputs if isinstance(part, Scores)]
        if len(scores) == len(inputs):
            if axis in {-1, len(scores[0].shape) - 1}:
                raise Refusal("joins attention scores along the context", node)
            at = axis if axis >= 0 else axis + 1
            return _with_rows(scores[0], np.concatenate([part.rows for part in scores], at))
        forms = [part for part in inputs if isinstance(part, Form)]
        if len(forms) != len(inputs):
            raise Refusal("joins tensors that depend on the text with others", node)
        if any(self._is_cached(form) for form in forms):
            forms = [self._frozen(node, form) for form in forms]
        n_terms = max(len(form.ids) for form in forms)
        ids = tuple(
            np.concatenate([_term_ids(form, term) for form in forms], axis)
            for term in range(n_terms)
        )
        coefs: list[float | Numbers] = []
        for term in range(n_terms):
            first = forms[0].coefs[term] if term < len(forms[0].coefs) else 0.0
            same = isinstance(first, float) and all(
                term < len(form.coefs) and _equals(form.coefs[term], first) for form in forms
            )
            parts = [_term_coefs(form, term) for form in forms] if not same else []
            coefs.append(first if same else np.concatenate(parts, axis))
        return Form(ids, tuple(coefs), any(form.varies for form in forms))

    def _is_cached(self, form: Form) -> bool:
        first = int(form.ids[0].reshape(-1)[0]) if form.ids[0].size else ABSENT
        return first != ABSENT and isinstance(self.bases.of(first), Cache)

    def _frozen(self, node: ir.Node, form: Form) -> Form:
        """A form of several terms under ids of its own, to be joined with a cache."""
        if form.is_plain:
            return form
        size = form.ids[0].size
        base = self.bases.add(Frozen(self.bases.end, size, node.outputs[0], form))
        return self.bases.form_of(base, form.shape)

    def _embedding(self, node: ir.Node, table: Weight, ids: Form) -> Form:
        base = self.bases.only(ids.ids[0])
        if not ids.is_plain or not isinstance(base, Tokens):
            raise Refusal("looks up something other than token ids", node)
        if layout.axis_of(node) != 0 or len(table.dims) != 2 or table.transposed:
            raise Refusal("looks tokens up along another axis than the first", node)
        assert self.tokens is not None  # noqa: S101  (there is a base of tokens)
        weight = self.writer.parameter(table.source, table.dims)
        value = self.writer.op("Gather", [weight, self.tokens], str(node.outputs[0].name), axis=0)
        width = table.dims[1]
        rows = self.writer.written(value, node.outputs[0], width, stacked=True)
        token = ids.ids[0] - base.offset
        return Form((rows.offset + token[..., None] * width + np.arange(width),))

    def _computed(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        kind = node.op_type
        first = inputs[0]
        second = inputs[1] if len(inputs) > 1 else None
        third = inputs[2] if len(inputs) > 2 else None
        if kind == "MatMul":
            return self._matmul(node, first, second)
        if kind in {"Gemm", "Conv"} and isinstance(first, Form):
            weight = _weight(second)
            if weight is not None and kind == "Gemm":
                return self.projections.gemm(node, first, weight, third)
            if weight is not None:
                return self.projections.conv(node, first, weight, third)
        return self.elementwise.apply(node, inputs)

    def _matmul(self, node: ir.Node, first: Abstract | None, second: Abstract | None) -> Abstract:
        if isinstance(first, Form) and isinstance(second, Form):
            return self.attention.product(node, first, second)
        if isinstance(first, Scores) and isinstance(second, Form):
            return self.attention.attended(node, first, second)
        weight = _weight(second)
        if isinstance(first, Form) and weight is not None:
            return self.projections.matmul(node, first, weight)
        raise Refusal(f"multiplies {_words(first)} with {_words(second)}", node)

    def _follow_rotations(self) -> None:
        """What was marked is of the attention that was just written, or of one to come."""
        if not self.layers.turned:
            return
        tables = self.attention.tables
        for turned in self.layers.turned:
            if tables is not None:
                follow_steps(self.bases, turned, tables, self.marks)
        self.layers.turned.clear()
        self.marks.clear()

    def _inherit(self, result: Abstract, value: ir.Value) -> None:
        """An encoding on a mere rearrangement is one of what it rearranges."""
        if not isinstance(result, Form) or encoding_of(value) is None:
            return
        if result.varies:
            self.marks.append((result, value))
        if not result.is_plain:
            return
        ids = result.ids[0]
        if not ids.size:
            return
        base = self.bases.of(int(ids.reshape(-1)[0]))
        if base.origin is not value and encoding_of(base.origin) is None and base.size == ids.size:
            inherit(base.origin, value)


def _is_half(model: ir.Model) -> bool:
    half = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    return any(value.dtype in half for value in model.graph.inputs)


def _initializer(value: ir.Value) -> Abstract:
    tensor = value.const_value
    if tensor is None:
        raise Refusal(f"initializer {value.name} has no numbers")
    dims = tuple(int(dim) for dim in tensor.shape.numpy())
    weight = Weight(value, dims)
    if len(dims) >= _LARGE_RANK and tensor.dtype.is_floating_point():
        return weight
    return weight.known


def _constant(node: ir.Node) -> Abstract:
    for name in ("value", "value_float", "value_int", "value_floats", "value_ints"):
        if name not in node.attributes:
            continue
        given = node.attributes[name]
        if name == "value":
            return Known(given.as_tensor().numpy())
        kind = np.float32 if "float" in name else np.int64
        return Known(np.array(given.value, dtype=kind))
    raise Refusal("has a constant of an unknown kind", node)


def _weight(value: Abstract | None) -> Weight | None:
    return value if isinstance(value, Weight) else None


def _arrays(values: list[Abstract | None]) -> list[Numbers | None]:
    known = [part.known if isinstance(part, Weight) else part for part in values]
    return [part.array if isinstance(part, Known) else None for part in known]


def _with_rows(scores: Scores, rows: layout.Array) -> Scores:
    return replace(scores, rows=rows)


def _term_ids(form: Form, term: int) -> layout.Array:
    return form.ids[term] if term < len(form.ids) else np.full(form.shape, ABSENT)


def _term_coefs(form: Form, term: int) -> layout.Array:
    return form.dense(term) if term < len(form.ids) else np.zeros(form.shape)


def _equals(coef: float | Numbers, number: float | Numbers) -> bool:
    return isinstance(coef, float) and isinstance(number, float) and coef == number


def _words(value: Abstract | None) -> str:
    if isinstance(value, Scores):
        return "attention scores"
    if isinstance(value, Stat):
        return "part of a normalisation"
    return "an activation" if isinstance(value, Form) else "numbers"
