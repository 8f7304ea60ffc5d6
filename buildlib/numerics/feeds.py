"""Inputs of a model's calls: tokens, mask, rotary positions, and the key/value caches so far."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.config import DecoderConfig
from buildlib.graph import interface
from buildlib.graph.rope import local_rope_tables, rope_tables
from buildlib.numerics.runners import Arrays, PartRunner, Port

Embed = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float32]]
"""The embedding table: rows [1, AR, hidden] of token ids [1, AR]."""


class CallInputs:
    """Makes the inputs of each call of a model over one context length.

    Args:
        config: gives rotary frequencies and the token for empty slots.
        embed: for models that take embeddings in place of token ids.
        constants: inputs that are the same at every call, such as LoRA weights.
        rotations_cl: context length of the rotations, for graphs that are run at a shorter one than
            they are built for; by default `cl`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        cl: int,
        *,
        embed: Embed | None = None,
        constants: Arrays | None = None,
        rotations_cl: int | None = None,
    ) -> None:
        self._cl = cl
        self._padding = config.eos_token_ids[0]
        n_rotations = rotations_cl or cl
        tables = rope_tables(config, n_rotations)
        self._rotations = dict(zip((interface.COS, interface.SIN), tables, strict=True))
        if config.rope_local_base_freq is not None:
            tables = local_rope_tables(config, n_rotations)
            names = (interface.LOCAL_COS, interface.LOCAL_SIN)
            self._rotations |= dict(zip(names, tables, strict=True))
        self._embed = embed
        self._constants: Mapping[str, npt.NDArray[Any]] = dict(constants or {})

    def at(self, ar: int, n_past: int, tokens: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs of an AR-`ar` graph; `tokens` fill its slots from the left.

        Padded slots attend to the slots before them, and no token that is kept attends to them.
        """
        past = self._cl - ar
        ids = np.full((1, ar), self._padding, dtype=np.int32)
        ids[0, : len(tokens)] = tokens
        mask = np.full((ar, self._cl), interface.MASKED, dtype=np.float32)
        mask[:, :n_past] = 0.0
        mask[:, past:][np.tril_indices(ar)] = 0.0
        where = np.minimum(np.arange(n_past, n_past + ar), self._cl - 1)
        values: dict[str, npt.NDArray[Any]] = {
            **self._constants,
            interface.INPUT_IDS: ids,
            interface.ATTENTION_MASK: mask[None, None],
            **{name: table[None, None, where] for name, table in self._rotations.items()},
        }
        if self._embed is not None:
            values[interface.INPUTS_EMBEDS] = self._embed(ids)
        return values


class KvCache:
    """Slots filled from the left, as Genie fills them; each graph sees the first CL-AR of them.

    Empty slots hold the integer (or float) that means zero. The mask hides them.
    """

    def __init__(self, ports: Iterable[Port], cl: int) -> None:
        self._buffers = {
            port.name: _empty(port, cl) for port in ports if interface.is_kv(port.name)
        }
        self.n_past = 0

    def past(self, length: int) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs of a graph with `length` past slots."""
        return {
            name: np.ascontiguousarray(buffer[_slots(name, 0, length)])
            for name, buffer in self._buffers.items()
        }

    def append(self, outputs: Mapping[str, npt.NDArray[Any]] | Arrays, n_tokens: int) -> None:
        """Append the first `n_tokens` of the new keys and values among `outputs`."""
        for name, buffer in self._buffers.items():
            new = outputs[interface.kv_output(name)][_slots(name, 0, n_tokens)]
            buffer[_slots(name, self.n_past, self.n_past + n_tokens)] = new
        self.n_past += n_tokens

    def new(self, since: int) -> dict[str, npt.NDArray[Any]]:
        """Return keys and values from slot `since` on, by the names of the inputs; not copied."""
        return {
            name: buffer[_slots(name, since, self.n_past)] for name, buffer in self._buffers.items()
        }


class CachedCalls:
    """Calls of a model, or of one part of it, each going on from the caches of those before.

    Args:
        chains: parts in order, by AR: float, QDQ, compiled, or another program's.
        inputs: makes all inputs but the caches.
    """

    def __init__(
        self, chains: Mapping[int, Sequence[PartRunner]], inputs: CallInputs, cl: int
    ) -> None:
        self._chains = chains
        self._inputs = inputs
        self._cl = cl
        first = next(iter(chains.values()))
        self._cache = KvCache((p for part in first for p in part.ports.inputs.values()), cl)

    @property
    def n_past(self) -> int:
        """Tokens so far."""
        return self._cache.n_past

    def call(
        self, ar: int, tokens: Sequence[int], given: Arrays | None = None
    ) -> list[tuple[PartRunner, Arrays]]:
        """Call the AR-`ar` graphs on `tokens`, and return each part with its outputs.

        Args:
            ar: slots of the graphs, which `tokens` fill from the left.
            given: values of parts that are not in the chain.
        """
        values = self._inputs.at(ar, self._cache.n_past, tokens) | self._cache.past(self._cl - ar)
        values |= given or {}
        results = []
        for part in self._chains[ar]:
            outputs = part.run(part.ports.feeds(values))
            values |= outputs
            results.append((part, outputs))
        self._cache.append(values, len(tokens))
        return results


def _slots(name: str, begin: int, end: int) -> tuple[slice, ...]:
    before = (slice(None),) * interface.token_axis(name)
    return (*before, slice(begin, end))


def _empty(port: Port, cl: int) -> npt.NDArray[Any]:
    shape = list(port.shape)
    shape[interface.token_axis(port.name)] = cl
    zero = port.grid.zero_point[0] if port.grid is not None else 0
    return np.full(shape, zero, dtype=port.dtype)
