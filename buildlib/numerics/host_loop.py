"""Prefill and decode on the host over the parts of a model, to check numerics stage by stage.

The same loop runs float ONNX, QDQ ONNX and compiled graphs, so a difference between two of them is
a difference of the graphs. Genie does inference on devices, not this module.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from buildlib.cancellation import check_cancelled
from buildlib.checkpoint.config import DecoderConfig
from buildlib.closeable import Closeable
from buildlib.errors import BuildError
from buildlib.graph import interface
from buildlib.graph.shape import GraphShape
from buildlib.numerics.feeds import CachedCalls, CallInputs, Embed
from buildlib.numerics.runners import Arrays, OnnxRunner, PartRunner, part_sizes


class TokenModel(Protocol):
    """A model that takes tokens and gives logits, on any engine."""

    @property
    def largest_ar(self) -> int:
        """Tokens that one call takes at most."""
        ...

    def reset(self) -> None:
        """Forget all tokens."""
        ...

    def feed(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append `tokens` to the context and return logits [len(tokens), vocab] after each."""
        ...


def feed_window(
    model: TokenModel, window: Sequence[int]
) -> Iterator[tuple[Sequence[int], npt.NDArray[np.float32]]]:
    """Feed a window from an empty context, and yield tokens and logits of each call."""
    model.reset()
    for start in range(0, len(window), model.largest_ar):
        check_cancelled()
        tokens = window[start : start + model.largest_ar]
        yield tokens, model.feed(tokens)


def greedy_tokens(model: TokenModel, prompt: Sequence[int]) -> Iterator[int]:
    """Yield the model's greedy continuation of a prompt; of equal logits the lowest id wins.

    A token is fed when the next one is asked for.
    """
    [(_, logits)] = deque(feed_window(model, prompt), maxlen=1)
    while True:
        token = int(np.argmax(logits[-1]))
        yield token
        logits = model.feed([token])


class HostLoop(Closeable):
    """A model as one chain of parts for each AR, over one context length.

    Args:
        chains: parts in order, by AR; decoding needs AR 1. The loop owns them.
        on_outputs: sees every part's outputs and the number of real tokens (calibration).
        embed: the embedding table, for a model that takes `inputs_embeds`.
        constants: inputs that are the same at every call, such as LoRA weights.
    """

    def __init__(
        self,
        chains: Mapping[int, Sequence[PartRunner]],
        config: DecoderConfig,
        *,
        on_outputs: Callable[[Arrays, int], None] | None = None,
        embed: Embed | None = None,
        constants: Arrays | None = None,
    ) -> None:
        self._chains = {ar: tuple(chains[ar]) for ar in sorted(chains, reverse=True)}
        shapes = [_chain_shape(chain) for chain in self._chains.values()]
        self.cl = shapes[0].cl
        if {shape.ar for shape in shapes} != set(chains) or {s.cl for s in shapes} != {self.cl}:
            raise ValueError(f"chains for AR {sorted(chains)} have the shapes {shapes}")
        self._inputs = CallInputs(config, self.cl, embed=embed, constants=constants)
        self._config = config
        self._on_outputs = on_outputs
        self.reset()

    def close(self) -> None:
        """Close all runners."""
        for chain in self._chains.values():
            for runner in chain:
                runner.close()

    @property
    def largest_ar(self) -> int:
        """Tokens that one call takes at most."""
        return next(iter(self._chains))

    def reset(self) -> None:
        """Forget all tokens."""
        self._calls = CachedCalls(self._chains, self._inputs, self.cl)

    def feed(self, tokens: Sequence[int], ar: int | None = None) -> npt.NDArray[np.float32]:
        """Append `tokens` to the context and return logits [len(tokens), vocab] after each of them.

        The largest graph that still fits takes as many tokens as it can, and its other slots are
        padded; a single token goes to the smallest graph.

        Args:
            ar: of the graph to take instead, while it fits.

        Raises:
            BuildError: the context has no room for them.
        """
        logits = [np.zeros((0, self._config.vocab_size), np.float32)]
        position = 0
        while position < len(tokens):
            fits = ar is not None and self._calls.n_past + ar <= self.cl
            chosen = ar if ar is not None and fits else self._choose(len(tokens) - position)
            chunk = list(tokens[position : position + chosen])
            logits.append(self._call(chosen, chunk))
            position += len(chunk)
        return np.concatenate(logits)

    def greedy(
        self, prompt: Sequence[int], n_tokens: int, stop: frozenset[int] = frozenset()
    ) -> list[int]:
        """Return the greedy continuation of `prompt`, at most `n_tokens`, up to a `stop` id.

        Args:
            prompt: with bos, if it is to have one.
        """
        n_all = len(prompt) + n_tokens
        if n_all > self.cl:
            raise self._too_long(n_all)
        continuation = islice(greedy_tokens(self, prompt), n_tokens)
        return list(takewhile(lambda token: token not in stop, continuation))

    def _too_long(self, n_tokens: int) -> BuildError:
        return BuildError(f"{n_tokens} tokens do not fit into a context of {self.cl}")

    def _choose(self, n_tokens: int) -> int:
        """Return the AR of the smallest graph that takes all tokens; else the largest that fits."""
        room = self.cl - self._calls.n_past
        ars = [ar for ar in self._chains if ar <= room]
        if not ars or n_tokens > room:
            raise self._too_long(self._calls.n_past + n_tokens)
        return min((ar for ar in ars if ar >= n_tokens), default=ars[0])

    def _call(self, ar: int, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Call one chain; `tokens` fill its slots from the left."""
        called = self._calls.call(ar, tokens)
        if self._on_outputs is not None:
            for _, outputs in called:
                self._on_outputs(outputs, len(tokens))
        last, outputs = called[-1]
        port = last.ports.outputs[interface.LOGITS]
        return port.dequantize(outputs[interface.LOGITS][0, : len(tokens)])


def open_onnx(path: Path, config: DecoderConfig, *, plain: bool = False) -> HostLoop:
    """Open a whole ONNX model, float or QDQ, at its one shape."""
    shape = interface.require_shape(path)
    return HostLoop({shape.ar: [OnnxRunner(path, plain=plain)]}, config)


def _chain_shape(chain: Sequence[PartRunner]) -> GraphShape:
    """Return the (AR, CL) of all parts; one without a mask (embedding, head) has only an AR."""
    sizes = [part_sizes({p.name: p.shape for p in r.ports.inputs.values()}) for r in chain]
    ars = {ar for ar, _ in sizes}
    cls = {cl for _, cl in sizes if cl is not None}
    if len(ars) != 1 or len(cls) != 1:
        raise ValueError(f"the parts of a chain differ in (AR, CL): {sizes}")
    return GraphShape(ars.pop(), cls.pop())
