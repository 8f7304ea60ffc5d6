"""Encodings of tensors, in one form for all file formats.

An integer q in [0, 2^bw) means (q + offset) * scale, as in AIMET's format 1.0.0, so an offset is
zero or negative; symmetric signed weights have offset -2^(bw-1).
"""

import math
from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, model_validator

from buildlib.errors import EncodingsError

EncType = Literal["PER_TENSOR", "PER_CHANNEL", "PER_BLOCK", "LPBQ"]

_SMALLEST_SCALE = 1e-9
_FLOAT32_MIN, _FLOAT32_MAX = 2.0**-126, 2.0**127


class Encoding(BaseModel):
    """The grid of one tensor, of each of its channels, or of each block of each channel.

    Attributes:
        bw: bits of the integers; of LPBQ, of the integers times their block's scale.
        scale: one; or one for each channel (LPBQ too); or of PER_BLOCK one for each block,
            channel by channel.
        offset: one for each scale.
        axis: axis of the channels; None is the axis of the operator's output channels.
        block_axis: along which blocks lie; None is the axis of the operator's input channels.
        block_size: values in a block.
        compressed_bw: bits of the stored integers of LPBQ.
        per_block_int_scale: a byte for each LPBQ block, channel by channel: the block's scale
            is that many times its channel's.
        channels: number of channels of PER_BLOCK, if the file tells.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    dtype: Literal["INT", "FLOAT"]
    enc_type: EncType
    bw: int = Field(ge=2, le=32)
    is_sym: bool = False
    scale: tuple[float, ...] = ()
    offset: tuple[int, ...] = ()
    axis: int | None = None
    block_axis: int | None = None
    block_size: int | None = Field(default=None, ge=1)
    compressed_bw: int | None = Field(default=None, ge=2, le=16)
    per_block_int_scale: bytes = Field(default=b"", repr=False)
    channels: int | None = Field(default=None, ge=1)

    @property
    def stored_bits(self) -> int:
        """Bits of the integers that are stored."""
        return self.bw if self.compressed_bw is None else self.compressed_bw

    def rows(self, start: int, stop: int, count: int | None = None) -> "Encoding":
        """Return the encoding of channels [start, stop) alone.

        Args:
            count: number of channels of the tensor, which PER_BLOCK may not know.
        """
        if self.enc_type == "PER_TENSOR" or self.dtype == "FLOAT":
            return self
        own = self.channels if self.enc_type == "PER_BLOCK" else len(self.scale)
        rows = count if own is None else own
        if rows is None:
            raise EncodingsError(self.name, "its blocks do not tell how many channels it has")
        if count not in {None, rows} or len(self.scale) % rows or not 0 <= start < stop <= rows:
            reason = f"channels {start} to {stop} of {count or rows}, and it has {rows}"
            raise EncodingsError(self.name, reason)
        each = len(self.scale) // rows
        blocks = len(self.per_block_int_scale) // rows
        update: dict[str, Any] = {
            "scale": self.scale[start * each : stop * each],
            "offset": self.offset[start * each : stop * each],
            "per_block_int_scale": self.per_block_int_scale[start * blocks : stop * blocks],
        }
        if self.enc_type == "PER_BLOCK":
            update["channels"] = stop - start
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _sound(self) -> "Encoding":
        if self.dtype == "INT":
            fault = self._grid_fault() or self._block_fault()
            if fault:
                raise ValueError(fault)
        return self

    def _grid_fault(self) -> str | None:
        count = len(self.scale)
        if count == 0 or count != len(self.offset):
            return f"{count} scales for {len(self.offset)} offsets"
        if self.enc_type == "PER_TENSOR" and count != 1:
            return f"PER_TENSOR with {count} scales"
        smallest, largest = min(self.scale), max(self.scale)
        sound = _FLOAT32_MIN <= smallest <= largest <= _FLOAT32_MAX
        if not sound or math.isnan(sum(self.scale)):
            return "a scale is not greater than 0, or not finite, in float32"
        lowest, highest = min(self.offset), max(self.offset)
        if not -(1 << self.bw) < lowest <= highest <= 0:
            return f"an offset lies outside (-2^{self.bw}, 0]"
        return None

    def _block_fault(self) -> str | None:
        lpbq, count = self.enc_type == "LPBQ", len(self.scale)
        if (self.block_size is not None) != (self.enc_type in {"PER_BLOCK", "LPBQ"}):
            return f"{self.enc_type} with block size {self.block_size}"
        if lpbq != (self.compressed_bw is not None) or lpbq != bool(self.per_block_int_scale):
            return f"{self.enc_type}: compressed_bw and per_block_int_scale belong to LPBQ"
        if self.compressed_bw is not None:
            if self.compressed_bw >= self.bw:
                return f"{self.compressed_bw} bits compressed from {self.bw}"
            if len(self.per_block_int_scale) % count:
                return f"{len(self.per_block_int_scale)} blocks for {count} channels"
            if 0 in self.per_block_int_scale:
                return "a block's integer scale is 0"
        if self.channels is not None and count % self.channels:
            return f"{count} blocks for {self.channels} channels"
        return None


class Encodings(BaseModel):
    """All encodings of an encodings file, named after values and initializers of the float model.

    The two groups carry no meaning: format 2.0.0 has only one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    activation_encodings: tuple[InstanceOf[Encoding], ...] = ()
    param_encodings: tuple[InstanceOf[Encoding], ...] = ()

    @model_validator(mode="after")
    def _unique(self) -> "Encodings":
        counts = Counter(e.name for e in (*self.activation_encodings, *self.param_encodings))
        name, count = counts.most_common(1)[0] if counts else ("", 1)
        if count > 1:
            raise ValueError(f"{name[:80]} has {count} encodings")
        return self

    def by_name(self) -> dict[str, Encoding]:
        """Return all encodings of both groups by name."""
        return {e.name: e for e in (*self.activation_encodings, *self.param_encodings)}


def asymmetric_encoding(name: str, low: float, high: float, bits: int) -> Encoding:
    """Return the asymmetric encoding that covers [low, high] and holds zero exactly."""
    low, high = min(low, 0.0), max(high, 0.0)
    steps = (1 << bits) - 1
    scale = max((high - low) / steps, _SMALLEST_SCALE)
    if not math.isfinite(scale):
        raise EncodingsError(name, "its values are not finite")
    offset = max(round(low / scale), -steps)
    return _per_tensor(name, bits, scale, offset, is_sym=False)


def symmetric_encoding(name: str, magnitude: float, bits: int) -> Encoding:
    """Return the encoding around 2^(bits-1) that covers [-magnitude, magnitude]."""
    half = 1 << (bits - 1)
    scale = max(magnitude / (half - 1), _SMALLEST_SCALE)
    return _per_tensor(name, bits, scale, -half, is_sym=True)


def _per_tensor(name: str, bits: int, scale: float, offset: int, *, is_sym: bool) -> Encoding:
    if not math.isfinite(scale):
        raise EncodingsError(name, "its values are not finite")
    return Encoding(
        name=name,
        dtype="INT",
        enc_type="PER_TENSOR",
        bw=bits,
        is_sym=is_sym,
        scale=(scale,),
        offset=(offset,),
    )
