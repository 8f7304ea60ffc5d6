"""Prefill of text through a whole model segment by segment, with the weights of one in memory.

`HostLoop` takes a call through the whole model before the next one. Here all calls of all windows
go through the embedding, then all through the first layer, and so on to the head: memory holds the
weights and caches of one segment, and the hidden states on its borders. Each segment computes the
same, up to the rounding of sums over the empty slots that are left out.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.cancellation import check_cancelled
from buildlib.checkpoint.config import DecoderConfig
from buildlib.closeable import Closeable
from buildlib.errors import BuildError
from buildlib.graph import interface
from buildlib.graph.files import save_model
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import infer_shapes
from buildlib.numerics.feeds import CachedCalls, CallInputs
from buildlib.numerics.runners import Arrays, OnnxRunner
from buildlib.passes.arcl import ArClConversion
from buildlib.passes.balance import ModelWeights
from buildlib.passes.split import extract_segments, load_segments
from buildlib.progress import tell

Hidden = npt.NDArray[np.float32]
"""Hidden states on one border: [calls of all windows, 1, AR, hidden]."""

_IN_MEMORY_BYTES = 1 << 30
_JOINED_BYTES = 32 << 20
"""Weights up to which loading takes longer than the calls of a few windows of text."""
_PREFILL_ARS = (128, 32, 8)  # of a model that comes as a decode graph


class SegmentLoop(Closeable):
    """A whole float model in segments, and windows of tokens to run through them one by one.

    Segment 0 is the embedding, segment i + 1 layer i, the last one final norm and output
    projection. Observe a model, or change it layer by layer on the way:

        with SegmentLoop(model_path, config, windows) as loop:
            hidden = None
            for index in range(loop.n_segments):
                hidden = loop.run(index, hidden, on_outputs=see, change=add_outputs)

    The model runs at a context as long as the longest window and one call more, if it is built for
    longer ones: attention to empty slots takes time and changes nothing. A decode graph runs at a
    prefill shape.

    Args:
        model_path: in canonical form.
        token_windows: each is cut to whole calls, and those shorter than a call are left out.
        join: take neighbours together while they are small: a small model runs as one segment.

    Attributes:
        shape: that it runs at.
        windows: that run, in whole calls.
        place: the segment that is worked on, in words.

    Raises:
        BuildError: no window holds a whole call, or a token lies outside the vocabulary.
        ModelFileError: the model cannot be read, or tells no AR and CL; or it is not a whole model,
            or more than one value connects two layers.
    """

    def __init__(
        self,
        model_path: Path,
        config: DecoderConfig,
        token_windows: Sequence[Sequence[int]],
        *,
        constants: Arrays | None = None,
        join: bool = False,
    ) -> None:
        own = interface.require_shape(model_path)
        self.shape = _calling_shape(own, max(map(len, token_windows), default=0))
        self.windows = _whole_calls(token_windows, self.shape.ar, config.vocab_size)
        self._inputs = CallInputs(
            config, self.shape.cl, constants=constants, rotations_cl=max(own.cl, self.shape.cl)
        )
        # Both tell the shapes of all values, which models that others have made may leave out.
        change = infer_shapes if self.shape == own else ArClConversion(self.shape).transform
        self._model, self._segments = load_segments(model_path, change)
        self._parts = _joined(self._segments.weights(), _JOINED_BYTES if join else 0)
        self._copies = itertools.count()
        self.place = ""
        self._scratch = tempfile.TemporaryDirectory(dir=model_path.parent, prefix=".segments.")

    def close(self) -> None:
        """Remove the copies of segments."""
        self._scratch.cleanup()

    @property
    def n_segments(self) -> int:
        """Embedding, layers and head, or fewer if some were joined."""
        return len(self._parts)

    @property
    def n_calls(self) -> int:
        """Calls of a segment for all windows."""
        return sum(len(window) for window in self.windows) // self.shape.ar

    def segment(self, index: int) -> ir.Model:
        """Return a copy of a segment, weights by reference; it is the caller's to change.

        Its inputs are the border before it, the caches of its layer, and all others that its nodes
        read (mask, rotations); its outputs the border after it, and outputs of the model.
        """
        part = self._parts[index]
        last, n_layers = part.stop - 1, self._segments.n_layers
        self.place = f"layer {last}/{n_layers}" if 0 < last <= n_layers else "embedding"
        self.place = "head" if last > n_layers else self.place
        tell(self.place)
        return extract_segments(self._model, self._segments, part)

    @contextmanager
    def open_segment(
        self, index: int, *, change: Callable[[ir.Model], object] | None = None
    ) -> Iterator["SegmentRunner"]:
        """Load one segment, for as many passes of all windows as are wanted.

        Args:
            change: changes the segment before it is loaded: adds outputs, or replaces weights.
        """
        model = self.segment(index)
        if change is not None:
            change(model)
        with self._loaded(model) as runner:
            yield SegmentRunner(self, runner, *self.borders(index))

    def borders(self, index: int) -> tuple[str | None, str | None]:
        """Return the names of the borders before and after a segment."""
        names = [str(value.name) for value in self._segments.borders]
        part = self._parts[index]
        before = names[part.start - 1] if part.start else None
        return before, names[part.stop - 1] if part.stop <= len(names) else None

    def run_step(
        self,
        model: ir.Model,
        given: Mapping[str, Hidden],
        *,
        on_outputs: Callable[[Arrays, int], None] | None = None,
        change: Callable[[ir.Model], object] | None = None,
    ) -> dict[str, Hidden]:
        """Run all calls of all windows through a part of a segment.

        Args:
            model: made of a copy of a segment.
            given: values of all calls by name, among them those that the part does not compute.
            on_outputs: as `run` takes it.
            change: as `open_segment` takes it; outputs that it adds are for `on_outputs` alone.

        Returns:
            Its outputs, other than caches, in the same form.
        """
        names = [str(value.name) for value in model.graph.outputs]
        if change is not None:
            change(model)
        with self._loaded(model) as runner:
            segment = SegmentRunner(self, runner, None, None)
            names = [name for name in names if not interface.is_kv(name)]
            return segment.keep(given, names, on_outputs=on_outputs)

    @contextmanager
    def _loaded(self, model: ir.Model) -> Iterator[OnnxRunner]:
        path = save_model(model, Path(self._scratch.name) / f"segment_{next(self._copies)}.onnx")
        runner = OnnxRunner(path)
        try:
            yield runner
        finally:
            runner.close()
            path.unlink()

    def run(
        self,
        index: int,
        hidden: Hidden | None,
        *,
        on_outputs: Callable[[Arrays, int], None] | None = None,
        change: Callable[[ir.Model], object] | None = None,
        on_window: Callable[[], None] | None = None,
    ) -> Hidden | None:
        """Run all calls of all windows through one segment, in the order of the text.

        Args:
            hidden: border that the segment before it returned; None for the embedding.
            on_outputs: sees all outputs of each call by name, and its number of tokens.
            change: as `open_segment` takes it.
            on_window: called after each window.

        Returns:
            The border after the segment; None after the head. Above 1 GiB it lies in a file that
            goes with it; the system can write out its pages.
        """
        with self.open_segment(index, change=change) as segment:
            return segment.run(hidden, on_outputs=on_outputs, on_window=on_window)

    def inputs_at(self, n_past: int, tokens: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs of a call of `tokens` after `n_past` others."""
        return self._inputs.at(self.shape.ar, n_past, tokens)

    def calls(self, runner: OnnxRunner) -> CachedCalls:
        """Return the calls of a segment over one window."""
        return CachedCalls({self.shape.ar: [runner]}, self._inputs, self.shape.cl)

    def room(self, value: npt.NDArray[Any]) -> Hidden:
        """Return an array for a value of all calls, given that of one call."""
        shape = (self.n_calls, *value.shape)
        if self.n_calls * value.nbytes <= _IN_MEMORY_BYTES:
            return np.empty(shape, value.dtype)
        with tempfile.TemporaryFile(dir=self._scratch.name) as file:
            return np.memmap(file, value.dtype, "w+", shape=shape)


