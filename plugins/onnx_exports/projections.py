"""Projections in any spelling: MatMul, Gemm, and Conv with a kernel of one."""

import numpy as np
import onnx_ir as ir

from buildlib.graph.folding import Refusal
from buildlib.graph.values import operand
from plugins.onnx_exports.resolver import ActivationResolver, unbiased_projection
from plugins.onnx_exports.root_tensors import Activation
from plugins.onnx_exports.values import AbstractValue, Concrete, LinearForm, Numbers, Weight
from plugins.onnx_exports.writer import Writer


class Projections:
    """Writes each projection as a Gemm on the weight's own bytes."""

    def __init__(self, writer: Writer, resolver: ActivationResolver) -> None:
        self.writer = writer
        self.resolver = resolver

    def matmul(self, node: ir.Node, form: LinearForm, weight: Weight) -> LinearForm:
        """Multiply [..., in] with [in, out]."""
        if len(weight.dims) != 2:
            raise Refusal(f"multiplies with a weight of shape {list(weight.dims)}", node)
        return self._project(node, form, weight, transposed=weight.transposed)

    def gemm(
        self, node: ir.Node, form: LinearForm, weight: Weight, bias: AbstractValue | None
    ) -> LinearForm:
        """Multiply [rows, in] with [in, out], or with [out, in] if transB."""
        numbers = {name: node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")}
        flags = {name: bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB")}
        if flags["transA"] or set(numbers.values()) != {1.0}:
            raise Refusal("transposes or scales its inputs", node)
        transposed = weight.transposed != flags["transB"]
        return self._project(node, form, weight, transposed=transposed, bias=bias)

    def conv(
        self, node: ir.Node, form: LinearForm, weight: Weight, bias: AbstractValue | None
    ) -> LinearForm:
        """Interpret a convolution of [1, in, ...] with a kernel [out, in, 1, ...] as a Linear."""
        dims = weight.dims
        plain = all(
            set(node.attributes[name].as_ints()) == {neutral}
            for name, neutral in (("strides", 1), ("dilations", 1), ("pads", 0))
            if name in node.attributes
        )
        group = node.attributes.get_int("group", 1)
        if set(dims[2:]) - {1} or not plain or group != 1:
            raise Refusal(f"is a convolution with kernel {list(dims)}, not a Linear", node)
        rows = form.moved(lambda part: np.moveaxis(part, 1, -1))
        flat = Weight(weight.source, dims[:2], weight.transposed)
        result = self._project(node, rows, flat, transposed=not weight.transposed, bias=bias)
        return result.moved(lambda part: np.moveaxis(part, -1, 1))

    def bias(
        self, rows: Activation, numbers: Numbers, source: Concrete, origin: ir.Value
    ) -> Activation | None:
        """Add a bias [out] to a projection; return None if `rows` is not one without a bias."""
        projected = unbiased_projection(rows)
        if projected is None:
            return None
        value = vector_value(self.writer, numbers, source, f"{origin.name}_bias")
        return self.writer.projection(
            projected.parent, projected.weight, origin, transposed=projected.transposed, bias=value
        )

    def _project(
        self,
        node: ir.Node,
        form: LinearForm,
        weight: Weight,
        *,
        transposed: bool,
        bias: AbstractValue | None = None,
    ) -> LinearForm:
        swapped = transposed != weight.transposed
        width_in, width_out = weight.dims[::-1] if swapped else weight.dims
        placed = self.resolver.resolve(form, operand(node, 0))
        rows, feature = placed.rows, placed.feature
        if form.shape[-1] != width_in or rows.features != width_in:
            sizes = f"{form.shape[-1]} of {rows.features}"
            raise Refusal(f"projects {sizes} features by {width_in} x {width_out}", node)
        if not np.array_equal(feature, np.broadcast_to(np.arange(width_in), feature.shape)):
            raise Refusal("projects features in another order than they were made", node)
        dims = (width_out, width_in) if transposed else (width_in, width_out)
        base = self.writer.projection(
            rows,
            self.writer.parameter(weight.source, dims),
            node.outputs[0],
            transposed=transposed,
            bias=None,
        )
        if bias is not None:
            concrete = bias.concrete if isinstance(bias, Weight) else bias
            if not isinstance(concrete, Concrete) or concrete.array.size != width_out:
                raise Refusal("has a bias that is no parameter of its width", node)
            name = f"{node.outputs[0].name}_bias"
            base.bias = vector_value(self.writer, concrete.array.reshape(-1), concrete, name)
        token = placed.token[..., :1]
        return LinearForm((base.offset + token * width_out + np.arange(width_out),))


def vector_value(writer: Writer, numbers: Numbers, source: Concrete, name: str) -> ir.Value:
    """Return a vector in the canonical graph, the source's own initializer if equal."""
    if source.source is not None and np.array_equal(source.array.reshape(-1), numbers):
        return writer.parameter(source.source, (numbers.size,))
    return writer.constant(name, numbers)
