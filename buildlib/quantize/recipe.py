"""Quantization recipe: which bits and which grid each value gets that has no encoding yet.

The default is W8A16 with 8-bit caches. Weights of matrices are int8 or int4, symmetric, with a
scale for each output channel or LPBQ; those of the output projection are always int8. Embeddings,
norms and other constants have the bits of activations, uint16 or uint8; keys and values are uint8,
symmetric around 128.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.attachment import attach
from buildlib.encodings.grid import Grid
from buildlib.encodings.model import Encoding, Encodings, asymmetric_encoding, symmetric_encoding
from buildlib.errors import EncodingsError, InvalidOptionError
from buildlib.graph import interface
from buildlib.graph.files import load_model, tensor_array
from buildlib.graph.values import static_shape
from buildlib.quantize.calibration import Range, fixed_ranges, observe_ranges, rotated_ranges
from buildlib.quantize.grids import (
    INPUT_STEP,
    ParameterUse,
    activation_names,
    available_grids,
    is_bias,
    missing_encodings_error,
    parameter_uses,
)
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.structure import channel_axis, head_weights, shared_grids

_KV_BITS = 8
_HEAD_BITS = 8
_LPBQ_BITS = 4
_BLOCK_KEY = "lpbq_block_size"
_PREFIX = "quantization."
_ALLOWED_BITS = {"act_bitwidth": (8, 16), "bias_bitwidth": (32,), "param_bitwidth": (4, 8)}
_CHUNK_VALUES = 1 << 20
_SMALLEST_SCALE = 1e-9
_LPBQ_BITS, _LPBQ_FULL_BITS = 4, 8


@dataclass(frozen=True)
class Bitwidths:
    """Bits of values without an encoding.

    Keys and values have 8; tables and norms have those of activations. Biases have 32: the QNN
    provider of ONNX Runtime compiles no others. The output projection has 8, whatever the other
    weights have: its errors go straight into the logits.

    Attributes:
        lpbq_block_size: weights of 4 bits get a scale for each block of this many inputs; None: one
            for each output channel.

    Raises:
        InvalidOptionError: a number that cannot be built.
    """

    act_bitwidth: int = 16
    bias_bitwidth: int = 32
    param_bitwidth: int = 8
    lpbq_block_size: int | None = None

    @classmethod
    def from_options(cls, options: QuantizationOptions) -> Self:
        """Take the bits from a builder's options."""
        return cls(**options.model_dump())

    def __post_init__(self) -> None:
        for key, known in _ALLOWED_BITS.items():
            if getattr(self, key) not in known:
                reason = f"{getattr(self, key)} bits cannot be built"
                raise InvalidOptionError(_PREFIX + key, reason, tuple(map(str, known)))
        if self.lpbq_block_size is not None and self.param_bitwidth != _LPBQ_BITS:
            reason = f"LPBQ is of 4 bits, and {_PREFIX}param_bitwidth is {self.param_bitwidth}"
            raise InvalidOptionError(_PREFIX + _BLOCK_KEY, reason, ())


