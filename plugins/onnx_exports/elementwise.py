"""Elementwise operators: residuals, biases, activations, scales, masks, rotations."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from buildlib.graph.folding import Refusal
from buildlib.graph.values import operand
from plugins.onnx_exports.attention import Attention
from plugins.onnx_exports.normalisation import Normalisations, same_form
from plugins.onnx_exports.projections import Projections, vector_value
from plugins.onnx_exports.resolver import ActivationResolver, Placement, feature_vector
from plugins.onnx_exports.root_tensors import NormedActivation
from plugins.onnx_exports.values import (
    AbstractValue,
    AttentionScores,
    Concrete,
    LinearForm,
    NormStep,
    Numbers,
    Weight,
)
from plugins.onnx_exports.writer import Writer

_UNARY = frozenset({
    "Sigmoid", "Tanh", "Relu", "Erf", "Exp", "Softplus", "Gelu", "HardSwish", "HardSigmoid",
    "LeakyRelu", "Elu", "Abs", "Softsign", "Mish", "Selu", "Celu", "Sqrt", "Reciprocal",
})  # fmt: skip

Handler = Callable[[ir.Node, list[AbstractValue | None]], AbstractValue]


class Elementwise:
    """Interprets operators that compute each element from the elements in its place."""

    def __init__(
        self,
        writer: Writer,
        resolver: ActivationResolver,
        projections: Projections,
        attention: Attention,
    ) -> None:
        self.writer = writer
        self.resolver = resolver
        self.projections = projections
        self.attention = attention
        self.norms = Normalisations(writer, resolver)
        self._handlers: dict[str, Handler] = {
            "Add": self._add,
            "Sub": self._sub,
            "Mul": self._mul,
            "Div": self._div,
            "Neg": self._neg,
            "Pow": self._pow,
            "ReduceMean": self.norms.mean,
            "Softmax": self._softmax,
            "Where": self._where,
            "IsNaN": self._is_nan,
            "Swish": self._swish,
            "SimplifiedLayerNormalization": self.norms.operator,
            "RMSNormalization": self.norms.operator,
        }

    def apply(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        """Return the result of `node`."""
        first = inputs[0]
        handler = self._handlers.get(node.op_type)
        if handler is not None:
            concrete = [part.concrete if isinstance(part, Weight) else part for part in inputs]
            return handler(node, list(concrete))
        if isinstance(first, NormStep) and node.op_type in {"Sqrt", "Reciprocal"}:
            return self.norms.root(node, first)
        if isinstance(first, AttentionScores) and node.op_type == "Tanh":
            return _bounded(node, first)
        if node.op_type in _UNARY and isinstance(first, LinearForm):
            values = {name: attribute.value for name, attribute in node.attributes.items()}
            return self._each(node, first, node.op_type, **values)
        raise Refusal("is not supported", node)

    def of_op_package(self, node: ir.Node, inputs: list[AbstractValue | None]) -> LinearForm:
        """Keep an operation of an op package, with its function in the model."""
        first = inputs[0] if len(inputs) == 1 else None
        if not isinstance(first, LinearForm) or len(node.outputs) != 1 or node.attributes:
            raise Refusal(
                "is an operation of an op package: onnxruntime-qnn compiles those of one activation"
                " in and one out, without attributes, others need the QAIRT SDK",
                node,
            )
        return self._each(node, first, f"{node.domain}::{node.op_type}")

    def _each(
        self,
        node: ir.Node,
        form: LinearForm,
        op_type: str,
        *constants: ir.Value,
        **attributes: object,
    ) -> LinearForm:
        placed, origin = self.resolver.resolve(form, operand(node, 0)), node.outputs[0]
        rows = self.writer.elementwise([placed.rows], op_type, origin, constants, **attributes)
        return placed.move_to(rows, node)

    def _add(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        first, second = inputs
        index = 0
        if isinstance(first, Concrete):
            first, second, index = second, first, 1
        match first, second:
            case LinearForm() as form, LinearForm() as other:
                return self._sum(node, form, other, "Add")
            case AttentionScores() as scores, Concrete() as mask:
                return self.attention.add_mask(node, scores, mask)
            case NormStep(stage="mean") as mean, Concrete() as epsilon:
                if epsilon.array.size != 1:
                    raise Refusal("adds several numbers to a mean square", node)
                return replace(mean, epsilon=mean.epsilon + float(epsilon.array.reshape(())))
            case LinearForm() as form, Concrete() as bias:
                return self._plus(node, form, bias, index)
        raise Refusal("is not supported on these inputs", node)

    def _plus(
        self, node: ir.Node, form: LinearForm, concrete: Concrete, index: int = 0
    ) -> LinearForm:
        if concrete.varies:
            raise Refusal("adds numbers that depend on positions (learned positions?)", node)
        origin = node.outputs[0]
        placed = self.resolver.resolve(form, operand(node, index))
        vector = self._vector(node, placed, concrete, placed.rows.features)
        biased = self.projections.bias(placed.rows, vector, concrete, origin)
        if biased is not None:
            return placed.move_to(biased, node)
        value = vector_value(self.writer, vector, concrete, f"{origin.name}_added")
        return placed.move_to(
            self.writer.elementwise([placed.rows], "Add", origin, constants=[value]), node
        )

    def _sub(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        first, second = inputs
        if isinstance(first, LinearForm) and isinstance(second, LinearForm):
            return self._sum(node, first, second, "Sub")
        if isinstance(first, LinearForm) and isinstance(second, Concrete):
            return self._plus(node, first, Concrete(-second.array, second.varies))
        raise Refusal("is not supported on these inputs", node)

    def _sum(self, node: ir.Node, first: LinearForm, second: LinearForm, kind: str) -> LinearForm:
        if first.varies or second.varies:
            return first.plus(second, 1.0 if kind == "Add" else -1.0)
        return self._joined(node, first, second, kind)

    def _joined(
        self, node: ir.Node, first: LinearForm, second: LinearForm, kind: str
    ) -> LinearForm:
        left, right = (
            self.resolver.resolve(first, operand(node, 0)),
            self.resolver.resolve(second, operand(node, 1)),
        )
        if first.shape != second.shape or not np.array_equal(left.local, right.local):
            raise Refusal(
                f"joins tensors {first.shape} and {second.shape} in different order", node
            )
        rows = self.writer.elementwise([left.rows, right.rows], kind, node.outputs[0])
        return left.move_to(rows, node)

    def _mul(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        first, second = inputs
        index = 0
        if isinstance(first, Concrete | NormStep) and not isinstance(second, Concrete):
            first, second, index = second, first, 1
        match first, second:
            case LinearForm() as form, Concrete() as factor:
                return self._times(node, form, factor, index)
            case LinearForm() as form, NormStep(stage="inverse") as step:
                return self.norms.normed(node, form, step, index)
            case LinearForm() as form, NormStep(stage="square", source=source) if same_form(
                form, source
            ):
                return self._cubed(node, form)
            case LinearForm() as form, LinearForm() as other:
                if not form.varies and same_form(form, other):
                    return NormStep(form, form.shape, "square")
                return self._joined(node, form, other, "Mul")
            case AttentionScores() as scores, Concrete() as factor:
                return self._scaled_scores(node, scores, factor.array)
        raise Refusal("is not supported on these inputs", node)

    def _cubed(self, node: ir.Node, form: LinearForm) -> LinearForm:
        """Write x * x * x, of which x * x is no step of a normalisation."""
        placed = self.resolver.resolve(form, node.outputs[0])
        rows, name = placed.rows, f"{node.outputs[0].name}_square"
        squares = self.writer.elementwise([rows, rows], "Mul", ir.Value(name=name))
        return placed.move_to(
            self.writer.elementwise([squares, rows], "Mul", node.outputs[0]), node
        )

    def _times(
        self, node: ir.Node, form: LinearForm, concrete: Concrete, index: int = 0
    ) -> LinearForm:
        base = self.resolver.roots.single_owner(form.ids[0]) if form.is_plain else None
        if isinstance(base, NormedActivation) and base.gain is None and not concrete.varies:
            return self.norms.with_gain(node, form, base, concrete, index)
        varies = concrete.varies or self.resolver.differs_by_token(form, concrete.array)
        return form.scaled(concrete.array, varies=varies)

    def _div(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        match inputs:
            case LinearForm() as form, Concrete() as divisor:
                return self._times(node, form, Concrete(_inverse(node, divisor), divisor.varies))
            case LinearForm() as form, NormStep(stage="root") as root:
                return self.norms.normed(node, form, root, 0)
            case Concrete() as numerator, NormStep() as step if _is_one(numerator):
                return self.norms.root(node, step, "Reciprocal")
            case AttentionScores() as scores, Concrete() as divisor:
                return self._scaled_scores(node, scores, _inverse(node, divisor))
            case LinearForm() as form, LinearForm() as other:
                return self._joined(node, form, other, "Div")
        raise Refusal("is not supported on these inputs", node)

    def _neg(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        (first,) = inputs
        if isinstance(first, LinearForm):
            return first.scaled(np.asarray(-1.0), varies=False)
        raise Refusal("is not supported on these inputs", node)

    def _pow(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        first, second = inputs
        if not isinstance(second, Concrete) or second.array.size != 1 or second.varies:
            raise Refusal("raises to a power that is no constant", node)
        power = float(second.array.reshape(()))
        if isinstance(first, NormStep):
            if power == 0.5:
                return self.norms.root(node, first, "Sqrt")
            if power == -0.5 and first.stage == "mean":
                return replace(first, stage="inverse")
            raise Refusal("is not supported in a normalisation", node)
        if not isinstance(first, LinearForm):
            raise Refusal("is not supported on these inputs", node)
        if power == 2.0 and not first.varies:
            return NormStep(first, first.shape, "square")
        if power == 3.0 and not first.varies:
            return self._cubed(node, first)
        return self._each(node, first, "Pow", self.writer.factor(power))

    def _softmax(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        scores = inputs[0]
        if not isinstance(scores, AttentionScores) or scores.stage != "scores":
            raise Refusal("is not of attention scores", node)
        axis = node.attributes.get_int("axis", -1)
        if axis not in {-1, len(scores.shape) - 1}:
            raise Refusal(f"is over axis {axis} of attention scores", node)
        return scores.after("weights", node.outputs[0], stage="probabilities")

    def _where(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        match inputs:
            case AttentionScores(stage="nan"), _, AttentionScores() as scores:
                return scores
            case Concrete() as keep, AttentionScores() as scores, Concrete() as other:
                return self.attention.select(node, scores, keep, other)
            case Concrete() as hide, Concrete() as other, AttentionScores() as scores:
                keep = Concrete(~hide.array.astype(bool), hide.varies)
                return self.attention.select(node, scores, keep, other)
        raise Refusal("selects by something that depends on the text", node)

    def _is_nan(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        scores = inputs[0]
        if isinstance(scores, AttentionScores):
            return replace(scores, stage="nan")
        raise Refusal("is not supported on these inputs", node)

    def _swish(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        """Write x * sigmoid(x), which has no operator in this opset."""
        alpha = node.attributes.get_float("alpha", 1.0)
        if not isinstance(inputs[0], LinearForm) or alpha != 1.0:
            raise Refusal("is not supported on these inputs", node)
        placed = self.resolver.resolve(inputs[0], operand(node, 0))
        origin = node.outputs[0]
        gate = self.writer.elementwise(
            [placed.rows], "Sigmoid", ir.Value(name=f"{origin.name}_sigmoid")
        )
        return placed.move_to(self.writer.elementwise([placed.rows, gate], "Mul", origin), node)

    def _scaled_scores(
        self, node: ir.Node, scores: AttentionScores, factor: Numbers
    ) -> AttentionScores:
        if factor.size != 1 or scores.stage != "scores" or scores.masked:
            raise Refusal("scales masked attention scores, or each by another number", node)
        scale = scores.scale * float(factor.reshape(()))
        return scores.after("scaled", node.outputs[0], scale=scale)

    def _vector(self, node: ir.Node, placed: Placement, concrete: Concrete, period: int) -> Numbers:
        shape = placed.feature.shape
        if np.broadcast_shapes(shape, concrete.shape) != shape:
            raise Refusal(f"broadcasts an activation {shape} to {concrete.shape}", node)
        vector = feature_vector(placed, np.broadcast_to(concrete.array, shape), period)
        if vector is None:
            raise Refusal("adds other numbers to other tokens", node)
        return vector


def _bounded(node: ir.Node, scores: AttentionScores) -> AttentionScores:
    """Bound scores by their hyperbolic tangent, once and before the mask."""
    if scores.stage != "scores" or scores.masked or scores.bounded is not None:
        raise Refusal("bounds masked attention scores, or bounds them twice", node)
    roles = {"scaled": "to_bound"}
    origins = tuple((roles.get(role, role), value) for role, value in scores.origins)
    to_bound = replace(scores, scale=1.0, bounded=scores.scale, origins=origins)
    return to_bound.after("bounded", node.outputs[0])


def _inverse(node: ir.Node, concrete: Concrete) -> Numbers:
    if not concrete.array.all():
        raise Refusal("divides by zero", node)
    inverse: Numbers = 1.0 / concrete.array.astype(np.float64)
    return inverse


def _is_one(concrete: Concrete) -> bool:
    return concrete.array.size == 1 and float(concrete.array.reshape(())) == 1.0
