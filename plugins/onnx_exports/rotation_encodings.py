"""Encodings of the steps of a rotary embedding, found in the source by their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of
from buildlib.graph.folding import Refusal
from plugins.onnx_exports.encoding_transfer import transfer_encoding
from plugins.onnx_exports.root_tensors import Activation, RootTensors, token_and_feature
from plugins.onnx_exports.values import NO_TERM, Floats, Ids, LinearForm

Step = tuple[str, str]
"""A half of the head, `first` or `second`, and `cos`, `sin` or `rotated`."""

WHOLE: Step = ("both", "rotated")


@dataclass(frozen=True)
class RotationSteps:
    """Rotation of one layer's queries or keys in the canonical graph.

    Attributes:
        heads: where each head begins: the activation and its feature.
        scale: factor of the heads before the rotation.
        values: the steps.
    """

    heads: Sequence[tuple[Activation, int]]
    width: int
    dim: int
    scale: float
    values: Mapping[Step, ir.Value]


def transfer_rotation_encodings(
    roots: RootTensors,
    rotation: RotationSteps,
    tables: tuple[Floats, Floats],
    marks: Sequence[tuple[LinearForm, ir.Value]],
) -> None:
    """Give each step the encoding of its counterpart in the source.

    Args:
        tables: cosines and sines [AR, width/2].
        marks: values of the source that depend on positions and have an encoding.
    """
    by_step: dict[Step, list[tuple[ir.Value, float]]] = {}
    for form, value in marks:
        for step, scale in _steps(roots, rotation, tables, form).items():
            by_step.setdefault(step, []).append((value, rotation.scale / scale))
    for step, sources in by_step.items():
        factors = {round(factor, 6) for _, factor in sources}
        if len(factors) == 1 and step in rotation.values:
            transfer_encoding(rotation.values[step], [value for value, _ in sources], sources[0][1])
    whole = rotation.values[WHOLE]
    halves = [rotation.values[half, "rotated"] for half in ("first", "second")]
    if encoding_of(whole) is None:
        transfer_encoding(whole, halves)
    for half in halves:
        if encoding_of(half) is None:
            transfer_encoding(half, [whole])


def _steps(
    roots: RootTensors, rotation: RotationSteps, tables: tuple[Floats, Floats], form: LinearForm
) -> dict[Step, float]:
    """Return the steps that a form is, with its scale of each; none if it is of other heads."""
    half = rotation.width // 2
    parts: dict[Step, float] = {}
    for term, ids in enumerate(form.ids):
        here = ids != NO_TERM
        places = _relative(roots, rotation, ids[here])
        if places is None:
            return {}
        token, relative = places
        coef = form.dense(term)[here]
        for name, begin in (("first", 0), ("second", half)):
            inside = (relative >= begin) & (relative < begin + half)
            if not inside.any():
                continue
            column = relative[inside] % half
            for table, numbers in zip(("cos", "sin"), tables, strict=True):
                scale = _ratio(coef[inside], numbers[token[inside], column])
                if scale is not None:
                    parts[name, table] = scale
    if len(form.ids) == 1:
        return parts
    whole = {half for half, table in parts if table == "cos"}
    if not parts or len({round(abs(scale), 5) for scale in parts.values()}) > 1:
        return {}
    scale = abs(next(iter(parts.values())))
    if whole == {"first", "second"}:
        return {WHOLE: scale}
    return {(half, "rotated"): scale for half in whole}


def _relative(roots: RootTensors, rotation: RotationSteps, ids: Ids) -> tuple[Ids, Ids] | None:
    """Return the token of each id and its place in its head, or None outside these heads."""
    try:
        owners, owner = roots.owners(ids)
    except Refusal:
        return None
    token, relative = np.full_like(ids, -1), np.full_like(ids, -1)
    for index, rows in enumerate(owners):
        starts = [start for head, start in rotation.heads if head is rows]
        if not isinstance(rows, Activation) or not starts:
            return None
        places = np.full(rows.features, -1)
        for start in starts:
            places[start : start + rotation.dim] = np.arange(rotation.dim)
        mine = owner == index
        token[mine], feature = token_and_feature(rows, ids[mine])
        relative[mine] = places[feature]
    return (token, relative) if (relative >= 0).all() else None


def _ratio(numbers: Floats, table: Floats) -> float | None:
    """Return the one factor between two arrays, or None."""
    scale = float(np.sum(numbers * table) / np.sum(table * table))
    return scale if np.allclose(numbers, scale * table, atol=1e-4 * abs(scale)) else None
