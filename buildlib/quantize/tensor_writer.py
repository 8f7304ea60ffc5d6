"""safetensors file of new float32 weights, written tensor by tensor, for models beside it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.closeable import Closeable
from buildlib.encodings.attachment import inherit
from buildlib.files import sync_file

_ALIGNMENT = 64


class TensorWriter(Closeable):
    """A safetensors file with tensors that are written and read in any order.

    Args:
        path: made at once, in its full size; it is on disk when the block ends.
        shapes: of all its tensors by name.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path = path
        self._shapes = dict(shapes)
        self._offsets: dict[str, int] = {}
        header, offset = {}, 0
        for name, shape in self._shapes.items():
            end = offset + 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
            self._offsets[name], offset = offset, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self._start = 8 + len(text)
        with path.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(self._start + offset)

    def close(self) -> None:
        """Bring the file to the disk."""
        sync_file(self.path)

    def write(self, name: str, array: npt.NDArray[Any], start: int = 0) -> None:
        """Write rows of a tensor, from row `start` on."""
        shape = self._shapes[name]
        place = self._start + self._offsets[name] + 4 * start * math.prod(shape[1:])
        with self.path.open("r+b") as file:
            file.seek(place)
            file.write(np.ascontiguousarray(array, np.float32).data)

    def tensor(self, name: str) -> ir.ExternalTensor:
        """Return a tensor of the file for a model, written or not."""
        shape = self._shapes[name]
        return ir.ExternalTensor(
            location=self.path.name,
            offset=self._start + self._offsets[name],
            length=4 * math.prod(shape),
            dtype=ir.DataType.FLOAT,
            shape=ir.Shape(shape),
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
