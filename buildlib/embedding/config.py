"""`EmbeddingConfig`: the file of an embedding table, and its quantization."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from buildlib.container.genie_config import Embedding, GenieDatatype, QuantParam
from buildlib.encodings.grid import Grid
from buildlib.encodings.model import Encoding
from buildlib.errors import InvalidOptionError

EmbedDatatype = Literal["float32", "uint8", "uint16", "int8", "int16"]

TABLE_FILE = "embedding_weights.raw"

_SMALLEST_SCALE = 1e-9

_GENIE_TYPES: Mapping[EmbedDatatype, GenieDatatype] = {
    "float32": "float32",
    "uint8": "ufixed8",
    "uint16": "ufixed16",
    "int8": "sfixed8",
    "int16": "sfixed16",
}


class EmbeddingConfig(BaseModel):
    """One row of `embed_length` numbers for each token, in `embed_path`, without a header.

    An integer q means (q + embed_quant_offset) * embed_quant_scale, whatever its sign.

    Names: `EmbeddingConfig`, docs.qualcomm.com 80-87189-2.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    embed_datatype: EmbedDatatype = "float32"
    embed_length: int = Field(ge=1)
    embed_path: Path
    embed_quant_offset: int | None = None
    embed_quant_scale: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _integers_have_a_meaning(self) -> Self:
        grid = self.embed_quant_scale, self.embed_quant_offset
        if self.is_quantized and None in grid:
            raise ValueError(
                f"{self.embed_datatype} needs embed_quant_scale and embed_quant_offset"
            )
        if not self.is_quantized and grid != (None, None):
            raise ValueError("float32 has neither embed_quant_scale nor embed_quant_offset")
        return self

    @property
    def is_quantized(self) -> bool:
        """True if the file holds integers."""
        return self.embed_datatype != "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return self.embed_length * np.dtype(self.embed_datatype).itemsize

    @property
    def grid(self) -> Grid | None:
        """Grid of the integers; None for float32."""
        if self.embed_quant_scale is None or self.embed_quant_offset is None:
            return None
        dtype = np.dtype(self.embed_datatype)
        return Grid(dtype, (self.embed_quant_scale,), (-self.embed_quant_offset,))

    def genie(self, lut_path: str = TABLE_FILE) -> Embedding:
        """Return the block of the dialog; `lut_path` is the file's name in the container."""
        grid = self.grid
        if grid is not None and grid.dtype.kind == "i":
            reason = (
                f"Genie cannot requantize {self.embed_datatype} for the unsigned inputs of graphs "
                "built here; use uint16"
            )
            raise InvalidOptionError("embedding.embed_datatype", reason, ("uint16", "uint8"))
        return Embedding(
            type="lut",
            lut_path=lut_path,
            size=self.embed_length,
            datatype=_GENIE_TYPES[self.embed_datatype],
            quant_param=QuantParam(scale=grid.scale[0], offset=-grid.zero_point[0])
            if grid
            else None,
        )

    @classmethod
    def from_genie(cls, block: Embedding, folder: Path) -> Self | None:
        """Return the table of a dialog's block, in the folder of its container; None without one.

        Raises:
            ValidationError: the block does not tell what the table holds.
        """
        if block.lut_path is None:
            return None
        own = {genie: kind for kind, genie in _GENIE_TYPES.items()}
        grid = block.quant_param
        return cls(
            embed_datatype=own[block.datatype or "float32"],
            embed_length=block.size,
            embed_path=folder / block.lut_path,
            embed_quant_offset=None if grid is None else int(grid.offset),
            embed_quant_scale=None if grid is None else grid.scale,
        )

    def rows(self, tokens: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float32]:
        """Look up tokens [...] as rows [..., embed_length]. The file is mapped."""
        table = np.memmap(self.embed_path, self.embed_datatype, mode="r")
        rows = table.reshape(-1, self.embed_length)[tokens]
        return rows if self.grid is None else self.grid.dequantize(rows)


def table_grid(datatype: EmbedDatatype, encoding: Encoding | None, low: float, high: float) -> Grid:
    """Return the grid of a table of `datatype`.

    That of `encoding` (of the graph's input, so that looking up is copying) when it has as many
    bits and the type is unsigned; otherwise one that covers [low, high], symmetric if signed.
    """
    dtype = np.dtype(datatype)
    limits = np.iinfo(dtype)
    fits = encoding is not None and (encoding.dtype, encoding.enc_type) == ("INT", "PER_TENSOR")
    if encoding is not None and fits and dtype.kind == "u" and encoding.bw == limits.bits:
        return Grid(dtype, encoding.scale, (-encoding.offset[0],))
    if dtype.kind == "i":
        scale = max(abs(low), abs(high)) / limits.max
        return Grid(dtype, (max(scale, _SMALLEST_SCALE),), (0,))
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / limits.max, _SMALLEST_SCALE)
    return Grid(dtype, (scale,), (min(round(-low / scale), limits.max),))
