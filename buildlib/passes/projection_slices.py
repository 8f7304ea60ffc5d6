"""Slices of a projection [AR, N], made by slicing its weight if stored by output channel.

Between the product and its use there may be a bias, other element-wise constants, and the Split or
Slice that takes queries, keys and values out of one fused projection.
"""

import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of, inherit, set_encoding
from buildlib.graph.files import tensor_array
from buildlib.graph.values import is_parameter, operand, static_shape, tensor_value

Range = tuple[int, int]

_ELEMENTWISE = frozenset({"Add", "Div", "Mul", "Sub"})


class ProjectionSlicer:
    """Slices values of one graph along their last axis; new nodes go before `before`."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._made: dict[str, ir.Value] = {}

    def slice_columns(self, value: ir.Value, count: int, before: ir.Node) -> list[ir.Value]:
        """Return `count` equal slices [AR, N / count] of `value`, in order.

        If the weight cannot be sliced by reference, for example because it is stored by input
        channel, the projection stays whole and its result is split.
        """
        if count == 1:
            return [value]
        size = _width(value) // count
        ranges = [(start, start + size) for start in range(0, count * size, size)]
        if _is_sliceable(value):
            return [self._sliced(value, piece, before) for piece in ranges]
        outputs = [_column_value(value, piece) for piece in ranges]
        if str(outputs[0].name) not in self._made:
            name = f"{value.name}_heads"
            attributes = {"axis": -1, "num_outputs": count}
            node = ir.node("Split", [value], attributes, outputs=outputs, name=name)
            self._graph.insert_before(before, node)
            self._made |= {str(output.name): output for output in outputs}
        return [self._made[str(output.name)] for output in outputs]

    def _sliced(self, value: ir.Value, piece: Range, before: ir.Node) -> ir.Value:
        node = value.producer()
        assert node is not None  # noqa: S101  (it is cuttable)
        if node.op_type in {"Split", "Slice"}:
            start = _slice_start(value, node)
            assert start is not None  # noqa: S101  (it is cuttable)
            return self._sliced(operand(node, 0), (start + piece[0], start + piece[1]), before)
        output = _column_value(value, piece)
        if str(output.name) in self._made:
            return self._made[str(output.name)]
        if node.op_type == "Gemm":
            inputs = [operand(node, 0), self._rows(operand(node, 1), piece, before, 0)]
            inputs += [
                self._rows(bias, piece, before) for bias in node.inputs[2:] if bias is not None
            ]
        else:
            inputs = [
                self._rows(part, piece, before)
                if is_parameter(part)
                else self._sliced(part, piece, before)
                for part in (operand(node, 0), operand(node, 1))
            ]
        return self._add(node, inputs, output, before)

    def _rows(self, value: ir.Value, piece: Range, before: ir.Node, axis: int = -1) -> ir.Value:
        """Return rows of a weight, or entries of a bias, with the casts after it."""
        dims = list(_dims(value))
        if not dims or dims[axis] == 1:
            return value
        node = value.producer()
        if node is None:
            return slice_rows(value, *piece, axis=axis % len(dims))
        name = f"{value.name}_rows_{piece[0]}_{piece[1]}"
        if name in self._made:
            return self._made[name]
        rows = self._rows(operand(node, 0), piece, before, axis)
        dims[axis] = piece[1] - piece[0]
        output = ir.Value(name=name, type=value.type, shape=ir.Shape(dims))
        _inherit_rows(output, value, *piece, axis % len(dims))
        return self._add(node, [rows], output, before)

    def _add(
        self, node: ir.Node, inputs: list[ir.Value], output: ir.Value, before: ir.Node
    ) -> ir.Value:
        """Add the same operator as `node` for a slice of its output."""
        attributes, name = node.attributes, str(output.name)
        again = ir.Node("", node.op_type, inputs, attributes, outputs=[output], name=name)
        self._graph.insert_before(before, again)
        self._made[name] = output
        return output


def _is_sliceable(value: ir.Value) -> bool:
    """Return whether every slice of `value` can be computed from rows of weights alone."""
    node = value.producer()
    if node is None or not _dims(value):
        return False
    if node.op_type in {"Split", "Slice"}:
        return _slice_start(value, node) is not None and _is_sliceable(operand(node, 0))
    constants = [v for v in node.inputs if v is not None and is_parameter(v)]
    others = [v for v in node.inputs if v is not None and not is_parameter(v)]
    if len(others) != 1 or not constants or node.domain:
        return False
    if node.op_type == "Gemm":
        flags = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
        biases = (_is_row(bias, _width(value)) for bias in constants[1:])
        return flags == [0, 1] and others[0] is node.inputs[0] and all(biases)
    return (
        node.op_type in _ELEMENTWISE
        and _is_row(constants[0], _width(value))
        and _dims(others[0])[-1:] == _dims(value)[-1:]
        and _is_sliceable(others[0])
    )


def _is_row(value: ir.Value, width: int) -> bool:
    """Return whether a constant is one number, or a row of `width`."""
    dims = _dims(value)
    return all(dim == 1 for dim in dims[:-1]) and (not dims or dims[-1] in {1, width})


def _slice_start(output: ir.Value, node: ir.Node) -> int | None:
    """Return where along the last axis a Split or Slice starts to take `output`, if known."""
    source = _dims(operand(node, 0))
    last = {-1, len(source) - 1}
    if node.op_type == "Split":
        if node.attributes.get_int("axis", 0) not in last:
            return None
        before = node.outputs[: output.index()]
        return sum(map(_width, before)) if all(map(_dims, before)) else None
    starts, _, axes, steps = (constant_integers(v) for v in (*node.inputs[1:], None, None)[:4])
    if not source or not starts or len(axes) != 1 or axes[0] not in last or steps not in ([], [1]):
        return None
    return starts[0] % source[-1]


def constant_integers(value: ir.Value | None) -> list[int]:
    """Return the numbers of a constant such as a target shape; none if it is not constant."""
    if value is None or value.const_value is None:
        return []
    return [int(number) for number in tensor_array(value.const_value).reshape(-1)]


def _column_value(value: ir.Value, piece: Range) -> ir.Value:
    """Return a new value for a slice of `value`, with its encoding."""
    name = f"{value.name}_columns_{piece[0]}_{piece[1]}"
    dims = (*_dims(value)[:-1], piece[1] - piece[0])
    return inherit(ir.Value(name=name, type=value.type, shape=ir.Shape(dims)), value)


def _width(value: ir.Value) -> int:
    return _dims(value)[-1]


def _dims(value: ir.Value) -> tuple[int, ...]:
    """Return static dimensions; none at all if one is unknown."""
    return static_shape(value) or ()


def slice_rows(value: ir.Value, start: int, stop: int, axis: int = 0) -> ir.Value:
    """Return an initializer of entries [start, stop) of `value` along `axis`, made once a graph.

    All axes before `axis` have size 1, so the slice is contiguous in the file: an external tensor
    stays where it is and is referred to by another offset. Encodings for each row are sliced alike.
    """
    tensor, graph = value.const_value, value.graph
    assert tensor is not None  # noqa: S101  (an initializer)
    assert graph is not None  # noqa: S101  (of a graph)
    dims = tuple(int(dim) for dim in tensor.shape.numpy())
    if (start, stop) == (0, dims[axis]):
        return value
    name = f"{value.name}_rows_{start}_{stop}"
    if name in graph.initializers:
        return graph.initializers[name]
    rows = tensor_value(_slice_tensor(tensor, dims, axis, start, stop, name), name)
    graph.register_initializer(rows)
    return _inherit_rows(rows, value, start, stop, axis)


def _inherit_rows(rows: ir.Value, value: ir.Value, start: int, stop: int, axis: int) -> ir.Value:
    """Give `rows` the encoding of entries [start, stop) of `value` along `axis`."""
    encoding, dims = encoding_of(value), static_shape(value)
    if encoding is not None and dims is not None:
        along = encoding.axis is None or encoding.axis % len(dims) == axis
        set_encoding(rows, encoding.rows(start, stop, dims[axis]) if along else encoding)
    return rows


def _slice_tensor(
    tensor: ir.TensorProtocol, dims: tuple[int, ...], axis: int, start: int, stop: int, name: str
) -> ir.TensorProtocol:
    shape = ir.Shape((*dims[:axis], stop - start, *dims[axis + 1 :]))
    if not isinstance(tensor, ir.ExternalTensor):
        index = (*(slice(None) for _ in range(axis)), slice(start, stop))
        return ir.Tensor(tensor.numpy()[index], dtype=tensor.dtype, shape=shape, name=name)
    n_bytes = tensor.nbytes // dims[axis]
    return ir.ExternalTensor(
        location=tensor.location,
        offset=(tensor.offset or 0) + start * n_bytes,
        length=(stop - start) * n_bytes,
        dtype=tensor.dtype,
        shape=shape,
        name=name,
        base_dir=tensor.base_dir,
    )