class SegmentRunner:
    """A segment of a `SegmentLoop`, loaded."""

    def __init__(
        self, loop: SegmentLoop, runner: OnnxRunner, before: str | None, after: str | None
    ) -> None:
        self._loop = loop
        self._runner = runner
        self._before = before
        self._after = after

    def run(
        self,
        hidden: Hidden | None,
        *,
        on_outputs: Callable[[Arrays, int], None] | None = None,
        on_window: Callable[[], None] | None = None,
    ) -> Hidden | None:
        """Run all calls of all windows, as `SegmentLoop.run` does."""
        values = {} if hidden is None or self._before is None else {self._before: hidden}
        names = [] if self._after is None else [self._after]
        outputs = self.keep(values, names, on_outputs=on_outputs, on_window=on_window)
        return None if self._after is None else outputs[self._after]

    def keep(
        self,
        given: Mapping[str, Hidden],
        names: Sequence[str],
        *,
        on_outputs: Callable[[Arrays, int], None] | None = None,
        on_window: Callable[[], None] | None = None,
    ) -> dict[str, Hidden]:
        """Run all calls of all windows, and return outputs of all calls by name.

        Args:
            given: values of all calls by name, such as the border before.
        """
        all_outputs: dict[str, Hidden] = {}
        number = 0
        for done, window in enumerate(self._loop.windows):
            tell(f"{self._loop.place}, window {done + 1}/{len(self._loop.windows)}")
            calls = self._loop.calls(self._runner)
            for tokens in _in_calls(window, self._loop.shape.ar):
                check_cancelled()
                values = {key: value[number] for key, value in given.items()}
                [(_, outputs)] = calls.call(self._loop.shape.ar, tokens, values)
                if on_outputs is not None:
                    on_outputs(outputs, len(tokens))
                for name in names:
                    if name not in all_outputs:
                        all_outputs[name] = self._loop.room(outputs[name])
                    all_outputs[name][number] = outputs[name]
                number += 1
            if on_window is not None:
                on_window()
        return all_outputs


