"""Pass that turns multi-head attention into single-head attention, head by head.

The NPU runs many small matrix products without batch axes better than one with them. Weights stored
by output channel are sliced by reference; the caches keep their shapes outside.
"""

import re
from pathlib import Path

import onnx_ir as ir

from buildlib.graph.values import infer_shapes, remove_unused, static_shape
from buildlib.passes.base import FLOAT, SORTED, STATIC, Condition, Pass
from buildlib.passes.head_splitter import HeadSplitter

_PIECE = re.compile(r"(.+)_(?:head_(\d+)|columns_(\d+)_\d+)")


def whole_name(name: str) -> tuple[str, int | None]:
    """Return of which value of the model a piece is, and where it begins: at a head or a column.

    The pass calls pieces `layer_0_scores_head_2` and `layer_0_q_proj_columns_24_48`. All other
    values are whole, and begin nowhere.
    """
    piece = _PIECE.fullmatch(name)
    return (piece[1], int(piece[2] or piece[3])) if piece else (name, None)


def convert_mha2sha(model_path: Path, out_path: Path) -> Path:
    """Write a float model, or part of one, with a separate attention for every head.

    A part without attention, or with one head only, is written unchanged.

    Raises:
        ModelFileError: it is not a sound model; or an operator of the attention mixes heads, or
            head counts do not divide.
        EncodingsError: a weight's encoding does not fit its channels.
    """
    return Mha2Sha().run(model_path, out_path)


class Mha2Sha(Pass):
    """Repeats the operators between projections and their reunion for each head."""

    name = "mha2sha"

    def __init__(self) -> None:
        self.requires = (SORTED, STATIC, FLOAT)
        self.ensures = (
            SORTED,
            STATIC,
            Condition("every attention is of one head", _many_headed),
        )

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        if any(value.shape is None for node in model.graph for value in node.outputs):
            infer_shapes(model)
        if _many_headed(model) is None:
            return model
        HeadSplitter(model.graph).split()
        remove_unused(model.graph)
        return model


def _many_headed(model: ir.Model) -> str | None:
    for node in model.graph:
        dims = static_shape(node.outputs[0]) if node.op_type == "Softmax" else None
        if dims is not None and any(dim != 1 for dim in dims[:-2]):
            return f"{node.name} is over {list(dims)}"
    return None
