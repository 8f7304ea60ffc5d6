"""Quantization recipe: which bits and which grid each value gets that has no encoding yet.

The default is W8A16 with 8-bit caches. Weights of matrices are int8 or int4, symmetric, with a
scale for each output channel or LPBQ; those of the output projection are always int8. Embeddings,
norms and other constants have the bits of activations, uint16 or uint8; keys and values are uint8
or uint16, symmetric around the middle.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.attachment import attach
from buildlib.encodings.grid import Grid
from buildlib.encodings.model import Encoding, Encodings, asymmetric_encoding, symmetric_encoding
from buildlib.errors import EncodingsError, InvalidOptionError
from buildlib.graph import interface
from buildlib.graph.files import load_model, tensor_array
from buildlib.graph.values import static_shape
from buildlib.quantize.bitwidths import BLOCK_KEY, Bitwidths, WeightFormat, kills_emulator
from buildlib.quantize.calibration import (
    Range,
    fixed_ranges,
    masked_ranges,
    observe_ranges,
    range_choice,
    rotated_ranges,
)
from buildlib.quantize.grids import (
    ParameterUse,
    activation_names,
    available_grids,
    channel_axis,
    head_weights,
    is_bias,
    missing_encodings_error,
    parameter_uses,
    shared_grids,
)
from buildlib.quantize.options import RangeName
from buildlib.quantize.weight_grids import chunks, lpbq_encoding, per_channel_encoding

_KV_BITS = 8


def choose_cache_bits(bits: Bitwidths, encodings: Encodings) -> int:
    """Decide the bits of all keys and values; what follows calibration reads them in encodings.

    Given encodings decide, then the option. An option that is not set begins with 8;
    `judge_quantization` makes it 16 where these lose much.

    Raises:
        EncodingsError: some of the given encodings have 8 bits and some 16.
    """
    return cache_bits(encodings) or bits.kv_bitwidth or _KV_BITS


def cache_bits(encodings: Encodings) -> int | None:
    """Return the bits of keys and values that have encodings; None where none has.

    Raises:
        EncodingsError: they differ: Genie 1.21 refuses such a container, by its line "Only one
            bitwidth permitted per cache group".
    """
    first: Encoding | None = None
    for name, encoding in encodings.by_name().items():
        if not interface.is_kv(name) or encoding.dtype != "INT":
            continue
        first = first or encoding
        if encoding.bw != first.bw:
            reason = f"it has {encoding.bw} bits and {first.name} {first.bw}: Genie takes one width"
            raise EncodingsError(name, f"{reason} for all keys and values")
    return None if first is None else first.bw


def complete_encodings(
    model_path: Path,
    encodings: Encodings,
    config: DecoderConfig,
    token_windows: Sequence[Sequence[int]] = (),
    bitwidths: Bitwidths | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    ranges: RangeName = "minmax",
    observed: Mapping[str, Range] | None = None,
) -> Encodings:
    """Return encodings for every float value of a whole model: the given ones and new ones.

    Args:
        model_path: the whole float model, at a prefill shape if there is text.
        encodings: given ones, which stay unchanged.
        token_windows: text to observe ranges on. Without text, new encodings are only for ranges
            that follow from the model: masks, rotations, probabilities, small constants.
        progress: as `observe_ranges` calls it.
        observed: whole ranges of the activations over the text, if they are known; estimators of
            narrower ranges run the text all the same.

    Raises:
        EncodingsError: encodings of values that the model has not, or that contradict each other;
            or activations or weights without any, and no text.
        InvalidOptionError: the compiler has no LPBQ for the width of a weight, or a pattern of
            `mixed_precision` matches no weight.
        BuildError: the text cannot calibrate this model.
        ModelFileError: the model cannot be read, or tells no AR and CL.
    """
    bits = bitwidths or Bitwidths()
    graph = load_model(model_path).graph
    names = {name for name in activation_names(graph) if not interface.is_kv(name)}
    bits.check_patterns({use.name for use in matrix_uses(graph)}, names)

    def observe() -> Mapping[str, Range]:
        choice = range_choice(ranges, bits.act_bitwidth, choose_cache_bits(bits, encodings))
        if observed is not None and choice is None:
            return observed
        return observe_ranges(model_path, config, token_windows, progress, choice=choice).ranges()

    return encodings_from_ranges(model_path, encodings, observe if token_windows else None, bits)


def encodings_from_ranges(
    model_path: Path,
    encodings: Encodings,
    observe: Callable[[], Mapping[str, Range]] | None,
    bitwidths: Bitwidths | None = None,
) -> Encodings:
    """Return encodings for every float value of any model, as `complete_encodings` does.

    Args:
        encodings: given ones, which stay unchanged.
        observe: runs the model and returns the ranges of its activations by name; called only if
            one is needed. Without it only ranges that follow from the model are used.
    """
    bits = bitwidths or Bitwidths()
    model = load_model(model_path)
    attach(model, encodings)
    graph, by_name = model.graph, encodings.by_name()
    grids = available_grids(graph, by_name)
    names = activation_names(graph)
    uses = _unencoded(parameter_uses(graph, by_name, grids), by_name)
    heads = head_weights(graph)
    check_blocks(uses.values(), heads, bits)
    ranges = fixed_ranges(graph)
    open_names = [name for name in names if name not in grids and name not in ranges]
    if observe is None:
        ranges = rotated_ranges(graph, grids) | ranges
    elif open_names or uses:
        ranges = {**observe(), **ranges}
        ranges |= masked_ranges(graph, ranges, grids)
    kv_bits = choose_cache_bits(bits, encodings)
    builder = _EncodingBuilder(grids, ranges, bits, kv_bits, heads)
    builder.add_parameter_ranges(uses)
    builder.share_encodings(shared_grids(graph))
    no_encoding = [name for name in open_names if name not in builder.shared]
    if observe is None:
        no_encoding += [name for name, use in uses.items() if _is_matrix(use)]
    if no_encoding:
        raise missing_encodings_error(no_encoding)
    activations = {
        name: by_name[name] if _has_integers(name, by_name) else builder.activation(name)
        for name in names
    }
    params = {name: builder.parameter(use) for name, use in uses.items()}
    others = (by_name[name] for name in by_name if name not in activations.keys() | params.keys())
    complete = encodings.model_copy(
        update={
            "activation_encodings": tuple(activations.values()),
            "param_encodings": (*others, *params.values()),
        }
    )
    cache_bits(complete)  # given ones may be of some values only
    return complete


def _has_integers(name: str, encodings: Mapping[str, Encoding]) -> bool:
    return name in encodings and encodings[name].dtype == "INT"


def _unencoded(
    uses: Sequence[ParameterUse], encodings: Mapping[str, Encoding]
) -> dict[str, ParameterUse]:
    """Return the first use of each constant but biases without an encoding; a matrix's if any."""
    first_uses: dict[str, ParameterUse] = {}
    for use in uses:
        if _has_integers(use.name, encodings) or is_bias(use.node, use.index):
            continue
        if use.name not in first_uses or _is_matrix(use):
            first_uses[use.name] = use
    return first_uses