def _joined(weights: ModelWeights, limit: int) -> list[range]:
    """Return runs of segments whose weights, if there are several, have at most `limit` bytes."""
    parts, held = [range(1)], sum(weights.embedding.values())
    for index, own in enumerate((*weights.layers, weights.head), 1):
        held += sum(own.values())
        if held <= limit:
            parts[-1] = range(parts[-1].start, index + 1)
        else:
            parts.append(range(index, index + 1))
            held = sum(own.values())
    return parts


def _in_calls(window: Sequence[int], ar: int) -> Iterator[list[int]]:
    for start in range(0, len(window), ar):
        yield list(window[start : start + ar])


def _calling_shape(own: GraphShape, longest: int) -> GraphShape:
    """Return the shape at which windows up to `longest` take the least time."""
    # At least one slot stays empty where one does at the shape of the model, so that ranges have
    # the zeros and masked scores of empty slots all the same.
    ar = own.ar
    if ar == 1:
        ar = next((each for each in _PREFILL_ARS if each <= longest and each < own.cl), 1)
    cl = min(longest // ar + 1, own.cl // ar) * ar
    return GraphShape(ar, cl) if ar < cl else own


def _whole_calls(
    token_windows: Sequence[Sequence[int]], ar: int, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    windows = [tuple(window[: len(window) // ar * ar]) for window in token_windows]
    windows = [window for window in windows if window]
    if not windows:
        raise BuildError(f"cannot calibrate: no text of at least {ar} tokens")
    if any(not 0 <= token < vocab_size for window in windows for token in window):
        raise BuildError(f"cannot calibrate: a token lies outside the vocabulary of {vocab_size}")
    return tuple(windows)
