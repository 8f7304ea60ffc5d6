"""Encodings of a model with adapters: those of the branches, and of values downstream.

Adapters are inputs, so that one set of encodings serves all use cases: a range covers the values of
each of them, and those of the model without adapters.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.files import load_encodings
from buildlib.encodings.model import Encoding, Encodings, asymmetric_encoding, symmetric_encoding
from buildlib.errors import EncodingsError
from buildlib.graph import interface
from buildlib.graph.files import load_model
from buildlib.passes.base import ENCODINGS_SUFFIX
from buildlib.quantize.calibration import Range, RangeChoice, observe_ranges
from buildlib.quantize.grids import shared_grids
from plugins.lora.adapters import Adapters

UpdatableMode = Literal["adapter_only", "all"]

_BITS = 16
_ALPHA_STEP = 1.0 / 32767
_BEYOND = 0.25  # of a range; less costs nothing that perplexity shows


@dataclass(frozen=True)
class AdapterCalibration:
    """Encodings of a model with branches, and use cases that they do not cover.

    Attributes:
        beyond: by use case, how far its values lie outside a range, as a part of the range; the
            farthest of all, where that is more than a quarter.
    """

    encodings: Encodings
    beyond: Mapping[str, float]


def alpha_encoding(name: str) -> Encoding:
    """Return the grid of the strength, 0 to 2 (`MAX_STRENGTH`), in steps that hit 1 exactly.

    Zero is the integer zero, which Genie leaves in an input that it has not been given.
    """
    return Encoding(
        name=name,
        dtype="INT",
        enc_type="PER_TENSOR",
        bw=_BITS,
        scale=(_ALPHA_STEP,),
        offset=(0,),
    )


def calibrate_adapters(
    model_path: Path,
    adapters: Adapters,
    alpha_name: str,
    config: DecoderConfig,
    token_windows: Sequence[Sequence[int]],
    mode: UpdatableMode = "all",
    choice: RangeChoice | None = None,
) -> AdapterCalibration:
    """Return the encodings beside a float model with branches, completed for its adapters.

    Args:
        model_path: the output of `LoraBranches`, at a prefill shape, beside the encodings of the
            model without adapters.
        adapters: their ranges decide those of A, B and the branches.
        alpha_name: the input of the strength.
        config: of the model.
        token_windows: text in tokens, each window at most the context length.
        mode: `all` widens a given range by as much as a use case reaches beyond the model without
            any; `adapter_only` leaves encodings that are there as they are.
        choice: as `observe_ranges` takes it; that of the given encodings.
    """
    path = model_path.with_suffix(ENCODINGS_SUFFIX)
    if not path.is_file():
        raise EncodingsError(str(path), "a model with adapters keeps the encodings that it had")
    given = load_encodings(path)

    def observe(name: str, strength: float) -> dict[str, Range]:
        constants = {**adapters.tensors(name), alpha_name: np.array([strength], np.float32)}
        return observe_ranges(
            model_path, config, token_windows, constants=constants, choice=choice, narrow=False
        ).ranges()

    base = observe(adapters.names[0], 0.0)
    cases = {name: observe(name, 1.0) for name in adapters.names}
    by_name = {encoding.name: encoding for encoding in given.activation_encodings}
    graph = load_model(model_path).graph
    groups = [
        group
        for names in shared_grids(graph)
        if (group := [by_name[name] for name in sorted(names) if name in by_name])
        and all(encoding.dtype == "INT" for encoding in group)
    ]
    if mode == "all":
        for group in groups:
            by_name |= _widened(group, base, cases.values())
    values = (*graph.inputs, *(value for node in graph for value in node.outputs))
    branches = [
        name
        for name in (str(value.name) for value in values)
        if interface.LORA in name
        and (name not in by_name or (mode == "adapter_only" and name.endswith("_sum")))
    ]
    matrices = (adapters.tensors(name) for name in adapters.names)
    stored = [{name: (m.min(), m.max()) for name, m in each.items()} for each in matrices]
    observed: list[Mapping[str, Range]] = [base, *cases.values(), *stored]
    branch_encodings = {
        name: asymmetric_encoding(name, *_hull([name], *observed), _BITS) for name in branches
    }
    branch_encodings[alpha_name] = alpha_encoding(alpha_name)
    by_name |= branch_encodings
    beyond = {name: _beyond(by_name, groups, base, case) for name, case in cases.items()}
    return AdapterCalibration(
        given.model_copy(update={"activation_encodings": tuple(by_name.values())}),
        {name: part for name, part in beyond.items() if part > _BEYOND},
    )


def _hull(names: Iterable[str], *observed: Mapping[str, Range]) -> Range:
    """Return the smallest and the largest observed value of tensors."""
    pairs = [ranges[name] for name in names for ranges in observed if name in ranges]
    lows, highs = [float(low) for low, _ in pairs], [float(high) for _, high in pairs]
    return min(lows, default=0.0), max(highs, default=0.0)


def _growth(
    group: Sequence[Encoding], base: Mapping[str, Range], case: Mapping[str, Range]
) -> Range:
    """Return the distance of a use case's values below and above those of the model without it."""
    names = [encoding.name for encoding in group]
    (low, high), (case_low, case_high) = _hull(names, base), _hull(names, case)
    return min(case_low - low, 0.0), max(case_high - high, 0.0)


def _widened(
    group: Sequence[Encoding], base: Mapping[str, Range], cases: Iterable[Mapping[str, Range]]
) -> Iterator[tuple[str, Encoding]]:
    """Return the encodings of values on one grid, wide enough for the use cases, by name."""
    growths = [_growth(group, base, case) for case in cases]
    below, above = min(low for low, _ in growths), max(high for _, high in growths)
    if below == above:  # both are 0
        return
    for encoding in group:
        name, bits, (low, high) = encoding.name, encoding.bw, _bounds(encoding)
        low, high = low + below, high + above
        yield (
            name,
            (
                symmetric_encoding(name, max(-low, high), bits)
                if encoding.is_sym
                else asymmetric_encoding(name, low, high, bits)
            ),
        )


def _beyond(
    known: Mapping[str, Encoding],
    groups: Iterable[Sequence[Encoding]],
    base: Mapping[str, Range],
    case: Mapping[str, Range],
) -> float:
    """Return how far a use case's values lie outside a range, as a part of it; the farthest."""
    farthest = 0.0
    for group in groups:
        below, above = _growth(group, base, case)
        for encoding in group:
            (low, high), (now_low, now_high) = _bounds(encoding), _bounds(known[encoding.name])
            outside = max(now_low - (low + below), high + above - now_high)
            farthest = max(farthest, outside / (high - low))
    return farthest


def _bounds(encoding: Encoding) -> Range:
    scale, offset = encoding.scale[0], encoding.offset[0]
    steps = (1 << encoding.bw) - 1
    lowest = offset + 1 if encoding.is_sym else offset  # the grid has one step more below
    return scale * lowest, scale * (offset + steps)
