"""Divergence of many partly quantized variants of a model, in one sweep over its segments.

A variant puts some values on their grids (rounded, and computed in float32 as QDQ models on the
CPU do) and leaves the others in float. All variants go through the model together: each segment is
loaded once for all that it is the same for, and once for each that changes it. A variant starts at
the first segment that it changes. Memory holds the weights of one segment, and the hidden states of
all variants on one border.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from buildlib.checkpoint.config import DecoderConfig
from buildlib.closeable import Closeable
from buildlib.encodings.grid import Grid, activation_grid
from buildlib.encodings.model import Encoding
from buildlib.errors import BuildError
from buildlib.graph import interface
from buildlib.graph.files import load_model, tensor_array
from buildlib.graph.values import is_parameter, source_of
from buildlib.numerics.divergence import Divergence, DivergenceSums, decibels, sqnr_db
from buildlib.numerics.evaluation import ReferenceLogits, Sample
from buildlib.numerics.runners import Arrays
from buildlib.numerics.segment_loop import Hidden, SegmentLoop, SegmentRunner
from buildlib.quantize.grids import activation_names, channel_axis, parameter_uses
from buildlib.quantize.qdq import NOISE, SIGNAL, QdqRewriter
from buildlib.quantize.tensor_writer import replace_constant
from buildlib.quantize.weight_file import WeightFile

Quantized = Mapping[str, Encoding]
"""Encodings of the values that are quantized, by name; all others stay in float."""


@dataclass(frozen=True)
class MeasuredVariant:
    """A variant, measured.

    Attributes:
        divergence: of its logits from those of the model in float.
        output_sqnr_db: SQNR of the border after the first segment that the variant changes, against
            that of the sweep's base; None if that segment is the last.
    """

    divergence: Divergence
    output_sqnr_db: float | None = None


class SensitivityModel(Closeable):
    """A whole float model, and the windows over which its variants are measured.

    Args:
        model_path: in canonical form, at a prefill shape.
        windows: token ids without bos; each is cut to whole calls.
        changed: weights that the quantized model has in place of the float ones, by
            `changed_weights`; a variant has them where it has the encodings that go with them.
        join: as `SegmentLoop` takes it.

    Attributes:
        names: the values of each segment that can be quantized. The border into a segment belongs
            to the one before.
    """

    def __init__(
        self,
        model_path: Path,
        config: DecoderConfig,
        windows: Sequence[Sequence[int]],
        changed: Mapping[str, ir.TensorProtocol] | None = None,
        *,
        join: bool = False,
    ) -> None:
        self._changed_weights = dict(changed or {})
        self._own: Quantized = {}
        self._config, begin = config, config.begin
        fed = [[*begin, *window][:-1] for window in windows]
        self._loop = SegmentLoop(model_path, config, fed, join=join)
        ar = self._loop.shape.ar
        whole = [
            (*begin, *window)[: len(tokens) // ar * ar + 1]
            for window, tokens in zip(windows, fed, strict=True)
            if len(tokens) >= ar
        ]
        samples = [Sample((), tokens[:1], tokens[1:]) for tokens in whole]
        self.reference = ReferenceLogits(samples, config.vocab_size)
        self._scratch = tempfile.TemporaryDirectory(dir=model_path.parent, prefix=".variants.")
        graphs = [self._loop.segment(index).graph for index in range(self._loop.n_segments)]
        self.names = [_names(graph, first=not index) for index, graph in enumerate(graphs)]

    def close(self) -> None:
        """Remove its files."""
        self._loop.close()
        self.reference.close()
        self._scratch.cleanup()

    @property
    def ar(self) -> int:
        """Tokens of a call."""
        return self._loop.shape.ar

    def graph(self, index: int) -> ir.Graph:
        """Return a copy of a segment's float graph."""
        return self._loop.segment(index).graph

    def record(self, encodings: Quantized) -> dict[str, float]:
        """Run the model in float, and keep its logits as the reference of all variants.

        Returns:
            SQNR in dB of each activation with an encoding: 10 log10(sum(x^2) / sum((x - q(x))^2)).
        """
        self._own = encodings
        sums: dict[str, float] = {}

        def see(outputs: Arrays, n_tokens: int) -> None:
            for name, array in outputs.items():
                if name.endswith((SIGNAL, NOISE)):
                    sums[name] = sums.get(name, 0.0) + float(array)
            if interface.LOGITS in outputs:
                self.reference.record(outputs[interface.LOGITS][0, :n_tokens])

        self.reference.restart()
        hidden: Hidden | None = None
        for index in range(self._loop.n_segments):
            own_encodings = self._at(index, encodings)

            def observe(model: ir.Model, own_encodings: Quantized = own_encodings) -> None:
                grids = _activation_grids(model.graph, own_encodings)
                QdqRewriter(model.graph, grids, WeightFile(self._weights)).add_noise_outputs()

            hidden = self._loop.run(index, hidden, on_outputs=see, change=observe)
        return {
            name.removesuffix(SIGNAL): decibels(signal, sums[name.removesuffix(SIGNAL) + NOISE])
            for name, signal in sums.items()
            if name.endswith(SIGNAL)
        }

    def record_other(self, float_model: Path) -> None:
        """Keep the logits of another model, of which this one was made, as the reference."""

        def see(outputs: Arrays, n_tokens: int) -> None:
            if interface.LOGITS in outputs:
                self.reference.record(outputs[interface.LOGITS][0, :n_tokens])

        self.reference.restart()
        with SegmentLoop(float_model, self._config, self._loop.windows, join=True) as loop:
            hidden: Hidden | None = None
            for index in range(loop.n_segments):
                hidden = loop.run(index, hidden, on_outputs=see)

    def measure(
        self,
        variants: Sequence[Quantized],
        base: Quantized | None = None,
        progress: Callable[[int, int], None] | None = None,
        on_outputs: Callable[[Arrays, int], None] | None = None,
        observed: Callable[[str], bool] = lambda _: False,
    ) -> list[MeasuredVariant]:
        """Measure variants against the recorded float logits.

        Args:
            variants: each is run from the first segment in which it differs from `base`.
            base: variant that shares most segments with them; by default the model in float.
            progress: called with (segments loaded, such in all).
            on_outputs: sees the outputs of all calls of `base` by name, and the values `observed`.
            observed: tells by their names which values are outputs, too.
        """
        shared = base or {}
        runs = [
            _Run(self._changed(shared, variant), self.reference, variant) for variant in variants
        ]
        total = self._loop.n_segments + sum(len(run.changes) for run in runs)
        n_done = 0

        def count() -> None:
            nonlocal n_done
            n_done += 1
            if progress is not None:
                progress(n_done, total)

        hidden: Hidden | None = None
        for index in range(self._loop.n_segments):
            before = hidden
            same = [run for run in runs if run.started and index not in run.changes]
            # Nobody reads the logits of the base.
            runs_base = index + 1 < self._loop.n_segments or on_outputs is not None
            if runs_base or same:
                with self._open(index, shared, observed) as segment:
                    if runs_base:
                        hidden = segment.run(before, on_outputs=on_outputs)
                    for run in same:
                        run.go(segment, run.hidden)
            count()
            for run in runs:
                if index in run.changes:
                    with self._open(index, run.variant) as segment:
                        first = not run.started
                        run.go(segment, before if first else run.hidden)
                        if first and hidden is not None and run.hidden is not None:
                            run.output_sqnr_db = sqnr_db(hidden, run.hidden)
                    count()
        return [MeasuredVariant(run.sums.mean(), run.output_sqnr_db) for run in runs]

    @property
    def _weights(self) -> Path:
        return Path(self._scratch.name) / "variant.weights"

    def _at(self, index: int, encodings: Quantized) -> dict[str, Encoding]:
        """Return the encodings of a segment's own values."""
        return {name: encodings[name] for name in self.names[index] if name in encodings}

    def _changed(self, base: Quantized, variant: Quantized) -> frozenset[int]:
        """Return the segments in which a variant differs; the last if in none."""
        segments = {
            index
            for index in range(self._loop.n_segments)
            if self._at(index, base) != self._at(index, variant)
        }
        return frozenset(segments or {self._loop.n_segments - 1})

    def _open(
        self, index: int, encodings: Quantized, observed: Callable[[str], bool] = lambda _: False
    ) -> AbstractContextManager[SegmentRunner]:
        own_encodings = self._at(index, encodings)

        def change(model: ir.Model) -> None:
            for name, tensor in self._changed_weights.items():
                if name in own_encodings and own_encodings[name] is self._own.get(name):
                    replace_constant(model.graph, name, tensor)
            round_values(model, own_encodings, self._weights)
            values = [value for node in model.graph for value in node.outputs]
            more = [value for value in values if observed(str(value.name))]
            model.graph.outputs.extend(value for value in more if not value.is_graph_output())

        return self._loop.open_segment(index, change=change)

    def weight(self, name: str, encodings: Quantized) -> ir.TensorProtocol | None:
        """Return the weight that a variant with these encodings has; None for the float one."""
        return self._changed_weights.get(name) if name in encodings else None


