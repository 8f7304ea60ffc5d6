"""How `config.json` stretches rotary positions, as far as Genie can be told to do the same.

Genie 1.21 takes `longrope` too, but not `dynamic`, `su` or `yarn` as files write them. Which of
longrope's two lists it uses at which length is not documented, so we do not claim it.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

UNSUPPORTED = "unsupported"
"""Type of the validation errors that mean: sound, but not something we can build."""


class LinearRopeScaling(BaseModel):
    """Every frequency divided by the factor."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["linear"]
    factor: float = Field(ge=1.0, allow_inf_nan=False)


class Llama3RopeScaling(BaseModel):
    """Slow frequencies divided by the factor, fast ones kept, those between blended."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["llama3"]
    factor: float = Field(ge=1.0, allow_inf_nan=False)
    low_freq_factor: float = Field(gt=0.0, allow_inf_nan=False)
    high_freq_factor: float = Field(gt=0.0, allow_inf_nan=False)
    original_max_position_embeddings: int = Field(ge=1, le=1 << 24, strict=True)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            msg = "high_freq_factor must be above low_freq_factor"
            raise ValueError(msg)
        return self


RopeScaling = LinearRopeScaling | Llama3RopeScaling
_KINDS = ("linear", "llama3")


def merged_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `partial_rotary_factor` under one spelling.

    Newer files keep all three in `rope_parameters`, older ones at the top, the scaling's kind as
    `rope_type` or `type`. No scaling is None.

    Raises:
        PydanticCustomError: of type `UNSUPPORTED`: a scaling that Genie cannot be told.
    """
    merged: dict[str, Any] = {}
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):
        if any(isinstance(value, dict) for value in parameters.values()):
            raise _unsupported("rope_parameters that differ between layers")
        if "rope_type" in parameters or "type" in parameters:
            merged["rope_scaling"] = parameters
        for key in ("rope_theta", "partial_rotary_factor"):
            if parameters.get(key) is not None:
                merged[key] = parameters[key]
    merged |= {
        key: config[key]
        for key in ("rope_theta", "rope_scaling", "partial_rotary_factor")
        if config.get(key) is not None
    }
    scaling = merged.get("rope_scaling")
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type", scaling.get("type"))
        merged["rope_scaling"] = _scaling(kind, scaling)
    return merged


def _scaling(kind: object, scaling: Mapping[str, Any]) -> dict[str, Any] | None:
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _KINDS:
        shown = repr(kind)
        raise _unsupported(f"rope scaling {shown if len(shown) <= 40 else shown[:37] + '...'}")
    return {**scaling, "rope_type": kind}


def _unsupported(what: str) -> PydanticCustomError:
    return unsupported(f"{what} (known are {', '.join(_KINDS)})")


def unsupported(what: str) -> PydanticCustomError:
    """What a validator raises for a model that is sound but cannot be built."""
    return PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": what})
