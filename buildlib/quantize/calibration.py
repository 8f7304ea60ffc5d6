"""Calibration: the range of every activation.

Text runs through copies of the float model's segments with a ReduceMin and a ReduceMax on each
activation, so a call returns two numbers for each, and memory holds one layer, however large the
model. Narrower ranges than the whole ones are estimated from histograms, in a second run of each
segment. Ranges of fixed inputs and of bounded functions need no text.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.grid import Grid
from buildlib.graph import interface
from buildlib.graph.files import load_model, save_model
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import is_parameter, is_real, static_shape
from buildlib.numerics.runners import Arrays
from buildlib.numerics.segment_loop import Hidden, SegmentLoop
from buildlib.quantize.options import RangeName

Range = tuple[float, float]
Rows = npt.NDArray[np.float32]
_BINS = 2048
_SATURATING = 1e-4
_PARTS = np.linspace(1.0, 0.1, 46)
_WINDOW_TOKENS, _TOKENS, _MOST_WINDOWS = 2048, 2048, 8
_BEGINNING_TOKENS, _CHATS, _APART = 128, 2, 4
"""Of short windows that show how texts begin: their tokens, how many of them begin as chats do, and
how many tokens before the first of a chat are not special."""
_LOW, _HIGH, _ROWS = "__low", "__high", "__rows"
_PEAKS, _STRIDE = 4, 8  # tokens of a call that are kept: the largest, and every eighth
_STEPS = (1 << 16) - 1
_EPSILON, _SMALL_ERROR, _HALVES = 1e-12, 1e-6, 16
_INPUTS: dict[str, Range] = {
    interface.ATTENTION_MASK: (interface.MASKED, 0.0),
    **dict.fromkeys(interface.ROTATIONS, (-1.0, 1.0)),
}

_FUNCTIONS: dict[str, Range] = {"Softmax": (0.0, 1.0), "Sigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0)}
_MASKS = frozenset({interface.ATTENTION_MASK, interface.WINDOW_MASK})
_BELOW_SCORES = 100.0
"""By how much hidden scores lie below all others on their grid, at least."""
_LATER = "window_later"  # a difference of counts of slots
_WINDOW: dict[str, Range] = {
    interface.WINDOW_MASK: (interface.MASKED, 0.0),
    "window_hidden": (-1.0, 0.0),
    "window_seen": (0.0, 1.0),
}


@dataclass
class Histogram:
    """Counts of an activation's values over all text, in bins from the lowest to the highest."""

    low: float
    high: float
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))

    def add(self, values: npt.NDArray[Any]) -> None:
        """Count values."""
        if self.low < self.high:
            clipped = np.clip(values, self.low, self.high)
            self.counts += np.histogram(clipped, _BINS, (self.low, self.high))[0]


RangeEstimator = Callable[[Histogram, int], Range]
"""Chooses the range that a grid of some bits covers; values outside it saturate."""


def percentile(histogram: Histogram, bits: int) -> Range:
    """Return the range of nearly all values, at the edges of bins.

    One in ten thousand saturates at each end.
    """
    del bits
    total = np.cumsum(histogram.counts)
    if not total[-1]:
        return histogram.low, histogram.high
    first = int(np.searchsorted(total, _SATURATING * total[-1], side="right"))
    last = int(np.searchsorted(total, (1 - _SATURATING) * total[-1]))
    step = (histogram.high - histogram.low) / _BINS
    return histogram.low + first * step, histogram.low + (last + 1) * step


def mse(histogram: Histogram, bits: int) -> Range:
    """Return the range of the least square error: of rounding inside, of saturation outside.

    One end after the other shrinks while the error over the histogram falls.
    """
    low, high = min(histogram.low, 0.0), max(histogram.high, 0.0)
    if not histogram.counts.any():
        return low, high
    edges = np.linspace(histogram.low, histogram.high, _BINS + 1)
    centers, counts = (edges[1:] + edges[:-1]) / 2, histogram.counts.astype(np.float64)

    def error(low: float, high: float) -> float:
        step = (high - low) / ((1 << bits) - 1)
        if step <= 0:
            return np.inf
        rounded = np.rint((np.clip(centers, low, high) - low) / step) * step + low
        return float((counts * (rounded - centers) ** 2).sum())

    high = min((high * part for part in _PARTS), key=lambda one: error(low, one))
    low = min((low * part for part in _PARTS), key=lambda one: error(one, high))
    return low, high