@dataclass
class _Run:
    """A variant on its way through the segments."""

    changes: frozenset[int]
    reference: ReferenceLogits
    variant: Quantized
    sums: DivergenceSums = field(default_factory=DivergenceSums)
    hidden: Hidden | None = None
    started: bool = False
    output_sqnr_db: float | None = None

    def go(self, segment: SegmentRunner, hidden: Hidden | None) -> None:
        """Go through one segment."""

        def see(outputs: Arrays, n_tokens: int) -> None:
            if interface.LOGITS in outputs:
                self.reference.compare(outputs[interface.LOGITS][0, :n_tokens], self.sums)

        self.started = True
        self.hidden = segment.run(hidden, on_outputs=see)


def changed_weights(float_model: Path, quantized: Path) -> dict[str, ir.TensorProtocol]:
    """Return the weights that a technique has changed, of two canonical models of one shape.

    Raises:
        BuildError: other constants differ too, as they do where one of them was rotated.
        ModelFileError: a model cannot be read.
    """
    ours, theirs = (load_model(path).graph for path in (float_model, quantized))
    matrices = {
        str(source_of(node.inputs[1]).name)
        for node in ours
        if channel_axis(node, 1) is not None and node.inputs[1] is not None
    }
    weights = {}
    for name, value in theirs.initializers.items():
        own = ours.initializers.get(name)
        if own is None or own.const_value is None or value.const_value is None:
            continue
        if _same(own.const_value, value.const_value):
            continue
        if name not in matrices:
            raise BuildError(
                f"{name} is not that of the model in float: something else has changed the "
                "model, and costs of single weights mean nothing then"
            )
        weights[name] = value.const_value
    return weights


