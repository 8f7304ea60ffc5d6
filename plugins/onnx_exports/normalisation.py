"""RMSNorm, as one operator or step by step: x / sqrt(mean(x^2) + eps), times a gain."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from buildlib.graph.folding import Refusal
from buildlib.graph.values import operand
from plugins.onnx_exports.projections import vector_value
from plugins.onnx_exports.resolver import ActivationResolver, Placement, feature_vector
from plugins.onnx_exports.root_tensors import NormedActivation
from plugins.onnx_exports.values import AbstractValue, Concrete, LinearForm, NormStep
from plugins.onnx_exports.writer import Writer


class Normalisations:
    """Recognises normalisations, and writes each once its gain is known."""

    def __init__(self, writer: Writer, resolver: ActivationResolver) -> None:
        self.writer = writer
        self.resolver = resolver

    def mean(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        """Take the mean of squares."""
        stat = inputs[0]
        axes: list[int] = []
        if len(inputs) > 1 and isinstance(inputs[1], Concrete):
            axes = [int(axis) for axis in inputs[1].array.reshape(-1)]
        elif "axes" in node.attributes:
            axes = list(node.attributes["axes"].as_ints())
        if not isinstance(stat, NormStep) or stat.stage != "square":
            raise Refusal("takes a mean that is not the mean square of an RMSNorm", node)
        keep = node.attributes.get_int("keepdims", 1)
        if len(axes) != 1 or not keep:
            raise Refusal(f"takes a mean over axes {axes}", node)
        axis = axes[0] if axes[0] < 0 else axes[0] - len(stat.dims)
        dims = list(stat.dims)
        dims[axis] = 1
        return replace(stat, dims=tuple(dims), stage="mean", axis=axis)

    def root(self, node: ir.Node, stat: NormStep, kind: str | None = None) -> NormStep:
        """Take the root of the mean, or its inverse."""
        following = {("Sqrt", "mean"): "root", ("Reciprocal", "root"): "inverse"}
        stage = following.get((kind or node.op_type, stat.stage))
        if stage is None:
            raise Refusal("is not supported in a normalisation", node)
        return replace(stat, stage=stage)

    def normed(self, node: ir.Node, form: LinearForm, stat: NormStep, index: int) -> LinearForm:
        """Divide x by sqrt(mean(x^2) + eps), with a gain of one until it is multiplied."""
        if not same_form(form, stat.source):
            raise Refusal("divides a tensor by the size of another one", node)
        placed = self.resolver.resolve(form, operand(node, index))
        return self._normalised(node, form, placed, stat.axis, stat.epsilon)

    def operator(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        """Interpret a normalisation that is one operator."""
        form, gain = inputs[:2]
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        axis = node.attributes.get_int("axis", -1)
        if not isinstance(form, LinearForm) or not isinstance(gain, Concrete):
            raise Refusal("is not supported on these inputs", node)
        if axis not in {-1, len(form.shape) - 1} or gain.array.size != form.shape[-1]:
            raise Refusal("normalises over several axes", node)
        value = vector_value(
            self.writer, gain.array.reshape(-1), gain, f"{node.outputs[0].name}_gain"
        )
        placed = self.resolver.resolve(form, operand(node, 0))
        return self._normalised(node, form, placed, -1, epsilon, value)

    def with_gain(
        self,
        node: ir.Node,
        form: LinearForm,
        base: NormedActivation,
        concrete: Concrete,
        index: int,
    ) -> LinearForm:
        """Multiply a normalised activation with a number for each of its features."""
        placed = self.resolver.resolve(form, operand(node, index))
        numbers = np.broadcast_to(concrete.array, form.shape)
        vector = feature_vector(placed, numbers, base.group)
        if vector is None or placed.rows is not base:
            return form.scaled(concrete.array, varies=False)
        origin = node.outputs[0]
        gain = vector_value(self.writer, vector, concrete, f"{origin.name}_gain")
        rows = self.writer.norm(base.parent, base.group, base.epsilon, origin, gain)
        return placed.move_to(rows, node)

    def _normalised(
        self,
        node: ir.Node,
        form: LinearForm,
        placed: Placement,
        axis: int,
        epsilon: float,
        gain: ir.Value | None = None,
    ) -> LinearForm:
        group = form.shape[axis]
        feature = np.moveaxis(placed.feature, axis, -1)
        steps = np.broadcast_to(np.arange(group), feature.shape)
        if placed.rows.features % group or not np.array_equal(feature % group, steps):
            raise Refusal("normalises over something else than a token's or head's features", node)
        if (feature // group != feature[..., :1] // group).any():
            raise Refusal("normalises over features of several heads", node)
        rows = self.writer.norm(placed.rows, group, epsilon, node.outputs[0], gain)
        return placed.move_to(rows, node)


def same_form(first: LinearForm, second: LinearForm) -> bool:
    """Return whether both are the same elements, unchanged."""
    if first is second:
        return True
    return (
        first.is_plain
        and second.is_plain
        and first.shape == second.shape
        and np.array_equal(first.ids[0], second.ids[0])
    )