def complete_encodings(
    model_path: Path,
    encodings: Encodings,
    config: DecoderConfig,
    token_windows: Sequence[Sequence[int]] = (),
    bitwidths: Bitwidths | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Encodings:
    """Return encodings for every float value of a whole model: the given ones and new ones.

    Args:
        model_path: the whole float model, at a prefill shape if there is text.
        encodings: given ones, which stay unchanged.
        config: configuration of the model.
        token_windows: text to observe ranges on; without any, only what follows from
            the model itself is filled in: masks, rotations, probabilities, small constants.
        bitwidths: bits of new encodings.
        progress: as `observe_ranges` calls it.

    Raises:
        EncodingsError: encodings of values that the model has not, or that contradict each other;
            or activations or weights without any, and no text.
        InvalidOptionError: LPBQ is asked for, and the compiler takes none of a weight's width.
        CalibrationError: the text cannot calibrate this model.
        ModelFileError: the model cannot be read, or tells no AR and CL.
    """

    def observe() -> Mapping[str, Range]:
        return observe_ranges(model_path, config, token_windows, progress).ranges()

    return encodings_from_ranges(
        model_path, encodings, observe if token_windows else None, bitwidths
    )


def encodings_from_ranges(
    model_path: Path,
    encodings: Encodings,
    observe: Callable[[], Mapping[str, Range]] | None,
    bitwidths: Bitwidths | None = None,
) -> Encodings:
    """Return encodings for every float value of a model of whatever kind, as `complete_encodings`.

    Args:
        model_path: the whole float model.
        encodings: given ones, which stay unchanged.
        observe: runs the model and returns the ranges of its activations by name; called only if
            one is needed. Without it only what follows from the model itself is filled in.
        bitwidths: bits of new encodings.

    Raises:
        EncodingsError: as `complete_encodings`.
        InvalidOptionError: as `complete_encodings`.
        ModelFileError: the model cannot be read.
    """
    bits = bitwidths or Bitwidths()
    model = load_model(model_path)
    attach(model, encodings)
    graph, given = model.graph, encodings.by_name()
    grids = available_grids(graph, given)
    names = activation_names(graph)
    uses = _unencoded(parameter_uses(graph, given, grids), given)
    heads = head_weights(graph)
    _check_blocks([use for name, use in uses.items() if name not in heads], bits)
    ranges = fixed_ranges(graph)
    unknown = [name for name in names if name not in grids and name not in ranges]
    if observe is None:
        ranges = rotated_ranges(graph, grids) | ranges
    elif unknown or uses:
        ranges = {**observe(), **ranges}
    work = _EncodingBuilder(grids, ranges, bits, heads)
    work.add_parameter_ranges(uses)
    work.share_encodings(shared_grids(graph))
    missing = [name for name in unknown if name not in work.shared]
    if observe is None:
        missing += [name for name, use in uses.items() if _is_matrix(use)]
    if missing:
        raise missing_encodings_error(missing)
    activations = [
        given[name] if name in given and given[name].dtype == "INT" else work.activation(name)
        for name in names
    ]
    done = {encoding.name for encoding in activations}
    others = [encoding for name, encoding in given.items() if name not in done]
    params = [work.parameter(use) for use in uses.values()]
    replaced = {encoding.name for encoding in params}
    return encodings.model_copy(
        update={
            "activation_encodings": tuple(activations),
            "param_encodings": (*(e for e in others if e.name not in replaced), *params),
        }
    )


def _unencoded(
    uses: Sequence[ParameterUse], given: Mapping[str, Encoding]
) -> dict[str, ParameterUse]:
    """Return the first use of each constant that needs an encoding, preferring a matrix's.

    Biases need none.
    """
    found: dict[str, ParameterUse] = {}
    for use in uses:
        known = use.name in given and given[use.name].dtype == "INT"
        if known or is_bias(use.node, use.index):
            continue
        if use.name not in found or _is_matrix(use):
            found[use.name] = use
    return found


def _is_matrix(use: ParameterUse) -> bool:
    return channel_axis(use.node, use.index) is not None


def _check_blocks(uses: Sequence[ParameterUse], bits: Bitwidths) -> None:
    """Check that every matrix can have the requested blocks, before any text is run."""
    size = bits.lpbq_block_size
    if size is None:
        return
    for use in uses:
        axis, shape = channel_axis(use.node, use.index), static_shape(use.source)
        if axis is None or shape is None:
            continue
        inputs = math.prod(shape) // shape[axis]
        step = next((step for step in (INPUT_STEP, size) if inputs % step), None)
        if step is None and len(shape) == 2:
            continue
        why = f"which {step} does not divide" if step else f"in {len(shape)} dimensions"
        reason = (
            f"{use.name} has {inputs} inputs, {why}, and the compiler gets such LPBQ wrong; "
            "without this option 4 bits have a scale for each output channel"
        )
        raise InvalidOptionError(_PREFIX + _BLOCK_KEY, reason, ())


class _EncodingBuilder:
    """Makes encodings from grids and ranges."""

    def __init__(
        self,
        grids: Mapping[str, Grid],
        ranges: Mapping[str, Range],
        bits: Bitwidths,
        heads: Collection[str],
    ) -> None:
        self.grids = grids
        self.ranges = dict(ranges)
        self.bits = bits
        self.heads = heads
        self.shared: dict[str, Encoding] = {}

    def add_parameter_ranges(self, uses: Mapping[str, ParameterUse]) -> None:
        """Add the ranges of constants other than matrices and their biases."""
        for name, use in uses.items():
            if not _is_matrix(use) and use.source.const_value is not None:
                self.ranges[name] = value_range(name, tensor_array(use.source.const_value))

    def share_encodings(self, groups: Sequence[set[str]]) -> None:
        """Make one encoding for all values of each group, which must lie on one grid."""
        for names in groups:
            known = next((self.grids[name] for name in sorted(names) if name in self.grids), None)
            seen = [self.ranges[name] for name in names if name in self.ranges]
            if known is None and not seen:
                continue
            low = min((lowest for lowest, _ in seen), default=0.0)
            high = max((highest for _, highest in seen), default=0.0)
            for name in names:
                if known is not None:
                    self.shared[name] = encoding_from_grid(name, known)
                elif any(map(interface.is_kv, names)):
                    self.shared[name] = symmetric_encoding(name, max(-low, high), _KV_BITS)
                else:
                    self.shared[name] = asymmetric_encoding(name, low, high, self.bits.act_bitwidth)

    def activation(self, name: str) -> Encoding:
        """Return the encoding of a computed value or an input."""
        if name in self.grids:
            return encoding_from_grid(name, self.grids[name])
        return self.shared[name]

    def parameter(self, use: ParameterUse) -> Encoding:
        """Return the encoding of a constant."""
        assert use.source.const_value is not None  # noqa: S101  (an initializer)
        axis = channel_axis(use.node, use.index)
        if axis is not None:
            array = tensor_array(use.source.const_value)
            if use.name in self.heads:
                return per_channel_encoding(use.name, array, axis, _HEAD_BITS)
            if self.bits.lpbq_block_size is not None:
                return lpbq_encoding(use.name, array, axis, self.bits.lpbq_block_size)
            return per_channel_encoding(use.name, array, axis, self.bits.param_bitwidth)
        if use.name in self.shared:
            return self.shared[use.name]
        return asymmetric_encoding(use.name, *self.ranges[use.name], self.bits.act_bitwidth)


def encoding_from_grid(name: str, grid: Grid) -> Encoding:
    """Return the per-tensor encoding of a grid."""
    return Encoding(
        name=name,
        dtype="INT",
        enc_type="PER_TENSOR",
        bw=grid.bits,
        is_sym=grid.zero_point == (1 << (grid.bits - 1),),
        scale=grid.scale,
        offset=tuple(-zero for zero in grid.zero_point),
    )


def value_range(name: str, weights: npt.NDArray[Any]) -> tuple[float, float]:
    """Return the smallest and the largest value."""
    low, high = np.inf, -np.inf
    for rows in _chunks(weights):
        low, high = min(low, float(rows.min())), max(high, float(rows.max()))
    _check_finite(name, np.array([low, high]))
    return low, high


def per_channel_encoding(name: str, weights: npt.NDArray[Any], axis: int, bits: int) -> Encoding:
    """Return the symmetric encoding that covers each channel's largest magnitude."""
    others = tuple(a for a in range(weights.ndim) if a != axis)
    parts = [np.abs(rows).max(axis=others) for rows in _chunks(weights)]
    magnitudes = np.concatenate(parts) if axis == 0 else np.max(parts, axis=0)
    _check_finite(name, magnitudes)
    half = 1 << (bits - 1)
    scales = np.maximum(magnitudes.astype(np.float64) / (half - 1), _SMALLEST_SCALE)
    return Encoding(
        name=name,
        dtype="INT",
        enc_type="PER_CHANNEL",
        bw=bits,
        is_sym=True,
        scale=tuple(scales.tolist()),
        offset=(-half,) * len(scales),
        axis=axis,
    )


def lpbq_encoding(name: str, weights: npt.NDArray[Any], axis: int, block_size: int) -> Encoding:
    """Return the LPBQ encoding of a weight.

    Each weight has 4 bits, the scale of each block along the other axis has 4, and each channel has
    one float scale: the largest block scale of a channel is 16 of its steps.

    Args:
        name: name of the tensor.
        weights: [out, in] if `axis` is 0, [in, out] if it is 1.
        axis: axis of the channels.
        block_size: divides the number of inputs.
    """
    if weights.ndim != 2 or weights.shape[1 - axis] % block_size:
        reason = f"blocks of {block_size} for a weight of shape {list(weights.shape)}"
        raise EncodingsError(name, reason)
    by_channel = np.asarray(weights, np.float32) if axis == 0 else np.asarray(weights.T, np.float32)
    blocks = np.abs(by_channel.reshape(len(by_channel), -1, block_size)).max(axis=2)
    _check_finite(name, blocks)
    wanted = np.maximum(blocks.astype(np.float64) / ((1 << (_LPBQ_BITS - 1)) - 1), _SMALLEST_SCALE)
    steps = 1 << (_LPBQ_FULL_BITS - _LPBQ_BITS)
    scales = wanted.max(axis=1) / steps
    factors = np.clip(np.ceil(wanted / scales[:, None] - 1e-9), 1, steps).astype(np.uint8)
    return Encoding(
        name=name,
        dtype="INT",
        enc_type="LPBQ",
        bw=_LPBQ_FULL_BITS,
        compressed_bw=_LPBQ_BITS,
        is_sym=True,
        scale=tuple(scales.tolist()),
        offset=(-(1 << (_LPBQ_FULL_BITS - 1)),) * len(scales),
        block_size=block_size,
        per_block_int_scale=factors.tobytes(),
        axis=axis,
        block_axis=1 - axis,
    )


def _chunks(weights: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.float32]]:
    """Yield some rows at a time, as float32; a scalar as one row."""
    rows = weights.reshape(1) if weights.ndim == 0 else weights
    step = max(1, _CHUNK_VALUES // max(1, rows[:1].size))
    for start in range(0, len(rows), step):
        yield np.asarray(rows[start : start + step], np.float32)


def _check_finite(name: str, values: npt.NDArray[Any]) -> None:
    if not np.isfinite(values).all():
        raise EncodingsError(name, "its values are not finite")
