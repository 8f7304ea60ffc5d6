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

import onnx_ir as ir

from buildlib.checkpoint.config import DecoderConfig
from buildlib.closeable import Closeable
from buildlib.encodings.grid import Grid, activation_grid
from buildlib.encodings.model import Encoding
from buildlib.graph import interface
from buildlib.graph.values import is_parameter, source_of
from buildlib.numerics.divergence import Divergence, DivergenceSums, sqnr_db
from buildlib.numerics.evaluation import ReferenceLogits, Sample
from buildlib.numerics.runners import Arrays
from buildlib.numerics.segment_loop import Hidden, SegmentLoop, SegmentRunner
from buildlib.quantize.grids import activation_names, parameter_uses
from buildlib.quantize.qdq import QdqRewriter
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


class VariantModel(Closeable):
    """A whole float model, and the windows over which its variants are measured.

    Args:
        model_path: in canonical form, at a prefill shape.
        windows: token ids without bos; each is cut to whole calls.
        join: as `SegmentLoop` takes it.

    Attributes:
        loop: over the segments.
        names: the values of each segment that can be quantized. The border into a segment belongs
            to the one before.
    """

    def __init__(
        self,
        model_path: Path,
        config: DecoderConfig,
        windows: Sequence[Sequence[int]],
        *,
        join: bool = False,
    ) -> None:
        self._config, begin = config, config.begin
        fed = [[*begin, *window][:-1] for window in windows]
        self.loop = SegmentLoop(model_path, config, fed, join=join)
        ar = self.loop.shape.ar
        whole = [
            (*begin, *window)[: len(tokens) // ar * ar + 1]
            for window, tokens in zip(windows, fed, strict=True)
            if len(tokens) >= ar
        ]
        samples = [Sample((), tokens[:1], tokens[1:]) for tokens in whole]
        self.reference = ReferenceLogits(samples, config.vocab_size)
        self._scratch = tempfile.TemporaryDirectory(dir=model_path.parent, prefix=".variants.")
        graphs = [self.loop.segment(index).graph for index in range(self.loop.n_segments)]
        self.names = [_names(graph, first=not index) for index, graph in enumerate(graphs)]

    def close(self) -> None:
        """Remove its files."""
        self.loop.close()
        self.reference.close()
        self._scratch.cleanup()

    @property
    def ar(self) -> int:
        """Tokens of a call."""
        return self.loop.shape.ar

    def graph(self, index: int) -> ir.Graph:
        """Return a copy of a segment's float graph."""
        return self.loop.segment(index).graph

    def record(self, float_model: Path) -> None:
        """Keep the logits of a model, this one or that it was made of, as the reference."""

        def see(outputs: Arrays, n_tokens: int) -> None:
            if interface.LOGITS in outputs:
                self.reference.record(outputs[interface.LOGITS][0, :n_tokens])

        self.reference.restart()
        with SegmentLoop(float_model, self._config, self.loop.windows, join=True) as loop:
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
        total = self.loop.n_segments + sum(len(run.changes) for run in runs)
        n_done = 0

        def count() -> None:
            nonlocal n_done
            n_done += 1
            if progress is not None:
                progress(n_done, total)

        hidden: Hidden | None = None
        for index in range(self.loop.n_segments):
            before = hidden
            same = [run for run in runs if run.started and index not in run.changes]
            # Nobody reads the logits of the base.
            runs_base = index + 1 < self.loop.n_segments or on_outputs is not None
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

    def change_weights(self, graph: ir.Graph, encodings: Quantized) -> None:
        """Replace weights of a segment of a variant, whose own values have these encodings."""

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
            for index in range(self.loop.n_segments)
            if self._at(index, base) != self._at(index, variant)
        }
        return frozenset(segments or {self.loop.n_segments - 1})

    def _open(
        self, index: int, encodings: Quantized, observed: Callable[[str], bool] = lambda _: False
    ) -> AbstractContextManager[SegmentRunner]:
        own_encodings = self._at(index, encodings)

        def change(model: ir.Model) -> None:
            self.change_weights(model.graph, own_encodings)
            round_values(model, own_encodings, self._weights)
            values = [value for node in model.graph for value in node.outputs]
            more = [value for value in values if observed(str(value.name))]
            model.graph.outputs.extend(value for value in more if not value.is_graph_output())

        return self.loop.open_segment(index, change=change)


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


def round_values(model: ir.Model, encodings: Quantized, weights: Path) -> None:
    """Put values with an encoding on their grids, in place; all are computed in float32."""
    graph = model.graph
    grids = activation_grids(graph, encodings)
    uses = parameter_uses(graph, encodings, grids)
    with WeightFile(weights) as file:
        work = QdqRewriter(graph, grids, file)
        work.quantize_parameters([use for use in uses if use.grid is not None])
        work.round_activations()
        file.finish()


def activation_grids(graph: ir.Graph, encodings: Quantized) -> dict[str, Grid]:
    """Return the grids of a graph's inputs and computed values that have integers."""
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
