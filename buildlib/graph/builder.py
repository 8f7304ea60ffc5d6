"""Builder of onnx_ir graphs: named single-output nodes, weights by reference."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.tensor_file import StoredDtype, TensorRef
from buildlib.graph.values import tensor_value

OPSET = 23
"""The first with RMSNormalization, which the NPU runs as one operator at full precision."""

IR_VERSION = 10

_DTYPES: dict[StoredDtype, ir.DataType] = {
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "F32": ir.DataType.FLOAT,
}


class GraphBuilder:
    """Collects nodes and initializers; every node is named after its first output."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}

    def input(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        """Make a graph input; the caller keeps the inputs in order."""
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))

    def op(self, op_type: str, inputs: list[ir.Value], name: str, **attributes: Any) -> ir.Value:  # noqa: ANN401
        """Add a node with one float output called `name`."""
        return self.ops(op_type, inputs, (name,), **attributes)[0]

    def ops(
        self,
        op_type: str,
        inputs: list[ir.Value],
        names: tuple[str, ...],
        **attributes: Any,  # noqa: ANN401
    ) -> tuple[ir.Value, ...]:
        """Add a node with the float outputs `names`.

        Args:
            op_type: of ONNX, or `my.package::Scale` of another domain.
            inputs: of the node.
            names: of its outputs, the first also its own.
            attributes: of the node.
        """
        domain, _, kind = op_type.rpartition("::")
        outputs = [ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in names]
        self.nodes.append(
            ir.node(kind, inputs, attributes, outputs=outputs, name=names[0], domain=domain)
        )
        return tuple(outputs)

    def constant(self, name: str, array: npt.NDArray[Any]) -> ir.Value:
        """Add a small initializer inside the model file, or return the one of that name."""
        return self._initializer(name, ir.Tensor(array, name=name))

    def ints(self, *numbers: int) -> list[ir.Value]:
        """Add int64 initializers of one number each, such as the bounds of a Slice."""
        return [self.constant(f"int_{n}", np.array([n], dtype=np.int64)) for n in numbers]

    def factor(self, number: float) -> ir.Value:
        """Add a float32 initializer of one number."""
        return self.constant(f"factor_{number:.9g}", np.array(number, dtype=np.float32))

    def shape(self, *dims: int) -> ir.Value:
        """Add a target shape for Reshape; -1 stands for the one dimension that follows AR."""
        name = "shape_" + "_".join("ar" if dim < 0 else str(dim) for dim in dims)
        return self.constant(name, np.array(dims, dtype=np.int64))

    def weight(self, ref: TensorRef, name: str | None = None) -> ir.Value:
        """Return a float32 value of a tensor whose bytes stay in the checkpoint."""
        name = name or ref.name
        dtype = _DTYPES[ref.dtype]
        tensor = ir.ExternalTensor(
            location=ref.path.name,
            offset=ref.offset,
            length=ref.n_bytes,
            dtype=dtype,
            shape=ir.Shape(ref.shape),
            name=name,
            base_dir=ref.path.parent,
        )
        value = self._initializer(name, tensor)
        if dtype == ir.DataType.FLOAT:
            return value
        return self.op("Cast", [value], f"{name}_f32", to=ir.DataType.FLOAT.value)

    def model(self, inputs: list[ir.Value], outputs: list[ir.Value], name: str) -> ir.Model:
        """Build the model of everything added."""
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports={"": OPSET},
            name=name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="qnnfarm")

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        if name not in self.initializers:
            self.initializers[name] = tensor_value(tensor, name)
        return self.initializers[name]
