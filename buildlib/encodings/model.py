"""AIMET encodings files, format 1.0.0: what each tensor's integers mean.

Format: https://quic.github.io/aimet-pages (encoding specification 1.0.0). An integer q in
[0, 2^bw) means (q + offset) * scale, so that offset is zero or negative; symmetric signed weights
have offset -2^(bw-1).
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from buildlib.errors import EncodingsError
from buildlib.graph.files import write_atomically

_MAX_FILE_BYTES = 1 << 30

Scale = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Encoding(BaseModel):
    """The grid of one tensor, or of each of its output channels."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str = Field(min_length=1)
    dtype: Literal["INT", "FLOAT"]
    enc_type: Literal["PER_TENSOR", "PER_CHANNEL", "PER_BLOCK", "LPBQ", "VECTOR"]
    bw: int = Field(ge=2, le=32)
    is_sym: bool = False
    scale: tuple[Scale, ...] = ()
    offset: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> "Encoding":
        if self.dtype == "FLOAT":
            return self
        if not self.scale or len(self.scale) != len(self.offset):
            msg = f"{self.name}: {len(self.scale)} scales for {len(self.offset)} offsets"
            raise ValueError(msg)
        if self.enc_type == "PER_TENSOR" and len(self.scale) != 1:
            msg = f"{self.name}: PER_TENSOR with {len(self.scale)} scales"
            raise ValueError(msg)
        if any(not -(1 << self.bw) < offset <= 0 for offset in self.offset):
            msg = f"{self.name}: an offset lies outside (-2^{self.bw}, 0]"
            raise ValueError(msg)
        return self


class Encodings(BaseModel):
    """A whole encodings file. Names are those of values and initializers of the float model."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal["1.0.0"] = "1.0.0"
    activation_encodings: tuple[Encoding, ...]
    param_encodings: tuple[Encoding, ...]
    excluded_layers: tuple[str, ...] = ()
    quantizer_args: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _unique(self) -> "Encodings":
        for group in (self.activation_encodings, self.param_encodings):
            name, count = Counter(e.name for e in group).most_common(1)[0] if group else ("", 1)
            if count > 1:
                msg = f"{name} has {count} encodings"
                raise ValueError(msg)
        return self

    @classmethod
    def load(cls, path: Path) -> "Encodings":
        """Read and check a file.

        Raises:
            EncodingsError: missing, not JSON, another version, or with grids that make no sense.
        """
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise EncodingsError(str(path), "larger than any encodings file")
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise EncodingsError(str(path), error.strerror or "cannot be read") from error
        except (ValueError, RecursionError) as error:
            raise EncodingsError(str(path), f"not valid JSON ({error})") from error
        version = data.get("version") if isinstance(data, dict) else None
        if version != "1.0.0":
            reason = f"its version is {str(version)[:20]}, only 1.0.0 is known"
            raise EncodingsError(str(path), reason)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise EncodingsError(str(path), f"{where}: {first['msg']}") from error

    def save(self, path: Path) -> Path:
        """Write the file; the same encodings give the same bytes."""
        text = self.model_dump_json(indent=1, exclude_none=True)
        write_atomically(path, text.encode() + b"\n")
        return path


def covering(name: str, low: float, high: float, bits: int) -> Encoding:
    """The asymmetric grid that covers [low, high] and holds zero exactly."""
    low, high = min(low, 0.0), max(high, 0.0)
    steps = (1 << bits) - 1
    scale = max((high - low) / steps, _SMALLEST_SCALE)
    offset = max(round(low / scale), -steps)
    return _per_tensor(name, bits, scale, offset, is_sym=False)


def symmetric(name: str, magnitude: float, bits: int) -> Encoding:
    """The grid around 2^(bits-1) that covers [-magnitude, magnitude]."""
    half = 1 << (bits - 1)
    scale = max(magnitude / (half - 1), _SMALLEST_SCALE)
    return _per_tensor(name, bits, scale, -half, is_sym=True)


_SMALLEST_SCALE = 1e-9


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
