"""The same model at another (AR, CL): only the shapes of its inputs change."""

from pathlib import Path

import onnx
import onnx_ir as ir

from buildlib.errors import InvalidShapeError
from buildlib.graph import interface
from buildlib.graph.infer import infer_shapes, static_shape
from buildlib.graph.shape import GraphShape
from buildlib.passes.base import SORTED, STATIC, Condition, Pass


def convert_arcl(model_path: Path, shape: GraphShape, out_path: Path) -> Path:
    """Write the model, or part of one, at `shape`; float or quantized, weights shared.

    Raises:
        PassError: the model has (AR, CL) baked into its operators.
        InvalidShapeError: an operator cannot take the shapes that follow.
    """
    return ArClConversion(shape).run(model_path, out_path)


class ArClConversion(Pass):
    """Rewrites input shapes, then lets shape inference carry them through the graph."""

    name = "arcl"

    def __init__(self, shape: GraphShape) -> None:
        self.shape = shape
        self.requires = (SORTED, STATIC, Condition("there is an attention mask", _maskless))
        self.ensures = (
            STATIC,
            Condition(f"all of it is at {shape}", lambda model: _elsewhere(model, shape)),
        )

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        for value in model.graph.inputs:
            dims = static_shape(value)
            assert dims is not None  # noqa: S101  (a declared precondition)
            value.shape = ir.Shape(interface.reshaped(str(value.name), dims, self.shape))
        try:
            infer_shapes(model)
        except onnx.shape_inference.InferenceError as error:
            reason = f"the model's operators do not fit ({str(error).splitlines()[0][:160]})"
            raise InvalidShapeError(self.shape.ar, self.shape.cl, reason) from error
        return model


def _maskless(model: ir.Model) -> str | None:
    names = [value.name for value in model.graph.inputs]
    return None if interface.ATTENTION_MASK in names else f"inputs are {names}"


def _elsewhere(model: ir.Model, shape: GraphShape) -> str | None:
    for value in (*model.graph.inputs, *model.graph.outputs):
        dims = static_shape(value)
        if dims is None or interface.reshaped(str(value.name), dims, shape) != dims:
            return f"{value.name} is {dims}"
    return None
