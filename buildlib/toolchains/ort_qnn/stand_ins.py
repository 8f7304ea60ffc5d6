"""Stand-ins for operations of op packages, which no DLC can hold.

The backend that writes DLCs (`libQnnIr.so`) takes no op package. So an operation goes into the DLC
as an operator of one input and one output of the same shape; its node has the operation's name.
When the graph is composed, where the packages are registered, the node becomes the operation.
"""

import os
from pathlib import Path
from typing import IO, Final

from buildlib.toolchains.qnn.refusal import RefusedError

_OPERATOR: Final = "Abs"
"""It has no parameters in ONNX, and no rule of the converter merges it with its neighbours."""
_SEPARATOR: Final = "/"
_FUNCTIONS: Final = 25
"""Number of the field `functions` of a ModelProto."""


def put_stand_ins(path: Path) -> bytes | None:
    """Return a model with stand-ins for the nodes that are calls of its functions; None for none.

    External weights stay where they are, relative to the working folder.
    """
    if not _has_functions(path):
        return None
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    functions = {(function.domain, function.name) for function in model.functions}
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


def _has_functions(path: Path) -> bool:
    """Look for functions among the fields of a model's file, without the time to import onnx."""
    with path.open("rb") as file:
        while (key := _varint(file)) is not None:
            if key >> 3 == _FUNCTIONS:
                return True
            match key & 7:
                case 0:
                    _varint(file)
                case 1:
                    file.seek(8, os.SEEK_CUR)
                case 2:
                    file.seek(_varint(file) or 0, os.SEEK_CUR)
                case 5:
                    file.seek(4, os.SEEK_CUR)
                case _:  # no model, as ONNX Runtime will say
                    return False
    return False


def _varint(file: IO[bytes]) -> int | None:
    """Read a number of protobuf; None at the end of the file."""
    value = shift = 0
    while byte := file.read(1):
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
        shift += 7
    return None


def operation_of(node: str) -> str:
    """Return the operation that the node of that name stands for, if it is a stand-in."""
    return node.partition(_SEPARATOR)[0]
