"""Forecast tokens in a model: rows of its embedding table, and the prefix that they see.

Forecast token i has id n_vocab + i. Its prefix lies in a cache file as Genie saves and restores
them: a header, keys `[n_kv, head_dim, tokens]` of all layers, values `[n_kv, tokens, head_dim]` of
all layers, and the scales of both as float64. Integers are unsigned, of 8 or 16 bits as the cache
of the graphs, and symmetric around the middle; the header does not tell their bits.
"""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from buildlib.embedding.extraction import find_lookup, table_of
from buildlib.embedding.table import table_chunks
from buildlib.encodings.attachment import inherit
from buildlib.encodings.grid import Grid, activation_grid
from buildlib.encodings.model import Encoding, Encodings
from buildlib.errors import EncodingsError, ModelFileError
from buildlib.files import atomic_write
from buildlib.graph import interface
from buildlib.graph.values import remove_unused, static_shape
from buildlib.passes.base import load_with_encodings, save_with_encodings
from buildlib.quantize.techniques.base import Factors
from plugins.speculation.ssd_tensors import Matrix, SsdTensors

CACHE_FILE = "kv-cache.primary.qnn-htp"
_TABLE_FILE = "forecast_table.raw"
_MAGIC = 0xC0DE
_HEADER = struct.Struct("<IIHHHH")


def add_forecast_rows(source: Path, target: Path, rows: Matrix) -> Path:
    """Write a float model with more rows at the end of its embedding table.

    Args:
        source: the model; its encodings lie beside it, and the table keeps its own.
        target: the model to write; a file of the longer table appears beside it.
        rows: `[n, hidden]`.
    """
    model = load_with_encodings(source)
    lookup = find_lookup(model)
    if lookup is None:
        raise ModelFileError(source, "it looks token ids up in no table")
    table = table_of(lookup)
    shape = static_shape(table)
    if shape is None or shape[1] != rows.shape[1]:
        reason = f"its embedding table is {table.shape}, and forecast rows have {rows.shape[1]}"
        raise ModelFileError(source, reason)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target.with_name(_TABLE_FILE)) as file:
        for chunk in table_chunks(table):
            file.write(chunk.tobytes())
        file.write(np.ascontiguousarray(rows, np.float32).tobytes())
    dims = ir.Shape((shape[0] + len(rows), shape[1]))
    longer = ir.val(f"{table.name}.forecast", ir.DataType.FLOAT, dims)
    longer.const_value = ir.ExternalTensor(
        _TABLE_FILE,
        0,
        4 * (shape[0] + len(rows)) * shape[1],
        ir.DataType.FLOAT,
        shape=dims,
        name=str(longer.name),
        base_dir=target.parent,
    )
    inherit(longer, table)
    model.graph.register_initializer(longer)
    lookup.replace_input_with(0, longer)
    remove_unused(model.graph)
    return save_with_encodings(model, target)


def write_prefix(
    tensors: SsdTensors, encodings: Encodings, path: Path, factors: Factors | None = None
) -> None:
    """Write the prefix as a cache file of Genie's, on the grids of the model's caches.

    Args:
        factors: of the entries of caches by name, in a rescaled model.
    """
    by_name = encodings.by_name()
    caches = [
        (interface.past_key(layer, "in"), keys.transpose(0, 2, 1))
        for layer, keys in enumerate(tensors.keys)
    ]
    caches += [
        (interface.past_value(layer, "in"), values) for layer, values in enumerate(tensors.values)
    ]
    scaled = {interface.kv_output(name): array for name, array in caches}
    for name in scaled.keys() & (factors or {}).keys():
        scaled[name] = scaled[name] * (factors or {})[name][:, 0]
    grids = [_cache_grid(name, by_name) for name, _ in caches]
    heads, tokens, dim = tensors.keys[0].shape
    with atomic_write(path) as file:
        file.write(_HEADER.pack(len(caches), _MAGIC, 0, heads, dim, tokens))
        for array, grid in zip(scaled.values(), grids, strict=True):
            file.write(np.ascontiguousarray(grid.quantize(array)).tobytes())
        file.write(struct.pack(f"<{len(grids)}d", *(grid.scale[0] for grid in grids)))


def _cache_grid(name: str, encodings: Mapping[str, Encoding]) -> Grid:
    encoding = encodings.get(name)
    grid = None if encoding is None or encoding.dtype != "INT" else activation_grid(encoding)
    low, high = (0, 0) if grid is None else grid.limits
    if grid is None or grid.zero_point != ((low + high + 1) // 2,):
        reason = "forecast prefixes need caches of integers around the middle"
        raise EncodingsError(name, reason)
    return grid