ESTIMATORS: Mapping[RangeName, RangeEstimator] = {"percentile": percentile, "mse": mse}


@dataclass(frozen=True)
class RangeChoice:
    """Estimator of ranges, and the bits of the grids that cover them.

    Attributes:
        kv_bits: of keys and values.
    """

    estimate: RangeEstimator
    bits: int
    kv_bits: int


def range_choice(name: RangeName, bits: int, kv_bits: int) -> RangeChoice | None:
    """Return how to estimate ranges of activations of some bits; None for whole ranges."""
    return RangeChoice(ESTIMATORS[name], bits, kv_bits) if name in ESTIMATORS else None


class RangeObserver:
    """The range of each activation over all observed calls.

    It is the whole range, but for hidden states that norms read. Models keep a massive number in a
    channel of a few tokens there, 100,000 beside medians of 1 (Sun et al., "Massive Activations in
    Large Language Models", 2024), and a grid that reached it would leave the others a few steps. A
    norm divides each token by its own size, so that little follows from how massive the number is:
    what counts is the error of the normalised token, and the range is the widest of no more than
    twice the least one.

    Attributes:
        low: the smallest value of each activation, by name.
        high: the largest.
    """

    def __init__(self) -> None:
        self.low: dict[str, float] = {}
        self.high: dict[str, float] = {}
        self._rows: dict[str, list[Rows]] = {}
        self._sums: dict[str, tuple[str, ...]] = {}
        self._moved: dict[str, str] = {}
        self._bounds: dict[str, float] = {}

    def add_outputs(self, model: ir.Model) -> None:
        """Add to a whole float model, or a part of one, the outputs that `observe` takes in."""
        graph = model.graph
        hidden, self._sums = _hidden_states(graph)
        self._moved = _moved_hidden_states(graph)
        add_range_outputs(model)
        for value in hidden:
            output = ir.val(f"{value.name}{_ROWS}", ir.DataType.FLOAT, value.shape)
            graph.append(ir.node("Identity", [value], outputs=[output]))
            graph.outputs.append(output)

    def observe(self, outputs: Arrays, n_tokens: int) -> None:
        """Take in the outputs of one call of an instrumented model."""
        del n_tokens
        for name, array in outputs.items():
            if name.endswith(_LOW):
                key = name.removesuffix(_LOW)
                self.low[key] = min(self.low.get(key, np.inf), float(array))
            elif name.endswith(_HIGH):
                key = name.removesuffix(_HIGH)
                self.high[key] = max(self.high.get(key, -np.inf), float(array))
            elif name.endswith(_ROWS):
                rows = array.reshape(-1, array.shape[-1])
                most = np.argsort(np.abs(rows).max(axis=1))[-_PEAKS:]
                kept = np.unique(np.concatenate([most, np.arange(0, len(rows), _STRIDE)]))
                self._rows.setdefault(name.removesuffix(_ROWS), []).append(rows[kept])

    def narrow(self) -> None:
        """Narrow the ranges of hidden states that were observed since the last call."""
        for name, kept in self._rows.items():
            whole = (self.low[name], self.high[name])
            low, high = _normalised_range(np.concatenate(kept), whole)
            if (low, high) != whole:
                self._bounds[name] = max(-low, high)
                self._clip(name, low, high)
        for total, addends in self._sums.items():
            # What is taken away later must be no more than what was kept.
            bounds = [self._bounds[name] for name in (total, *addends) if name in self._bounds]
            for name in addends:
                if bounds and name not in self._bounds and name in self.low:
                    self._clip(name, -max(bounds), max(bounds))
        self._rows, self._sums = {}, {}

    def _clip(self, name: str, low: float, high: float) -> None:
        while name in self.low:
            self.low[name] = max(self.low[name], low)
            self.high[name] = min(self.high[name], high)
            name = self._moved.get(name, "")

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return (smallest, largest) by name."""
        return {name: (low, self.high[name]) for name, low in self.low.items()}


def _normalised_range(rows: Rows, whole: Range) -> Range:
    """Return the widest range that gives normalised tokens at most twice the least error."""
    low, high = min(whole[0], 0.0), max(whole[1], 0.0)
    rms = np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + _EPSILON)

    def error(low: float, high: float) -> float:
        step = max(high - low, _EPSILON) / _STEPS
        values = np.rint((np.clip(rows, low, high) - low) / step) * step + low
        own = np.sqrt(np.square(values).mean(axis=1, keepdims=True) + _EPSILON)
        return float(np.square(values / own - rows / rms).mean())

    if error(low, high) < _SMALL_ERROR:
        return whole
    for _ in range(2):
        high = _widest(high, partial(error, low))
        low = _widest(low, partial(error, high=high))
    return low, high


def _widest(end: float, error: Callable[[float], float]) -> float:
    """Return the largest of an end and its halves that has at most twice the least error."""
    ends, errors = [end], [error(end)]
    while errors[-1] <= 4 * min(errors) and len(ends) < _HALVES:
        ends.append(ends[-1] / 2)
        errors.append(error(ends[-1]))
    return next(one for one, own in zip(ends, errors, strict=True) if own <= 2 * min(errors))


def _hidden_states(graph: ir.Graph) -> tuple[list[ir.Value], dict[str, tuple[str, ...]]]:
    """Return hidden states [1, AR, hidden] that norms read, and the addends of those that are sums.

    The norm of a sum may stand in another part of the model.
    """
    hidden: dict[ir.Value, None] = {}
    sums: dict[str, tuple[str, ...]] = {}
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        shape = static_shape(node.outputs[0])
        if shape is None or len(shape) != 3 or any(not is_real(value) for value in inputs):
            continue
        if node.op_type == "Add" and all(static_shape(value) == shape for value in inputs):
            hidden[node.outputs[0]] = None
            sums[str(node.outputs[0].name)] = tuple(
                str(value.name) for value in inputs if not is_parameter(value)
            )
        elif node.op_type == "RMSNormalization" and inputs[0].producer() is not None:
            hidden[inputs[0]] = None
    return list(hidden), sums


def _moved_hidden_states(graph: ir.Graph) -> dict[str, str]:
    """Return the value that each reshaped hidden state [1, AR, hidden] is made of, by name."""
    return {
        str(node.outputs[0].name): str(node.inputs[0].name)
        for node in graph
        if node.op_type == "Reshape"
        and node.inputs[0] is not None
        and node.inputs[0].producer() is not None
        and len(static_shape(node.outputs[0]) or ()) == 3
    }


def instrument_ranges(model_path: Path, out_path: Path) -> Path:
    """Write the model with the range of every activation as additional outputs."""
    model = load_model(model_path)
    add_range_outputs(model)
    return save_model(model, out_path)


def add_range_outputs(model: ir.Model) -> None:
    """Add the range of every activation to the outputs of a model, in place."""
    graph = model.graph
    values = [value for node in graph for value in node.outputs]
    for value in values:
        if not is_real(value) or is_parameter(value):
            continue
        for op_type, suffix in (("ReduceMin", _LOW), ("ReduceMax", _HIGH)):
            output = ir.val(f"{value.name}{suffix}", ir.DataType.FLOAT, ())
            graph.append(ir.node(op_type, [value], {"keepdims": 0}, outputs=[output]))
            graph.outputs.append(output)


def fixed_ranges(graph: ir.Graph) -> dict[str, Range]:
    """Return the ranges, by name, of inputs that Genie feeds and of values of bounded functions."""
    ranges = {str(v.name): _INPUTS[str(v.name)] for v in graph.inputs if str(v.name) in _INPUTS}
    for node in graph:
        output = node.outputs[0]
        if output.name in _WINDOW:
            ranges[str(output.name)] = _WINDOW[str(output.name)]
        elif node.op_type in _FUNCTIONS:
            ranges[str(output.name)] = _FUNCTIONS[node.op_type]
        elif node.op_type == "CumSum":  # of slots, to tell those in a sliding window
            counts = (0.0, float((static_shape(output) or (1,))[-1]))
            ranges |= {str(output.name): counts, _LATER: counts}
    return ranges


def masked_scores(graph: ir.Graph) -> dict[str, str]:
    """Return the names of masked scores, each with that of its scores."""
    found = {}
    for node in graph:
        names = [str(value.name) for value in node.inputs if value is not None]
        scores = [name for name in names if name not in _MASKS]
        if node.op_type == "Add" and len(scores) < len(names):
            found[str(node.outputs[0].name)] = scores[0]
    return found


def masked_ranges(
    graph: ir.Graph, ranges: Mapping[str, Range], grids: Mapping[str, Grid]
) -> dict[str, Range]:
    """Return the ranges, by name, of masked scores and of their mask.

    Masked scores reach so far below all scores that nothing of what is hidden shows, and the mask
    to where the highest score saturates there. Beyond that it costs bits, as HTP adds integers by
    the wider of their steps: with a mask of -10,000 and scores of 8 bits, the reference model lost
    1.4 times as much on the emulator. Where a sliding window is counted from the mask, that stays.

    Args:
        ranges, grids: of scores, the latter where encodings are given.
    """
    known = {**ranges, **{name: grid.ends for name, grid in grids.items()}}
    scores = {masked: known[name] for masked, name in masked_scores(graph).items() if name in known}
    found = {masked: (low - _BELOW_SCORES, high) for masked, (low, high) in scores.items()}
    mask = next((one for one in graph.inputs if one.name == interface.ATTENTION_MASK), None)
    readers = {str(node.outputs[0].name) for node, _ in mask.uses()} if mask is not None else set()
    if readers and scores.keys() >= readers:
        ends = (known[name] if name in grids else found[name] for name in readers)
        spread = max(scores[name][1] - low for name, (low, _) in zip(readers, ends, strict=True))
        found[interface.ATTENTION_MASK] = (max(interface.MASKED, -spread), 0.0)
    return found


def rotated_ranges(graph: ir.Graph, grids: Mapping[str, Grid]) -> dict[str, Range]:
    """Return the ranges, by name, of rotary embeddings of values on known grids.

    Rotations keep lengths: a product with a cosine is no larger than its other factor, and the sum
    of two such products is at most sqrt(2) times larger.
    """
    products: dict[str, float] = {}
    sums: dict[str, float] = {}
    for node in graph:
        names = [str(value.name) for value in node.inputs if value is not None]
        output = str(node.outputs[0].name)
        if node.op_type == "Mul" and interface.ROTATIONS & set(names):
            data = next((name for name in names if name not in interface.ROTATIONS), None)
            if data is not None and data in grids:
                products[output] = max(map(abs, grids[data].ends))
        elif node.op_type in {"Add", "Sub"} and names and all(name in products for name in names):
            sums[output] = math.sqrt(2.0) * max(products[name] for name in names)
    return {name: (-largest, largest) for name, largest in (products | sums).items()}


def window_length(shape: GraphShape, tokens: int | None = None) -> int:
    """Return the length of text windows that calibrate a model: its context, up to 2048 tokens.

    It is shorter where there are fewer `tokens` in all. Late tokens have ranges of their own:
    windows of a quarter of the context cost the reference model 0.6 % of perplexity, as
    `benchmarks.calibration_windows` prints.
    """
    return max(shape.ar, min(shape.cl, _WINDOW_TOKENS, tokens or _WINDOW_TOKENS))


def window_count(length: int, tokens: int | None = None) -> int:
    """Return the number of windows of a length: by default 2048 tokens, in at most 8 windows.

    The reference model in W8A16 scores alike, within 0.1 %, with 1, 2, 4 or 8 windows of 512.
    """
    return max(1, min(_MOST_WINDOWS, _TOKENS // length) if tokens is None else tokens // length)


def beginnings(
    windows: Sequence[Sequence[int]],
    tokens: Sequence[int],
    special: frozenset[int],
    bos: int | None,
    ar: int,
) -> list[list[int]]:
    """Return short windows that begin as texts on a device do.

    The first tokens of a text draw massive activations (Sun et al., arXiv 2402.17762), whose size
    depends on them: Qwen 2.5 reaches 212 behind `<|im_start|>system`, and 70 in the middle of texts
    with chats. So two begin where a chat does; and where texts begin with no bos, so many begin
    anywhere that there are 8 windows in all.

    Args:
        windows: longer ones, each led by bos if texts are.
        tokens: of the whole text.
        special: those of the tokenizer, of which the first in the text begins chats.
        ar: tokens of a call.
    """
    length = min(len(windows[0]), max(ar, _BEGINNING_TOKENS))
    last = max(0, len(tokens) - length)
    first = next((token for token in tokens if token in special), None)
    chats = [
        place
        for place in range(last)
        if tokens[place] == first and special.isdisjoint(tokens[max(0, place - _APART) : place])
    ]
    starts = [chats[len(chats) * number // _CHATS] for number in range(min(_CHATS, len(chats)))]
    more = max(0, _MOST_WINDOWS - len(windows) - len(starts)) if bos is None else 0
    starts += [last * (2 * number + 1) // (2 * more) for number in range(more)]
    lead = [] if bos is None else [bos]
    return [[*lead, *tokens[start : start + length]][:length] for start in starts]


def observe_ranges(
    model_path: Path,
    config: DecoderConfig,
    token_windows: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] | None = None,
    *,
    constants: Arrays | None = None,
    choice: RangeChoice | None = None,
    narrow: bool = True,
) -> RangeObserver:
    """Run text through a whole model and return the observed ranges of its activations.

    The windows go through it segment by segment, call by call with its real caches, as prefill
    does; memory holds one layer at a time. Decoding would show the same values at the same
    positions.

    Args:
        model_path: whole, in canonical form, at a prefill shape.
        token_windows: text in tokens, each window at most the context length.
        progress: called with (windows that went through a segment, such in all).
        choice: takes narrower ranges than the whole ones; each segment runs twice for it.
        narrow: leave massive numbers in hidden states out of their ranges.
    """
    ranges = RangeObserver()
    with SegmentLoop(model_path, config, token_windows, constants=constants, join=True) as loop:
        n_done, total = 0, loop.n_segments * len(loop.windows)

        def count() -> None:
            nonlocal n_done
            n_done += 1
            if progress is not None:
                progress(n_done, total)

        hidden = None
        for index in range(loop.n_segments):
            before = hidden
            hidden = loop.run(
                index,
                before,
                on_outputs=ranges.observe,
                change=ranges.add_outputs if narrow else add_range_outputs,
                on_window=count,
            )
            ranges.narrow()
            if choice is not None:
                _narrow(loop, index, before, ranges, choice)
    return ranges


def _narrow(
    loop: SegmentLoop,
    index: int,
    before: Hidden | None,
    ranges: RangeObserver,
    choice: RangeChoice,
) -> None:
    """Replace the ranges of a segment's activations by those that the estimator chooses."""
    counts: dict[str, Histogram] = {}

    def add_outputs(model: ir.Model) -> None:
        graph = model.graph
        outputs_before = set(graph.outputs)
        for value in (value for node in graph for value in node.outputs):
            name = str(value.name)
            if name in ranges.low:
                counts[name] = Histogram(ranges.low[name], ranges.high[name])
                if value not in outputs_before:
                    graph.outputs.append(value)

    def count(outputs: Arrays, n_tokens: int) -> None:
        del n_tokens
        for name, histogram in counts.items():
            histogram.add(outputs[name])

    loop.run(index, before, on_outputs=count, change=add_outputs)
    for name, histogram in counts.items():
        bits = choice.kv_bits if interface.is_kv(name) else choice.bits
        ranges.low[name], ranges.high[name] = choice.estimate(histogram, bits)
