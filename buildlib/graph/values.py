"""What a value of a graph is, as far as its producers tell."""

import onnx_ir as ir

_REAL = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def source_of(value: ir.Value) -> ir.Value:
    """The stored initializer that `value` is a cast of, or `value` itself."""
    producer = value.producer()
    while producer is not None and producer.op_type == "Cast" and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value


def is_parameter(value: ir.Value) -> bool:
    """Whether the value is a constant of the model, as stored or cast."""
    return source_of(value).is_initializer()


def is_real(value: ir.Value) -> bool:
    """Whether the value holds numbers to quantize (token ids and shapes do not)."""
    return source_of(value).dtype in _REAL
