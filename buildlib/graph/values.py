"""Values of a graph: shapes, the constants they come from, and removal of unused ones."""

import onnx
import onnx_ir as ir

PRODUCTS = frozenset({"Gemm", "MatMul"})
"""Operators that multiply their first input by a matrix, their second."""
WEIGHED = PRODUCTS | {"Conv"}
"""Those, and the one that does so in graphs of other exporters."""
_REAL = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def infer_shapes(model: ir.Model) -> None:
    """Infer all inner and output shapes of `model` again, in place; weights are not loaded.

    Raises:
        onnx.shape_inference.InferenceError: the shapes of an operator do not fit.
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


def tensor_value(tensor: ir.TensorProtocol, name: str) -> ir.Value:
    """Return the value of a tensor that a graph keeps as an initializer."""
    kind, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    return ir.Value(name=name, type=kind, shape=shape, const_value=tensor)


def static_shape(value: ir.Value) -> tuple[int, ...] | None:
    """Return the shape as numbers, or None when a dimension is unknown."""
    if value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
        return None
    return tuple(int(dim) for dim in value.shape if isinstance(dim, int))


def declared_shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    """Return the shape of an input or output of a bare message, or None as `static_shape` does."""
    tensor = value.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    if not tensor.HasField("shape") or None in dims:
        return None
    return tuple(dim for dim in dims if dim is not None)


def operand(node: ir.Node, index: int) -> ir.Value:
    """Return an input of a node, which its operator requires."""
    value = node.inputs[index]
    assert value is not None  # noqa: S101  (required)
    return value


def source_of(value: ir.Value) -> ir.Value:
    """Return the stored initializer that `value` is a cast of, or `value` itself."""
    producer = value.producer()
    while producer is not None and producer.op_type == "Cast" and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value


def is_parameter(value: ir.Value) -> bool:
    """Return whether the value is a constant of the model, as stored or cast."""
    return source_of(value).is_initializer()


def is_linear(node: ir.Node) -> bool:
    """Return whether a node multiplies by a matrix of the model, stored or cast."""
    if node.op_type not in PRODUCTS or not is_parameter(operand(node, 1)):
        return False
    shape = static_shape(source_of(operand(node, 1)))
    return shape is not None and len(shape) == 2


def is_real(value: ir.Value) -> bool:
    """Return whether the value holds numbers to quantize, unlike token ids and shapes."""
    return source_of(value).dtype in _REAL


def remove_unused(graph: ir.Graph) -> None:
    """Remove every node and initializer without users, in place."""
    for node in reversed(list(graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
            graph.remove(node)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