def _is_matrix(use: ParameterUse) -> bool:
    return channel_axis(use.node, use.index) is not None


def matrix_uses(graph: ir.Graph) -> list[ParameterUse]:
    """Return the uses of constants as weights of matrices."""
    return [use for use in parameter_uses(graph, {}, {}) if _is_matrix(use)]


def check_blocks(uses: Iterable[ParameterUse], heads: Collection[str], bits: Bitwidths) -> None:
    """Check that every matrix can have the requested blocks, before any text is run."""
    for use in uses:
        if _is_matrix(use):
            weight_format(use, bits, head=use.name in heads)


def weight_format(use: ParameterUse, bits: Bitwidths, *, head: bool = False) -> WeightFormat:
    """Return the format of the weight of a matrix, in blocks only if its inputs are whole ones."""
    axis, shape = channel_axis(use.node, use.index), static_shape(use.source)
    fmt = bits.weight_format(use.name, head=head)
    if axis is None or shape is None or fmt.block_size is None:
        return fmt
    inputs = math.prod(shape) // shape[axis]
    step = next((step for step in (bits.input_step, fmt.block_size) if inputs % step), None)
    fatal = bits.input_step > 1 and kills_emulator(inputs, fmt.block_size)
    if step is None and len(shape) == 2 and not fatal:
        return fmt
    if bits.blocks_where_they_fit:
        return WeightFormat(fmt.bits)
    reason = f"{use.name} has {inputs} inputs"
    if step is None and fatal:
        reason += ", and the HTP emulator dies of so many in blocks of 64; take 32"
    else:
        reason += f", which {step} does not divide" if step else f" in {len(shape)} dimensions"
        reason += ", and the compiler gets such LPBQ wrong"
    otherwise = "without this option it has a scale for each output channel"
    raise InvalidOptionError(BLOCK_KEY, f"{reason}; {otherwise}", ())


class _EncodingBuilder:
    """Makes encodings from grids and ranges."""

    def __init__(
        self,
        grids: Mapping[str, Grid],
        ranges: Mapping[str, Range],
        bits: Bitwidths,
        kv_bits: int,
        heads: Collection[str],
    ) -> None:
        self.grids = grids
        self.ranges = dict(ranges)
        self.bits = bits
        self.kv_bits = kv_bits
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
            bits = self.bits.activation_bits(names)
            grid = next((self.grids[name] for name in sorted(names) if name in self.grids), None)
            ranges = [self.ranges[name] for name in names if name in self.ranges]
            if grid is None and not ranges:
                continue
            low = min((lowest for lowest, _ in ranges), default=0.0)
            high = max((highest for _, highest in ranges), default=0.0)
            for name in names:
                if grid is not None:
                    self.shared[name] = encoding_from_grid(name, grid)
                elif any(map(interface.is_kv, names)):
                    self.shared[name] = symmetric_encoding(name, max(-low, high), self.kv_bits)
                else:
                    self.shared[name] = asymmetric_encoding(name, low, high, bits)

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
            fmt = weight_format(use, self.bits, head=use.name in self.heads)
            if fmt.block_size is not None:
                return lpbq_encoding(use.name, array, axis, fmt.block_size)
            return per_channel_encoding(use.name, array, axis, fmt.bits)
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
    for rows in chunks(weights):
        low, high = min(low, float(rows.min())), max(high, float(rows.max()))
    if not np.isfinite([low, high]).all():
        raise EncodingsError(name, "its values are not finite")
    return low, high
