"""Elementwise operators: residuals, biases, gains, activations, scales, masks, rotations."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from buildlib.importing.attention import Attention
from buildlib.importing.bases import Normed
from buildlib.importing.gather import Gatherer, Placed, feature_vector
from buildlib.importing.linear import Projections, vector_value
from buildlib.importing.refusal import Refusal
from buildlib.importing.values import Abstract, Form, Known, Numbers, Scores, Stat, Weight
from buildlib.importing.writer import Writer

_UNARY = frozenset({
    "Sigmoid", "Tanh", "Relu", "Erf", "Exp", "Softplus", "Gelu", "HardSwish", "HardSigmoid",
    "LeakyRelu", "Elu", "Abs", "Softsign", "Mish", "Selu", "Celu", "Sqrt", "Reciprocal",
})  # fmt: skip

Handler = Callable[[ir.Node, list[Abstract | None]], Abstract]


class Elementwise:
    """Everything that computes each element from those in the same place."""

    def __init__(
        self, writer: Writer, gather: Gatherer, projections: Projections, attention: Attention
    ) -> None:
        self.writer = writer
        self.gather = gather
        self.projections = projections
        self.attention = attention
        self._handlers: dict[str, Handler] = {
            "Add": self._add,
            "Sub": self._sub,
            "Mul": self._mul,
            "Div": self._div,
            "Neg": self._neg,
            "Pow": self._pow,
            "ReduceMean": self._mean,
            "Softmax": self._softmax,
            "Where": self._where,
            "IsNaN": self._is_nan,
            "Swish": self._swish,
            "SimplifiedLayerNormalization": self._norm_operator,
            "RMSNormalization": self._norm_operator,
        }

    def apply(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        """The result of `node`.

        Raises:
            Refusal: no operator of a decoder, or not on such inputs.
        """
        first = inputs[0]
        handler = self._handlers.get(node.op_type)
        if handler is not None:
            known = [part.known if isinstance(part, Weight) else part for part in inputs]
            return handler(node, list(known))
        if isinstance(first, Stat) and node.op_type in {"Sqrt", "Reciprocal"}:
            return self._root(node, first)
        if node.op_type in _UNARY and isinstance(first, Form):
            placed = self._placed(node, first, 0)
            given = {name: attribute.value for name, attribute in node.attributes.items()}
            return placed.onto(
                self.writer.new([placed.rows], node.op_type, node.outputs[0], **given), node
            )
        raise Refusal("is not supported", node)

    def _add(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        first, second = inputs
        if isinstance(first, Known):
            first, second = second, first
        if isinstance(first, Form) and isinstance(second, Form):
            return self._sum(node, first, second, "Add")
        if isinstance(first, Scores) and isinstance(second, Known):
            return self.attention.masked(node, first, second)
        if isinstance(first, Stat) and isinstance(second, Known) and first.stage == "mean":
            if second.array.size != 1:
                raise Refusal("adds several numbers to a mean square", node)
            return first.at("mean", epsilon=first.epsilon + float(second.array.reshape(())))
        if isinstance(first, Form) and isinstance(second, Known):
            return self._plus(node, first, second)
        raise Refusal("is not supported on these inputs", node)

    def _plus(self, node: ir.Node, form: Form, known: Known) -> Form:
        if known.varies:
            raise Refusal("adds numbers that depend on positions (learned positions?)", node)
        origin = node.outputs[0]
        placed = self._placed(node, form, 0)
        vector = self._vector(node, placed, known, placed.rows.features)
        biased = self.projections.bias(placed.rows, vector, known, origin)
        if biased is not None:
            return placed.onto(biased, node)
        value = vector_value(self.writer, vector, known, f"{origin.name}_added")
        return placed.onto(self.writer.new([placed.rows], "Add", origin, constants=[value]), node)

    def _sub(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        first, second = inputs
        if isinstance(first, Form) and isinstance(second, Form):
            return self._sum(node, first, second, "Sub")
        if isinstance(first, Form) and isinstance(second, Known):
            return self._plus(node, first, Known(-second.array, second.varies))
        raise Refusal("is not supported on these inputs", node)

    def _sum(self, node: ir.Node, first: Form, second: Form, kind: str) -> Form:
        if first.varies or second.varies:
            return first.plus(second, 1.0 if kind == "Add" else -1.0)
        return self._joined(node, first, second, kind)

    def _joined(self, node: ir.Node, first: Form, second: Form, kind: str) -> Form:
        """Two activations, element by element."""
        left, right = self._placed(node, first, 0), self._placed(node, second, 1)
        if first.shape != second.shape or not np.array_equal(left.local, right.local):
            raise Refusal(
                f"joins tensors {first.shape} and {second.shape} in different order", node
            )
        rows = self.writer.new([left.rows, right.rows], kind, node.outputs[0])
        return left.onto(rows, node)

    def _mul(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        first, second = inputs
        if isinstance(first, Known | Stat) and not isinstance(second, Known):
            first, second = second, first
        if isinstance(first, Form) and isinstance(second, Known):
            return self._times(node, first, second)
        if isinstance(first, Form) and isinstance(second, Stat) and second.stage == "inverse":
            return self._normed(node, first, second)
        if isinstance(first, Form) and isinstance(second, Form):
            if not first.varies and _same(first, second):
                return Stat(first, first.shape, "square")
            return self._joined(node, first, second, "Mul")
        if isinstance(first, Scores) and isinstance(second, Known):
            return self._scaled_scores(node, first, second.array)
        raise Refusal("is not supported on these inputs", node)

    def _times(self, node: ir.Node, form: Form, known: Known) -> Form:
        base = self.gather.bases.only(form.ids[0]) if form.is_plain else None
        if isinstance(base, Normed) and base.gain is None and not known.varies:
            return self._with_gain(node, form, base, known)
        return form.scaled(known.array, varies=known.varies)

    def _with_gain(self, node: ir.Node, form: Form, base: Normed, known: Known) -> Form:
        placed = self._placed(node, form, 0)
        numbers = np.broadcast_to(known.array, form.shape)
        vector = feature_vector(placed, numbers, base.group)
        if vector is None or placed.rows is not base or base.parent is None:
            return form.scaled(known.array, varies=False)
        origin = node.outputs[0]
        gain = vector_value(self.writer, vector, known, f"{origin.name}_gain")
        rows = self.writer.normed(base.parent, base.group, base.epsilon, origin, gain)
        return placed.onto(rows, node)

    def _div(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        first, second = inputs
        if isinstance(first, Form) and isinstance(second, Known):
            inverse = 1.0 / second.array.astype(np.float64)
            return self._times(node, first, Known(inverse, second.varies))
        if isinstance(first, Form) and isinstance(second, Stat) and second.stage == "root":
            return self._normed(node, first, second)
        if isinstance(first, Known) and isinstance(second, Stat) and _is_one(first):
            return self._root(node, second, "Reciprocal")
        if isinstance(first, Scores) and isinstance(second, Known):
            return self._scaled_scores(node, first, 1.0 / second.array.astype(np.float64))
        if isinstance(first, Form) and isinstance(second, Form):
            return self._joined(node, first, second, "Div")
        raise Refusal("is not supported on these inputs", node)

    def _neg(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        (first,) = inputs
        if isinstance(first, Form):
            return first.scaled(np.asarray(-1.0), varies=False)
        raise Refusal("is not supported on these inputs", node)

    def _pow(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        first, second = inputs
        if not isinstance(second, Known) or second.array.size != 1 or second.varies:
            raise Refusal("raises to a power that is no constant", node)
        power = float(second.array.reshape(()))
        if isinstance(first, Stat):
            if power == 0.5:
                return self._root(node, first, "Sqrt")
            if power == -0.5 and first.stage == "mean":
                return first.at("inverse")
            raise Refusal("is not supported in a normalisation", node)
        if not isinstance(first, Form):
            raise Refusal("is not supported on these inputs", node)
        if power == 2.0 and not first.varies:
            return Stat(first, first.shape, "square")
        placed = self._placed(node, first, 0)
        exponent = self.writer.constant(f"factor_{power:.9g}", np.array(power))
        rows = self.writer.new([placed.rows], "Pow", node.outputs[0], constants=[exponent])
        return placed.onto(rows, node)

    def _mean(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        stat = inputs[0]
        axes: list[int] = []
        if len(inputs) > 1 and isinstance(inputs[1], Known):
            axes = [int(axis) for axis in inputs[1].array.reshape(-1)]
        elif "axes" in node.attributes:
            axes = list(node.attributes["axes"].as_ints())
        if not isinstance(stat, Stat) or stat.stage != "square":
            raise Refusal("takes a mean that is not the mean square of an RMSNorm", node)
        keep = node.attributes["keepdims"].as_int() if "keepdims" in node.attributes else 1
        if len(axes) != 1 or not keep:
            raise Refusal(f"takes a mean over axes {axes}", node)
        axis = axes[0] if axes[0] < 0 else axes[0] - len(stat.dims)
        dims = list(stat.dims)
        dims[axis] = 1
        return Stat(stat.source, tuple(dims), "mean", axis)

    def _root(self, node: ir.Node, stat: Stat, kind: str | None = None) -> Stat:
        following = {("Sqrt", "mean"): "root", ("Reciprocal", "root"): "inverse"}
        stage = following.get((kind or node.op_type, stat.stage))
        if stage is None:
            raise Refusal("is not supported in a normalisation", node)
        return stat.at(stage)

    def _normed(self, node: ir.Node, form: Form, stat: Stat) -> Form:
        """X / sqrt(mean(x^2) + eps), with a gain of one until it is multiplied."""
        if not _same(form, stat.source):
            raise Refusal("divides a tensor by the size of another one", node)
        return self._normalised(node, form, stat.axis, stat.epsilon, None)

    def _norm_operator(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        form, gain = inputs[:2]
        epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
        if not isinstance(form, Form) or not isinstance(gain, Known):
            raise Refusal("is not supported on these inputs", node)
        if axis not in {-1, len(form.shape) - 1} or gain.array.size != form.shape[-1]:
            raise Refusal("normalises over several axes", node)
        value = vector_value(
            self.writer, gain.array.reshape(-1), gain, f"{node.outputs[0].name}_gain"
        )
        return self._normalised(node, form, -1, epsilon, value)

    def _normalised(
        self, node: ir.Node, form: Form, axis: int, epsilon: float, gain: ir.Value | None
    ) -> Form:
        placed = self._placed(node, form, 0)
        group = form.shape[axis]
        feature = np.moveaxis(placed.feature, axis, -1)
        steps = np.broadcast_to(np.arange(group), feature.shape)
        if placed.rows.features % group or not np.array_equal(feature % group, steps):
            raise Refusal("normalises over something else than a token's or head's features", node)
        if (feature // group != feature[..., :1] // group).any():
            raise Refusal("normalises over features of several heads", node)
        rows = self.writer.normed(placed.rows, group, epsilon, node.outputs[0], gain)
        return placed.onto(rows, node)

    def _softmax(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        scores = inputs[0]
        if not isinstance(scores, Scores) or scores.stage != "scores":
            raise Refusal("is not of attention scores", node)
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
        if axis not in {-1, len(scores.shape) - 1}:
            raise Refusal(f"is over axis {axis} of attention scores", node)
        origins = (*scores.origins, ("weights", node.outputs[0]))
        return replace(scores, stage="probabilities", origins=origins)

    def _where(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        keep, first, second = inputs
        if isinstance(keep, Scores) and keep.stage == "nan" and isinstance(second, Scores):
            return second
        if isinstance(keep, Known) and isinstance(first, Scores) and isinstance(second, Known):
            return self.attention.selected(node, first, keep, second)
        if isinstance(keep, Known) and isinstance(first, Known) and isinstance(second, Scores):
            shown = Known(~keep.array.astype(bool), keep.varies)
            return self.attention.selected(node, second, shown, first)
        raise Refusal("selects by something that depends on the text", node)

    def _is_nan(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        scores = inputs[0]
        if isinstance(scores, Scores):
            return replace(scores, stage="nan")
        raise Refusal("is not supported on these inputs", node)

    def _swish(self, node: ir.Node, inputs: list[Abstract | None]) -> Abstract:
        """X * sigmoid(x), which has no operator in this opset."""
        alpha = node.attributes["alpha"].as_float() if "alpha" in node.attributes else 1.0
        if not isinstance(inputs[0], Form) or alpha != 1.0:
            raise Refusal("is not supported on these inputs", node)
        placed = self._placed(node, inputs[0], 0)
        origin = node.outputs[0]
        gate = self.writer.new([placed.rows], "Sigmoid", ir.Value(name=f"{origin.name}_sigmoid"))
        return placed.onto(self.writer.new([placed.rows, gate], "Mul", origin), node)

    def _scaled_scores(self, node: ir.Node, scores: Scores, factor: Numbers) -> Scores:
        if factor.size != 1 or scores.stage != "scores" or scores.masked:
            raise Refusal("scales masked attention scores, or each by another number", node)
        origins = (*scores.origins, ("scaled", node.outputs[0]))
        scale = scores.scale * float(factor.reshape(()))
        return replace(scores, scale=scale, origins=origins)

    def _placed(self, node: ir.Node, form: Form, index: int) -> Placed:
        origin = node.inputs[index]
        assert origin is not None  # noqa: S101  (it has a form)
        return self.gather.placed(form, origin)

    def _vector(self, node: ir.Node, placed: Placed, known: Known, period: int) -> Numbers:
        shape = placed.feature.shape
        if np.broadcast_shapes(shape, known.shape) != shape:
            raise Refusal(f"broadcasts an activation {shape} to {known.shape}", node)
        vector = feature_vector(placed, np.broadcast_to(known.array, shape), period)
        if vector is None:
            raise Refusal("adds other numbers to other tokens", node)
        return vector


def _is_one(known: Known) -> bool:
    return known.array.size == 1 and float(known.array.reshape(())) == 1.0


def _same(first: Form, second: Form) -> bool:
    if first is second:
        return True
    return (
        first.is_plain
        and second.is_plain
        and first.shape == second.shape
        and np.array_equal(first.ids[0], second.ids[0])
    )
