"""Precision of a source, from the types that its operators take."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from buildlib.graph.folding import Refusal


@dataclass(frozen=True)
class Precision:
    """Tolerances for numbers that the source computes.

    Attributes:
        tolerance: absolute, of cosines, sines and scales of heads.
        snap: relative, of a scale that stands for 1 or for 1/sqrt(head_dim).
    """

    tolerance: float
    snap: float


SINGLE = Precision(1e-4, 1e-5)
_COARSER: Mapping[ir.DataType, Precision] = {
    ir.DataType.BFLOAT16: Precision(1.6e-2, 8e-3),
    ir.DataType.FLOAT16: Precision(2e-3, 1e-3),
}
"""Of the types that are coarser than float32, the coarsest first."""


def precision_of(model: ir.Model) -> Precision:
    """Return the precision of the coarsest type computed with, casts of weights aside."""
    kinds = {value.dtype for value in model.graph.inputs}
    for node in model.graph:
        if node.op_type == "Cast" and "to" in node.attributes:
            try:
                kinds.add(ir.DataType(node.attributes["to"].as_int()))
            except ValueError as error:
                raise Refusal("casts to a type that ONNX does not have", node) from error
        else:
            kinds |= {v.dtype for v in node.inputs if v is not None and v.is_initializer()}
    return next((precision for kind, precision in _COARSER.items() if kind in kinds), SINGLE)
