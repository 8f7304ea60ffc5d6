"""Rotary positions in `config.json`: base, share of a head, and scaling.

transformers 4 keeps them in `rope_theta`, `partial_rotary_factor` and `rope_scaling`. transformers
5 keeps all of them in `rope_parameters`, and reads the older keys too. `buildlib.graph.rope` has
the frequencies that follow.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from buildlib.error_base import one_line

UNSUPPORTED = "unsupported"
"""Type of validation errors about sound models that cannot be built."""

Keys = Mapping[str, Any]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Length = Annotated[int, Field(ge=1, le=1 << 24, strict=True)]


class _Scaling(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class LinearRopeScaling(_Scaling):
    """Every frequency divided by the factor."""

    rope_type: Literal["linear"]
    factor: Positive


class Llama3RopeScaling(_Scaling):
    """Slow frequencies divided by the factor, fast ones kept, those between blended."""

    rope_type: Literal["llama3"]
    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Length


class DynamicRopeScaling(_Scaling):
    """Another base for each length beyond `max_position_embeddings`; up to that no scaling."""

    rope_type: Literal["dynamic"]


class YarnRopeScaling(_Scaling):
    """Slow frequencies divided by the factor, fast ones kept, and sharper attention."""

    rope_type: Literal["yarn"]
    factor: Positive
    original_max_position_embeddings: Length
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    mscale: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    mscale_all_dim: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    truncate: bool = True


class LongRopeScaling(_Scaling):
    """Every frequency divided by an own factor, of one list or another by the length of contexts.

    Attributes:
        short_factor: up to the original length.
        long_factor: beyond it.
    """

    rope_type: Literal["longrope"]
    short_factor: tuple[Positive, ...]
    long_factor: tuple[Positive, ...]
    factor: Positive | None = None
    original_max_position_embeddings: int = Field(ge=2, le=1 << 24, strict=True)
    attention_factor: Positive | None = None


RopeScaling = (
    LinearRopeScaling | Llama3RopeScaling | DynamicRopeScaling | YarnRopeScaling | LongRopeScaling
)
KINDS = ("linear", "llama3", "dynamic", "yarn", "longrope")
SLIDING, FULL = "sliding_attention", "full_attention"
_ORIGINAL, _POSITIONS = "original_max_position_embeddings", "max_position_embeddings"


def unsupported(message: str, *, by_transformers: bool = False) -> PydanticCustomError:
    """Make the validation error of a sound model that cannot be built.

    Args:
        message: the reason.
        by_transformers: whether the release of transformers in question refuses it too, so that it
            cannot be the one that the file is of.
    """
    context = {"reason": message, "by_transformers": by_transformers}
    return PydanticCustomError(UNSUPPORTED, "{reason}", context)


def read_rotary(
    file: Keys, defaults: Keys, *, major: int, kinds: tuple[str, ...]
) -> dict[str, Any]:
    """Return `rope_theta`, `partial_rotary_factor`, `rope_scaling` and `rope_local_base_freq`.

    Args:
        file: `config.json` as it is.
        defaults: of keys that it leaves out.
        major: the release of transformers that counts, 4 or 5.
        kinds: of scaling that the family takes.
    """
    two_bases = defaults.get("rope_local_base_freq") is not None
    by_kind = major == 5 and two_bases
    keys = {**defaults, **file}
    if by_kind:
        scaling, theta, local = _by_layer_kind(file, keys)
    elif major == 5:
        scaling = _mapping(file, "rope_scaling") or _mapping(file, "rope_parameters")
        local = None
        theta = scaling.get("rope_theta", keys.get("rope_theta"))
    else:
        scaling = {"type": "default"}
        if file.get("rope_scaling") is not None:
            scaling = _mapping(file, "rope_scaling")
        theta = keys.get("rope_theta")
        local = keys.get("rope_local_base_freq") if two_bases else None
    if any(isinstance(value, dict) for value in scaling.values()):
        raise unsupported("rope_parameters that differ between layers")
    partial = keys.get("partial_rotary_factor")
    if major == 5:
        partial = scaling.get("partial_rotary_factor", 1.0 if partial is None else partial)
    return {
        "rope_theta": theta,
        "partial_rotary_factor": partial,
        "rope_scaling": _scaling(scaling, file, keys, major=major, kinds=kinds, nested=by_kind),
        "rope_local_base_freq": local,
    }


def _by_layer_kind(file: Keys, keys: Keys) -> tuple[dict[str, Any], object, object]:
    """Read what transformers 5 keeps for each kind of layer: scaling, base, and the local base."""
    plain = {"rope_type": "default"}
    by_kind: dict[str, Any] = (
        _mapping(file, "rope_parameters")
        if file.get("rope_parameters") is not None
        else {FULL: plain, SLIDING: plain}
    )
    full = _mapping(by_kind, FULL) if by_kind.get(FULL) is not None else {}
    scaling = _mapping(file, "rope_scaling")
    if scaling and not full:
        raise unsupported("rope_scaling beside rope_parameters without full_attention")
    full = {**full, **scaling} or plain
    local = _mapping(by_kind, SLIDING)
    if local.get("rope_type", local.get("type", "default")) != "default":
        raise unsupported("rope scaling of layers with a sliding window")
    full.pop("truncate", None)  # transformers looks for it beside the kinds of layers
    if "truncate" in by_kind:
        full["truncate"] = by_kind["truncate"]
    theta = full.get("rope_theta", keys.get("rope_theta"))
    return full, theta, local.get("rope_theta", keys.get("rope_local_base_freq"))


def _mapping(keys: Keys, name: str) -> dict[str, Any]:
    value = keys.get(name)
    if value is not None and not isinstance(value, dict):
        raise unsupported(f"{name} that is no object")
    return dict(value or {})


def _scaling(
    scaling: Keys, file: Keys, keys: Keys, *, major: int, kinds: tuple[str, ...], nested: bool
) -> dict[str, Any] | None:
    kind = scaling.get("rope_type", scaling.get("type", "default" if major == 5 else None))
    old = scaling.get("type", kind)
    if kind != old and not nested:
        new, old = (one_line(repr(each), 40) for each in (kind, old))
        raise unsupported(f"rope_type {new} beside type {old}, which is the older name of it")
    if kinds == ("longrope",) and kind in {"su", "yarn"}:  # names in first Phi 3 files
        kind = "longrope"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in kinds:
        raise unsupported(f"rope scaling {one_line(repr(kind), 40)} (known are {', '.join(kinds)})")
    values = {key: value for key, value in scaling.items() if value is not None}
    values["rope_type"] = kind
    if kind in {"linear", "dynamic"} and "factor" not in values:
        raise unsupported(f"rope scaling {kind} without a factor")
    if kind in {"llama3", "yarn", "longrope"}:
        _fill_lengths(values, file, keys, major=major, nested=nested)
    if kind == "longrope" and "factor" not in values and "attention_factor" not in values:
        raise unsupported("rope scaling longrope without a factor")
    for key in ("beta_fast", "beta_slow"):
        if values.get(key) == 0:
            del values[key]
    return values


def _fill_lengths(
    values: dict[str, Any], file: Keys, keys: Keys, *, major: int, nested: bool
) -> None:
    """Fill in the original length of a scaling, and the factor that follows from it."""
    kind, positions, outside = values["rope_type"], keys.get(_POSITIONS), keys.get(_ORIGINAL)
    if major == 5 and not nested and (_ORIGINAL in file or outside is not None):
        values[_ORIGINAL] = outside
    elif major == 4 and kind == "longrope":
        values[_ORIGINAL] = outside or positions
    elif major == 5 or kind == "yarn":
        values.setdefault(_ORIGINAL, positions)
    original = values.get(_ORIGINAL)
    if type(positions) is not int or type(original) is not int or original < 1:
        return
    if kind == "longrope" and major == 4 and outside:
        values["factor"] = positions / original
    elif major == 5 and kind != "llama3":
        values.setdefault("factor", positions / original)
