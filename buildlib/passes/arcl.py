"""Pass that brings a model to another (AR, CL): only the shapes of its inputs change."""

from pathlib import Path

import onnx
import onnx_ir as ir

from buildlib.errors import BuildError
from buildlib.graph import interface
from buildlib.graph.shape import GraphShape, shape_error
from buildlib.graph.values import infer_shapes, static_shape
from buildlib.passes.base import SORTED, STATIC, Condition, Pass, PreconditionError


def convert_arcl(model_path: Path, shape: GraphShape, out_path: Path) -> Path:
    """Write a model, or part of one, at `shape`; float or quantized, weights shared.

    Raises:
        ModelFileError: the model has (AR, CL) baked into its operators.
        BuildError: an operator cannot take the shapes that follow.
    """
    return ArClConversion(shape).run(model_path, out_path)


def _missing_mask(model: ir.Model) -> str | None:
    names = [value.name for value in model.graph.inputs]
    return None if interface.ATTENTION_MASK in names else f"inputs are {names[:5]}"


def _shape_conflict(model: ir.Model) -> str | None:
    """Describe a mask or cache whose sizes do not belong to one (AR, CL)."""
    try:
        shape = interface.model_shape(model)
    except BuildError as error:
        return str(error)
    if shape is None:
        return f"{interface.ATTENTION_MASK} is not [1, 1, AR, CL]"
    for value in (*model.graph.inputs, *model.graph.outputs):
        name, dims = str(value.name), static_shape(value) or ()
        if interface.is_kv(name) and (
            len(dims) != 4 or interface.dims_at(name, dims, shape) != dims
        ):
            return f"{name} is {list(dims)}, the mask says AR {shape.ar} and CL {shape.cl}"
    return None


class ArClConversion(Pass):
    """Rewrites input shapes and infers all others."""

    name = "arcl"
    requires = (
        SORTED,
        STATIC,
        Condition("there is an attention mask", _missing_mask),
        Condition("caches fit the attention mask", _shape_conflict),
    )
    ensures = (STATIC,)

    def __init__(self, shape: GraphShape) -> None:
        self.shape = shape

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        source = interface.model_shape(model)
        assert source is not None  # noqa: S101  (a declared precondition)
        ends = (*model.graph.inputs, *model.graph.outputs)
        shapes = {value: _reshaped(value, source, self.shape) for value in ends}
        for value in model.graph.inputs:
            value.shape = ir.Shape(shapes[value])
        try:
            infer_shapes(model)
        except onnx.shape_inference.InferenceError as error:
            reason = f"the model's operators do not fit ({str(error).splitlines()[0][:160]})"
            raise shape_error(self.shape.ar, self.shape.cl, reason) from error
        for value, dims in shapes.items():
            inferred = static_shape(value)
            if inferred != dims:
                raise PreconditionError(f"{value.name} is {inferred} at {self.shape}, not {dims}")
        return model


def _reshaped(value: ir.Value, source: GraphShape, shape: GraphShape) -> tuple[int, ...]:
    """Return the new dimensions of an input or output; tensors that do not follow AR stay."""
    dims = static_shape(value) or ()
    name = str(value.name)
    if len(dims) < 2 or interface.dims_at(name, dims, source) != dims:
        return dims
    return interface.dims_at(name, dims, shape)
