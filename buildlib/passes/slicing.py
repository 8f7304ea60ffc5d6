"""Rows of a stored weight as weights of their own, in the same bytes of the same file."""

import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of, set_encoding
from buildlib.graph.infer import static_shape


def cut_rows(value: ir.Value, start: int, stop: int, axis: int = 0) -> ir.Value:
    """An initializer that is entries [start, stop) of `value` along `axis`, made once a graph.

    All axes before `axis` have size 1, so that what is cut lies together in the file: a tensor
    outside the model stays where it is and is referred to by another offset. Encodings for each
    row are cut alike.

    Raises:
        EncodingsError: the encoding of `value` fits another number of rows.
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
    cut = _cut_tensor(tensor, dims, axis, start, stop, name)
    kept = ir.Shape(cut.shape.numpy())
    rows = ir.Value(name=name, type=value.type, shape=kept, const_value=cut)
    graph.register_initializer(rows)
    return inherit_rows(rows, value, start, stop, axis)


def inherit_rows(rows: ir.Value, value: ir.Value, start: int, stop: int, axis: int) -> ir.Value:
    """Give `rows` what the encoding of `value` says of entries [start, stop) along `axis`.

    Raises:
        EncodingsError: the encoding of `value` fits another number of rows.
    """
    encoding, dims = encoding_of(value), static_shape(value)
    if encoding is not None and dims is not None:
        along = encoding.axis is None or encoding.axis % len(dims) == axis
        set_encoding(rows, encoding.rows(start, stop, dims[axis]) if along else encoding)
    return rows


def _cut_tensor(
    tensor: ir.TensorProtocol, dims: tuple[int, ...], axis: int, start: int, stop: int, name: str
) -> ir.TensorProtocol:
    kept = (*dims[:axis], stop - start, *dims[axis + 1 :])
    if not isinstance(tensor, ir.ExternalTensor):
        index = (*(slice(None) for _ in range(axis)), slice(start, stop))
        return ir.Tensor(tensor.numpy()[index], dtype=tensor.dtype, shape=ir.Shape(kept), name=name)
    n_bytes = tensor.nbytes // dims[axis]
    return ir.ExternalTensor(
        location=tensor.location,
        offset=(tensor.offset or 0) + start * n_bytes,
        length=(stop - start) * n_bytes,
        dtype=tensor.dtype,
        shape=ir.Shape(kept),
        name=name,
        base_dir=tensor.base_dir,
    )
