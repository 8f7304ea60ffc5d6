"""Writer of the canonical graph, value by value, as the source is interpreted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of, inherit, set_encoding
from buildlib.graph import interface
from buildlib.graph.builder import GraphBuilder
from buildlib.graph.folding import Refusal
from buildlib.graph.values import static_shape, tensor_value
from plugins.onnx_exports.encoding_transfer import reshape_encoding
from plugins.onnx_exports.root_tensors import (
    Activation,
    NormedActivation,
    ProjectedActivation,
    RootTensors,
)
from plugins.onnx_exports.values import dims_in_file

_RESERVED = {
    interface.INPUT_IDS,
    interface.ATTENTION_MASK,
    interface.COS,
    interface.SIN,
    interface.LOGITS,
}


class Writer:
    """A `GraphBuilder` that knows activations with and without the leading 1.

    Activations between layers are [1, AR, features], those between projections [AR, features].
    """

    def __init__(self, roots: RootTensors) -> None:
        self.builder = GraphBuilder()
        self.roots = roots
        self._names: set[str] = set()

    def name(self, stem: str) -> str:
        """Return `stem`, with a number if it is taken."""
        name, count = stem, 1
        while name in self._names or name in _RESERVED or interface.is_kv(name):
            count += 1
            name = f"{stem}_{count}"
        self._names.add(name)
        return name

    def op(self, op_type: str, inputs: list[ir.Value], name: str, **attributes: object) -> ir.Value:
        """Add a node with one output."""
        return self.builder.op(op_type, inputs, self.name(name), **attributes)

    def value(self, rows: Activation, *, stacked: bool) -> ir.Value:
        """Return the canonical value of an activation, [1, AR, features] or [AR, features]."""
        if rows.value is None:
            rows.value = inherit(rows.write(), rows.origin)
        if rows.stacked == stacked:
            return rows.value
        if rows.twin is None:
            dims = (1, -1, rows.features) if stacked else (-1, rows.features)
            name = f"{rows.value.name}_{'stacked' if stacked else 'flat'}"
            shape = self.builder.shape(*dims)
            rows.twin = inherit(self.op("Reshape", [rows.value, shape], name), rows.value)
        return rows.twin

    def elementwise(
        self,
        inputs: Sequence[Activation],
        op_type: str,
        origin: ir.Value,
        constants: Sequence[ir.Value] = (),
        **attributes: object,
    ) -> Activation:
        """Write an elementwise operator on activations, and on constants after them."""
        stacked = any(rows.stacked for rows in inputs)
        features = max(rows.features for rows in inputs)
        values = [self.value(rows, stacked=stacked) for rows in inputs]
        result = self.op(op_type, [*values, *constants], str(origin.name), **attributes)
        return self.activation(result, origin, features, stacked=stacked)

    def activation(
        self, value: ir.Value, origin: ir.Value, features: int, *, stacked: bool = False
    ) -> Activation:
        """Register a value that is already in the canonical graph."""
        inherit(value, origin)
        return self.roots.add(
            Activation(
                self.roots.ar * features, origin, features, lambda: value, stacked, value=value
            )
        )

    def projection(
        self,
        parent: Activation,
        weight: ir.Value,
        origin: ir.Value,
        *,
        transposed: bool,
        bias: ir.Value | None = None,
    ) -> ProjectedActivation:
        """Register x times a weight; it is written once no bias can follow."""
        rows, columns = static_shape(weight) or (0, 0)
        features = rows if transposed else columns
        base = ProjectedActivation(
            self.roots.ar * features,
            origin,
            features,
            lambda: self._write_projected(base),
            parent=parent,
            weight=weight,
            transposed=transposed,
            bias=bias,
        )
        self.value(parent, stacked=False)
        return self.roots.add(base)

    def norm(
        self,
        parent: Activation,
        group: int,
        epsilon: float,
        origin: ir.Value,
        gain: ir.Value | None,
    ) -> NormedActivation:
        """Register x normalised by groups of features; it is written once its gain is known."""
        base = NormedActivation(
            parent.size,
            origin,
            parent.features,
            lambda: self._write_normed(base),
            stacked=parent.stacked and group == parent.features,
            parent=parent,
            group=group,
            epsilon=epsilon,
            gain=gain,
        )
        self.value(parent, stacked=parent.stacked)
        return self.roots.add(base)

    def rms_norm(self, value: ir.Value, base: NormedActivation, name: str) -> ir.Value:
        """Write the normalisation over the last dimension of `value`."""
        gain = base.gain or self.constant(f"ones_{base.group}", np.ones(base.group, np.float32))
        return self.op("RMSNormalization", [value, gain], name, axis=-1, epsilon=base.epsilon)

    def constant(self, name: str, array: npt.NDArray[Any]) -> ir.Value:
        """Return a small float32 initializer; equal ones are shared."""
        array = np.asarray(array, dtype=np.float32)
        twin = self.builder.initializers.get(name)
        if twin is not None:
            tensor = twin.const_value
            assert tensor is not None  # noqa: S101  (initializers have numbers)
            if np.array_equal(tensor.numpy(), array):
                return twin
            name = self.name(name)
        self._names.add(name)
        return self.builder.constant(name, array)

    def factor(self, number: float) -> ir.Value:
        """Return a float32 initializer of one number."""
        return self.constant(f"factor_{number:.9g}", np.array(number))

    def parameter(self, source: ir.Value, dims: tuple[int, ...]) -> ir.Value:
        """Return an initializer of the source as float32 of shape `dims`, on the same bytes."""
        name = str(source.name)
        parameter = self.builder.initializers.get(name)
        if parameter is None:
            tensor = source.const_value
            assert tensor is not None  # noqa: S101  (initializers have numbers)
            if not source.is_initializer() and not np.isfinite(tensor.numpy()).all():
                raise Refusal(f"constant {name} holds what is not finite")
            parameter = tensor_value(_reshaped(tensor, dims), name)
            self._names.add(name)
            self.builder.initializers[name] = parameter
        encoding = encoding_of(source)
        if encoding is not None:  # at a later use the source may have one that it had not before
            set_encoding(parameter, reshape_encoding(encoding, dims_in_file(source), dims))
        if parameter.dtype == ir.DataType.FLOAT:
            return parameter
        users = parameter.consumers()
        cast = next((user.outputs[0] for user in users if user.op_type == "Cast"), None)
        if cast is None:
            cast = self.op("Cast", [parameter], f"{name}_f32", to=ir.DataType.FLOAT.value)
            cast.shape = ir.Shape(dims)
        return cast

    def _write_projected(self, base: ProjectedActivation) -> ir.Value:
        inputs = [self.value(base.parent, stacked=False), base.weight]
        if base.bias is not None:
            inputs.append(base.bias)
        return self.op("Gemm", inputs, str(base.origin.name), transB=int(base.transposed))

    def _write_normed(self, base: NormedActivation) -> ir.Value:
        name = str(base.origin.name)
        if base.group == base.features:
            value = self.value(base.parent, stacked=base.stacked)
            return self.rms_norm(value, base, name)
        flat = self.value(base.parent, stacked=False)
        dims = self.builder.shape(-1, base.features // base.group, base.group)
        grouped = self.op("Reshape", [flat, dims], f"{name}_grouped")
        normed = self.rms_norm(grouped, base, f"{name}_by_group")
        return self.op("Reshape", [normed, self.builder.shape(-1, base.features)], name)


def _reshaped(tensor: ir.TensorProtocol, dims: tuple[int, ...]) -> ir.TensorProtocol:
    if tuple(tensor.shape.numpy()) == dims:
        return tensor
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            location=tensor.location,
            offset=tensor.offset,
            length=tensor.length,
            dtype=tensor.dtype,
            shape=ir.Shape(dims),
            name=str(tensor.name),
            base_dir=tensor.base_dir,
        )
    return ir.tensor(tensor.numpy().reshape(dims), dtype=tensor.dtype, name=tensor.name)