def _same(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    if isinstance(one, ir.ExternalTensor) and isinstance(other, ir.ExternalTensor):
        places = [(tensor.offset, Path(tensor.path)) for tensor in (one, other)]
        if places[0][0] == places[1][0] and places[0][1].samefile(places[1][1]):
            return True
    return one.shape == other.shape and np.array_equal(tensor_array(one), tensor_array(other))


def round_values(model: ir.Model, encodings: Quantized, weights: Path) -> None:
    """Put values with an encoding on their grids, in place; all are computed in float32."""
    graph = model.graph
    grids = _activation_grids(graph, encodings)
    uses = parameter_uses(graph, encodings, grids)
    with WeightFile(weights) as file:
        work = QdqRewriter(graph, grids, file)
        work.quantize_parameters([use for use in uses if use.grid is not None])
        work.round_activations()
        file.finish()


def _activation_grids(graph: ir.Graph, encodings: Quantized) -> dict[str, Grid]:
    return {
        name: activation_grid(encodings[name])
        for name in activation_names(graph)
        if name in encodings and encodings[name].dtype == "INT"
    }


def _names(graph: ir.Graph, *, first: bool) -> frozenset[str]:
    """Return the names of a segment's float values and constants, without the border into it."""
    border = set() if first else {str(graph.inputs[0].name)}
    return frozenset(constant_names(graph) | set(activation_names(graph)) - border)


def constant_names(graph: ir.Graph) -> set[str]:
    """Return the names of the constants that a graph reads."""
    values = (value for node in graph for value in node.inputs if value is not None)
    return {str(source_of(value).name) for value in values if is_parameter(value)}
