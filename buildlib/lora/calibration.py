"""Encodings of a model with adapters: those of the branches, and of values downstream.

Adapters are inputs, so that one set of encodings serves all use cases: a range covers what each of
them, and the model without any, was seen to reach.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.files import load_encodings
from buildlib.encodings.model import Encoding, Encodings, asymmetric_encoding, symmetric_encoding
from buildlib.errors import EncodingsError
from buildlib.graph import interface
from buildlib.graph.files import load_model
from buildlib.lora.adapters import Adapters
from buildlib.passes.base import ENCODINGS_SUFFIX
from buildlib.quantize.calibration import RangeObserver, observe_ranges
from buildlib.quantize.structure import shared_grids

UpdatableMode = Literal["adapter_only", "all"]

_BITS = 16
_ALPHA_STEP = 1.0 / 32767


def alpha_encoding(name: str) -> Encoding:
    """Return the grid of the strength: 0 to 2 in steps that hit 1 exactly.

    Zero is the integer zero, which is what Genie leaves in an input that it has not been given.
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
    mode: UpdatableMode = "adapter_only",
) -> Encodings:
    """Return the encodings beside a float model with branches, completed for its adapters.

    Args:
        model_path: what `LoraBranches` wrote, at a prefill shape, with the encodings of the model
            without adapters beside it.
        adapters: their ranges decide those of A, B and the branches.
        alpha_name: the input of the strength.
        config: of the model.
        token_windows: text in tokens, each window at most the context length.
        mode: `adapter_only` leaves encodings that are there as they are; `all` widens them to what
            the use cases reach.

    Raises:
        EncodingsError: there are no encodings beside the model.
        CalibrationError: no window holds a call of the model.
    """
    path = model_path.with_suffix(ENCODINGS_SUFFIX)
    if not path.is_file():
        raise EncodingsError(str(path), "a model with adapters keeps the encodings that it had")
    given = load_encodings(path)
    ranges = _observe(model_path, adapters, alpha_name, config, token_windows)
    ranges.low[alpha_name], ranges.high[alpha_name] = 0.0, 1.0
    for name in adapters.names:
        for tensor, values in adapters.tensors(name).items():
            ranges.low[tensor] = min(ranges.low.get(tensor, 0.0), float(values.min()))
            ranges.high[tensor] = max(ranges.high.get(tensor, 0.0), float(values.max()))
    known = {encoding.name: encoding for encoding in given.activation_encodings}
    branches = _branch_values(model_path, known)
    found = {
        name: asymmetric_encoding(name, ranges.low[name], ranges.high[name], _BITS)
        for name in branches
    }
    if mode == "all":
        known = _widened(model_path, known, ranges)
    found[alpha_name] = alpha_encoding(alpha_name)
    return given.model_copy(update={"activation_encodings": tuple((known | found).values())})


def _observe(
    model_path: Path,
    adapters: Adapters,
    alpha_name: str,
    config: DecoderConfig,
    token_windows: Sequence[Sequence[int]],
) -> RangeObserver:
    """Return the ranges of all values, over all use cases and without any."""
    ranges = RangeObserver()
    for index, name in enumerate(adapters.names):
        tensors = adapters.tensors(name)
        for strength in (0.0, 1.0) if index == 0 else (1.0,):
            constants = {**tensors, alpha_name: np.array([strength], np.float32)}
            ranges.merge(observe_ranges(model_path, config, token_windows, constants=constants))
    return ranges


def _branch_values(model_path: Path, known: Mapping[str, Encoding]) -> list[str]:
    """Return the names of the values of branches: their inputs and what they compute."""
    graph = load_model(model_path).graph
    values = (*graph.inputs, *(value for node in graph for value in node.outputs))
    names = [str(value.name) for value in values if interface.LORA in str(value.name)]
    return [name for name in names if name not in known or name.endswith("_sum")]


def _widened(
    model_path: Path, known: Mapping[str, Encoding], ranges: RangeObserver
) -> dict[str, Encoding]:
    """Return every integer encoding, wide enough for the ranges of all that share its grid."""
    widened = dict(known)
    for names in shared_grids(load_model(model_path).graph):
        encodings = [known[name] for name in names if name in known]
        seen = [name for name in names if name in ranges.low]
        if not encodings or not seen or any(e.dtype != "INT" for e in encodings):
            continue
        bounds = [_bounds(encoding) for encoding in encodings]
        low = min(*(ranges.low[name] for name in seen), *(b[0] for b in bounds))
        high = max(*(ranges.high[name] for name in seen), *(b[1] for b in bounds))
        if all(bound == (low, high) for bound in bounds):
            continue
        for encoding in encodings:
            name, bits = encoding.name, encoding.bw
            widened[name] = (
                symmetric_encoding(name, max(-low, high), bits)
                if encoding.is_sym
                else asymmetric_encoding(name, low, high, bits)
            )
    return widened


def _bounds(encoding: Encoding) -> tuple[float, float]:
    scale, offset = encoding.scale[0], encoding.offset[0]
    return scale * offset, scale * (offset + (1 << encoding.bw) - 1)
