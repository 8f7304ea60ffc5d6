"""Stand-ins for operations of op packages, which no DLC can hold.

The backend that writes DLCs (`libQnnIr.so`) takes no op package. So an operation goes into the DLC
as an operator of one input and one output of the same shape; its node has the operation's name.
When the graph is composed, where the packages are registered, the node becomes the operation.
"""

from pathlib import Path
from typing import Final

from buildlib.toolchains.qnn.refusal import RefusedError

_OPERATOR: Final = "Abs"
"""It has no parameters in ONNX, and no rule of the converter merges it with its neighbours."""
_SEPARATOR: Final = "/"


def put_stand_ins(path: Path) -> bytes | None:
    """Return a model with stand-ins for the nodes that are calls of its functions; None for none.

    External weights stay where they are, relative to the working folder.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    functions = {(function.domain, function.name) for function in model.functions}
    if not functions:
        return None
    for node in model.graph.node:
        if (node.domain, node.op_type) not in functions:
            continue
        operation = f"{node.domain}::{node.op_type}"
        if len(node.input) != 1 or len(node.output) != 1 or node.attribute:
            raise RefusedError(
                f"{operation} has more than one tensor in and one out: no DLC has it"
            )
        node.name = f"{operation}{_SEPARATOR}{node.output[0]}"
        node.domain, node.op_type = "", _OPERATOR
    del model.functions[:]
    return bytes(model.SerializeToString())


def operation_of(node: str) -> str:
    """Return the operation that the node of that name stands for, if it is a stand-in."""
    return node.partition(_SEPARATOR)[0]
