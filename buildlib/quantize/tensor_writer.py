"""safetensors file of new float32 weights, written tensor by tensor, for models beside it."""

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from buildlib.checkpoint.tensor_file import SafetensorsWriter
from buildlib.encodings.attachment import inherit


class TensorWriter(SafetensorsWriter):
    """A safetensors file of float32, whose tensors are the constants of a model."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(path, {name: ("F32", shape) for name, shape in shapes.items()})

    def tensor(self, name: str) -> ir.ExternalTensor:
        """Return a tensor of the file for a model, written or not."""
        ref = self.ref(name)
        return ir.ExternalTensor(
            location=self.path.name,
            offset=ref.offset,
            length=ref.n_bytes,
            dtype=ir.DataType.FLOAT,
            shape=ir.Shape(ref.shape),
            name=name,
            base_dir=self.path.parent,
        )


def replace_constant(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> None:
    """Give the constant `name` float32 values of its shape; casts of the old ones go, in place."""
    old = graph.initializers.pop(name)
    new = inherit(ir.val(name, const_value=tensor), old)
    for node, index in tuple(old.uses()):
        if node.op_type != "Cast":
            node.replace_input_with(index, new)
            continue
        for user, place in tuple(node.outputs[0].uses()):
            user.replace_input_with(place, new)
        node.replace_input_with(0, None)
        graph.remove(node)
    graph.register_initializer(new)
