"""Prefill and decode on the host over the parts of a model, to check numerics stage by stage.

The same loop runs float ONNX, QDQ ONNX and compiled graphs, so that a difference between two of
them is a difference of the graphs. Device inference is Genie's job, not this module's.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.config import LlamaConfig
from buildlib.errors import CalibrationError, PromptTooLongError
from buildlib.graph import interface
from buildlib.graph.rope import rope_tables
from buildlib.graph.shape import GraphShape
from buildlib.reference.kv_cache import KvCache
from buildlib.reference.runners import Arrays, PartRunner, Port

Positions = Literal["first_cl_minus_ar", "all"]


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and what it was taken over.

    Attributes:
        n_tokens: tokens that were predicted.
    """

    value: float
    n_tokens: int
    n_windows: int
    positions: Positions


class HostLoop(AbstractContextManager["HostLoop"]):
    """A model as one chain of parts for each AR, over one context length.

    Args:
        chains: by AR, the parts in order; AR 1 must be among them to decode. Owned from now on.
        on_outputs: sees every part's inputs, outputs and number of real tokens (calibration).
    """

    def __init__(
        self,
        chains: Mapping[int, Sequence[PartRunner]],
        config: LlamaConfig,
        *,
        on_outputs: Callable[[Arrays, int], None] | None = None,
    ) -> None:
        self._chains = {ar: tuple(chains[ar]) for ar in sorted(chains, reverse=True)}
        shapes = [_chain_shape(chain) for chain in self._chains.values()]
        self.cl = shapes[0].cl
        if {shape.ar for shape in shapes} != set(chains) or {s.cl for s in shapes} != {self.cl}:
            msg = f"chains for AR {sorted(chains)} have the shapes {shapes}"
            raise ValueError(msg)
        self._cos, self._sin = rope_tables(config, self.cl)
        self._config = config
        self._on_outputs = on_outputs
        self.reset()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        """Close all runners."""
        for chain in self._chains.values():
            for runner in chain:
                runner.close()

    def reset(self) -> None:
        """Forget all tokens."""
        first = next(iter(self._chains.values()))
        ports = [port for runner in first for port in runner.ports.inputs.values()]
        self._cache = KvCache(ports, self.cl)

    def feed(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append `tokens` to the context: logits [len(tokens), vocab] after each of them.

        The largest graph that still fits takes as many tokens as it can, the rest of its slots
        being padded; a single token goes to the smallest.

        Raises:
            PromptTooLongError: the context has no room for them.
        """
        done: list[npt.NDArray[np.float32]] = []
        position = 0
        while position < len(tokens):
            left = len(tokens) - position
            ar = self._choose(left)
            chunk = list(tokens[position : position + ar])
            done.append(self._call(ar, chunk))
            position += len(chunk)
        return np.concatenate(done) if done else np.zeros((0, self._config.vocab_size), np.float32)

    def greedy(
        self, prompt: Sequence[int], n_tokens: int, stop: frozenset[int] = frozenset()
    ) -> list[int]:
        """The likeliest continuation of `prompt`, at most `n_tokens`, ending before a `stop` id.

        Like Genie, it puts bos before the prompt, always. Of equal logits the lowest id wins.

        Raises:
            PromptTooLongError: prompt and continuation do not fit into the context.
        """
        n_all = 1 + len(prompt) + n_tokens
        if n_all > self.cl:
            raise PromptTooLongError(n_all, self.cl)
        self.reset()
        logits = self.feed([self._config.bos_token_id, *prompt])
        chosen: list[int] = []
        while len(chosen) < n_tokens:
            token = int(np.argmax(logits[-1]))
            if token in stop:
                break
            chosen.append(token)
            if len(chosen) < n_tokens:
                logits = self.feed([token])
        return chosen

    def losses(self, window: Sequence[int]) -> npt.NDArray[np.float64]:
        """Negative log-likelihood `[len(window)]` of each token, from an empty context led by bos.

        Raises:
            PromptTooLongError: bos and the window do not fit into the context.
        """
        tokens = [self._config.bos_token_id, *window]
        self.reset()
        return token_losses(self.feed(tokens), tokens)

    def perplexity(
        self, tokens: Sequence[int], positions: Positions, max_windows: int | None = None
    ) -> Perplexity:
        """Perplexity over whole windows, each bos and CL-1 tokens from an empty context.

        Args:
            tokens: the text, without bos; what does not fill a window is left out.
            positions: which predictions of a window count: `all`, or the first CL-AR of prefill's
                AR, which is what GenieAccuracy was measured to do (libGenie 1.21, one window a
                dialog).
            max_windows: stop after as many.

        Raises:
            CalibrationError: fewer tokens than one window.
        """
        size = self.cl - 1
        n_windows = len(tokens) // size
        if n_windows == 0:
            reason = f"a perplexity needs {size} tokens, the text has {len(tokens)}"
            raise CalibrationError(reason)
        n_windows = min(n_windows, max_windows or n_windows)
        counted = {
            "first_cl_minus_ar": slice(0, self.cl - max(self._chains)),
            "all": slice(None),
        }[positions]
        losses: list[npt.NDArray[np.float64]] = []
        for index in range(n_windows):
            text = tokens[index * size : (index + 1) * size]
            losses.append(self.losses(text)[counted])
        flat = np.concatenate(losses)
        return Perplexity(float(np.exp(flat.mean())), flat.size, n_windows, positions)

    def _choose(self, left: int) -> int:
        room = self.cl - self._cache.n_past
        fitting = [ar for ar in self._chains if ar <= room]
        if not fitting or left > room:
            raise PromptTooLongError(self._cache.n_past + left, self.cl)
        return (
            fitting[-1]
            if left <= fitting[-1]
            else min((ar for ar in fitting if ar >= left), default=fitting[0])
        )

    def _call(self, ar: int, tokens: list[int]) -> npt.NDArray[np.float32]:
        """One call of one chain; `tokens` fill its slots from the left."""
        values = self._inputs(ar, tokens)
        for runner in self._chains[ar]:
            ports = runner.ports
            feeds = {name: _stored(port, values[name]) for name, port in ports.inputs.items()}
            outputs = runner.run(feeds)
            if self._on_outputs is not None:
                self._on_outputs(outputs, len(tokens))
            values |= outputs
        self._cache.append(values, len(tokens))
        port = self._chains[ar][-1].ports.outputs[interface.LOGITS]
        return _real(port, values[interface.LOGITS][0, : len(tokens)])

    def _inputs(self, ar: int, tokens: list[int]) -> dict[str, npt.NDArray[Any]]:
        past, n_past = self.cl - ar, self._cache.n_past
        ids = np.full((1, ar), self._config.eos_token_ids[0], dtype=np.int32)
        ids[0, : len(tokens)] = tokens
        mask = np.full((ar, self.cl), interface.MASKED, dtype=np.float32)
        mask[:, :n_past] = 0.0
        mask[:, past:][np.tril_indices(ar)] = 0.0
        where = np.minimum(np.arange(n_past, n_past + ar), self.cl - 1)
        return {
            interface.INPUT_IDS: ids,
            interface.ATTENTION_MASK: mask[None, None],
            interface.COS: self._cos[None, None, where],
            interface.SIN: self._sin[None, None, where],
            **self._cache.past(past),
        }


def token_losses(logits: npt.NDArray[np.float32], tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """Negative log-likelihood [n - 1] of each token but the first, from logits [n, vocab]."""
    scores = logits[: len(tokens) - 1].astype(np.float64)
    top = scores.max(axis=-1, keepdims=True)
    log_sum = top[:, 0] + np.log(np.exp(scores - top).sum(axis=-1))
    targets = np.asarray(tokens[1:], dtype=np.int64)
    losses: npt.NDArray[np.float64] = log_sum - scores[np.arange(len(targets)), targets]
    return losses


def _stored(port: Port, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Quantize what is float and should not be; integers pass as they are."""
    if values.dtype == np.float32 and port.grid is not None:
        return port.grid.quantize(values)
    return values.astype(port.dtype, copy=False)


def _real(port: Port, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if port.grid is not None:
        return port.grid.dequantize(values)
    return values.astype(np.float32, copy=False)


def _chain_shape(chain: Sequence[PartRunner]) -> GraphShape:
    shapes = {
        interface.shape_of({name: port.shape for name, port in runner.ports.inputs.items()})
        for runner in chain
    }
    shape = shapes.pop()
    if shape is None or shapes:
        msg = "the parts of a chain differ in (AR, CL)"
        raise ValueError(msg)
    return shape
