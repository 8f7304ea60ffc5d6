"""Embedding table of a model as the file that Genie maps."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.embedding.config import EmbedDatatype, EmbeddingConfig, table_grid
from buildlib.embedding.extraction import find_lookup, table_of
from buildlib.encodings.attachment import encoding_of
from buildlib.errors import EncodingsError, ModelFileError
from buildlib.files import atomic_write
from buildlib.graph.files import tensor_array
from buildlib.graph.values import static_shape
from buildlib.passes.base import load_with_encodings

_CHUNK_BYTES = 8 << 20


def write_table(model_path: Path, out_path: Path, datatype: EmbedDatatype) -> EmbeddingConfig:
    """Write the table that `input_ids` of a float model are looked up in.

    Rows are mapped, converted and written some megabytes at a time, however large the table.

    Args:
        model_path: with its encodings beside it, if it has any: an unsigned table of as many bits
            as the lookup's result is stored on that result's grid.
        out_path: `embedding_weights.raw`; appears whole or not at all.
        datatype: of the file.
    """
    model = load_with_encodings(model_path)
    lookup = find_lookup(model)
    if lookup is None:
        raise ModelFileError(model_path, "it looks token ids up in no table")
    table = table_of(lookup)
    shape = static_shape(table)
    assert shape is not None  # noqa: S101  (an initializer)
    grid = None
    if datatype != "float32":
        encoding = encoding_of(lookup.outputs[0]) or encoding_of(table)
        grid = table_grid(datatype, encoding, *_range(table))
    with atomic_write(out_path) as file:
        for rows in table_chunks(table):
            file.write((rows if grid is None else grid.quantize(rows)).tobytes())
    return EmbeddingConfig(
        embed_datatype=datatype,
        embed_length=shape[1],
        embed_path=out_path,
        embed_quant_offset=None if grid is None else -grid.zero_point[0],
        embed_quant_scale=None if grid is None else grid.scale[0],
    )


def table_chunks(table: ir.Value) -> Iterator[npt.NDArray[np.float32]]:
    """Yield rows [n, hidden] as float32, a few megabytes at a time."""
    tensor, shape = table.const_value, static_shape(table)
    assert tensor is not None  # noqa: S101  (an initializer)
    assert shape is not None  # noqa: S101  (an initializer)
    array, step = tensor_array(tensor), max(1, _CHUNK_BYTES // (4 * shape[1]))
    for first in range(0, shape[0], step):
        rows = array[first : first + step].astype(np.float32)
        if not np.isfinite(rows).all():
            raise EncodingsError(str(table.name), "its values are not finite")
        yield rows


def _range(table: ir.Value) -> tuple[float, float]:
    low, high = 0.0, 0.0
    for rows in table_chunks(table):
        low, high = min(low, float(rows.min())), max(high, float(rows.max()))
    return low, high
