"""What a model is fed at a call beside its caches: tokens, mask, rotary positions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.config import DecoderConfig
from buildlib.graph import interface
from buildlib.graph.rope import rope_tables
from buildlib.reference.runners import Arrays

Embed = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float32]]
"""The embedding table: rows [1, AR, hidden] of token ids [1, AR]."""


class CallInputs:
    """Makes the inputs of each call of a model over one context length.

    Args:
        config: tells the rotary frequencies, and the token that fills empty slots.
        cl: context length of the graphs.
        embed: for models that take embeddings in place of token ids.
        constants: inputs that are the same at every call, such as LoRA weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        cl: int,
        *,
        embed: Embed | None = None,
        constants: Arrays | None = None,
    ) -> None:
        self._cl = cl
        self._padding = config.eos_token_ids[0]
        self._cos, self._sin = rope_tables(config, cl)
        self._embed = embed
        self._constants: Mapping[str, npt.NDArray[Any]] = dict(constants or {})

    def at(self, ar: int, n_past: int, tokens: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """Inputs of an AR-`ar` graph after `n_past` tokens; `tokens` fill its slots from the left.

        Padded slots see what is left of them, as any token does, and nothing sees them that is
        kept.
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
            interface.COS: self._cos[None, None, where],
            interface.SIN: self._sin[None, None, where],
        }
        if self._embed is not None:
            values[interface.INPUTS_EMBEDS] = self._embed(ids)
        return values
