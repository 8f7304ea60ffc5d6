"""ONNX in an opset that the SDK's converter reads.

"Qairt Converter" (docs.qualcomm.com 80-63442-2, revision BL) has opset 21 as the last, later
documents 22 and 24. The graphs here are of 23, for RMSNormalization alone: written out, it has the
form of exports of older opsets, from which converters are documented to infer QNN's operation.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from buildlib.errors import InputFileError

if TYPE_CHECKING:
    import onnx

OPSET: Final = 21
_NORM: Final = "RMSNormalization"


@contextmanager
def lowered_opset(path: Path) -> Iterator[Path]:
    """Yield a model in opset 21, a file beside it for the block, as its weights lie there."""
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    constants: dict[str, onnx.TensorProto] = {}

    def constant(name: str, value: float | list[int]) -> str:
        kind = np.int64 if isinstance(value, list) else np.float32
        constants[name] = numpy_helper.from_array(np.asarray(value, kind), name)
        return name

    nodes = []
    for node in graph.node:
        if node.op_type != _NORM:
            _check(path, node)
            nodes.append(node)
            continue
        attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        if attributes.pop("axis", -1) != -1 or attributes.pop("stash_type", 1) != 1:
            raise InputFileError(str(path), f"{node.name}: {_NORM} of more than the last axis")
        epsilon = float(attributes.pop("epsilon", 1e-5))
        (source, weight), (out,) = node.input, node.output
        two, axes = constant("opset_two", 2.0), constant("opset_axes", [-1])
        small = constant(f"opset_epsilon_{epsilon:g}", epsilon)
        nodes += [
            helper.make_node("Pow", [source, two], [f"{out}_square"], f"{node.name}_square"),
            helper.make_node("ReduceMean", [f"{out}_square", axes], [f"{out}_mean"], keepdims=1),
            helper.make_node("Add", [f"{out}_mean", small], [f"{out}_added"]),
            helper.make_node("Sqrt", [f"{out}_added"], [f"{out}_root"]),
            helper.make_node("Div", [source, f"{out}_root"], [f"{out}_scaled"]),
            helper.make_node("Mul", [f"{out}_scaled", weight], [out], node.name),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(constants.values())
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = min(entry.version, OPSET)
    with tempfile.NamedTemporaryFile(suffix=path.name, prefix=".", dir=path.parent) as file:
        file.write(model.SerializeToString())
        file.flush()
        yield Path(file.name)


def _check(path: Path, node: "onnx.NodeProto") -> None:
    from onnx import defs

    if node.domain not in ("", "ai.onnx"):
        reason = f"{node.domain}::{node.op_type} is no operator of ONNX: build with pypi"
        raise InputFileError(str(path), reason)
    try:
        attributes = defs.get_schema(node.op_type, OPSET).attributes
    except defs.SchemaError as error:
        reason = f"opset {OPSET}, which the SDK reads, has no {node.op_type}"
        raise InputFileError(str(path), reason) from error
    if more := [one.name for one in node.attribute if one.name not in attributes]:
        reason = f"{node.op_type} has no {', '.join(more)} in opset {OPSET}, which the SDK reads"
        raise InputFileError(str(path), reason)
