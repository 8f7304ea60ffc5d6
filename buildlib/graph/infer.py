"""Static shapes of every value of a model, derived anew from the shapes of its inputs."""

import onnx
import onnx_ir as ir


def infer_shapes(model: ir.Model) -> None:
    """Replace all inner and output shapes of `model`, in place; weights are not loaded.

    Raises:
        onnx.shape_inference.InferenceError: an operator cannot take the shapes it gets.
    """
    inputs = set(model.graph.inputs)
    values = {
        value.name: value
        for node in model.graph
        for value in node.outputs
        if value.name and value not in inputs
    }
    for value in values.values():
        value.shape = None
    try:
        inferred = onnx.shape_inference.infer_shapes(
            ir.to_proto(model), check_type=True, strict_mode=True, data_prop=True
        )
    except onnx.checker.ValidationError as error:  # functions that call each other
        raise onnx.shape_inference.InferenceError(str(error)) from error
    for info in (*inferred.graph.value_info, *inferred.graph.output):
        if info.name in values:
            value = values[info.name]
            value.shape = ir.from_proto(info.type.tensor_type.shape)
            value.dtype = ir.DataType(info.type.tensor_type.elem_type)


def static_shape(value: ir.Value) -> tuple[int, ...] | None:
    """The shape as numbers, or None when a dimension is not known."""
    if value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
        return None
    return tuple(int(dim) for dim in value.shape if isinstance(dim, int))
