"""Keys and values of the tokens so far, in the layout and type of the graphs' ports."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.graph import interface
from buildlib.reference.runners import Arrays, Port


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
        """The inputs of a graph with `length` past slots."""
        return {
            name: np.ascontiguousarray(np.take(buffer, range(length), axis=_axis(name)))
            for name, buffer in self._buffers.items()
        }

    def append(self, outputs: Mapping[str, npt.NDArray[Any]] | Arrays, n_tokens: int) -> None:
        """Keep the first `n_tokens` of the new keys and values among `outputs`."""
        for name, buffer in self._buffers.items():
            new = outputs[name.removesuffix("_in") + "_out"]
            where: list[slice] = [slice(None)] * buffer.ndim
            where[_axis(name)] = slice(0, n_tokens)
            fresh = new[tuple(where)]
            where[_axis(name)] = slice(self.n_past, self.n_past + n_tokens)
            buffer[tuple(where)] = fresh
        self.n_past += n_tokens


def _axis(name: str) -> int:
    return 3 if name.startswith("past_key") else 2


def _empty(port: Port, cl: int) -> npt.NDArray[Any]:
    shape = list(port.shape)
    shape[_axis(port.name)] = cl
    zero = port.grid.zero_point[0] if port.grid is not None else 0
    return np.full(shape, zero, dtype=port.dtype)
