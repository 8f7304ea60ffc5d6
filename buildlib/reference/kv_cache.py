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
            name: np.ascontiguousarray(buffer[_slots(name, 0, length)])
            for name, buffer in self._buffers.items()
        }

    def append(self, outputs: Mapping[str, npt.NDArray[Any]] | Arrays, n_tokens: int) -> None:
        """Keep the first `n_tokens` of the new keys and values among `outputs`."""
        for name, buffer in self._buffers.items():
            new = outputs[name.removesuffix("_in") + "_out"][_slots(name, 0, n_tokens)]
            buffer[_slots(name, self.n_past, self.n_past + n_tokens)] = new
        self.n_past += n_tokens

    def new(self, since: int) -> dict[str, npt.NDArray[Any]]:
        """Keys and values from slot `since` on, by the names of the inputs; not copied."""
        return {
            name: buffer[_slots(name, since, self.n_past)] for name, buffer in self._buffers.items()
        }


def _slots(name: str, begin: int, end: int) -> tuple[slice, ...]:
    kept = (slice(None),) * _axis(name)
    return (*kept, slice(begin, end))


def _axis(name: str) -> int:
    return 3 if name.startswith("past_key") else 2


def _empty(port: Port, cl: int) -> npt.NDArray[Any]:
    shape = list(port.shape)
    shape[_axis(port.name)] = cl
    zero = port.grid.zero_point[0] if port.grid is not None else 0
    return np.full(shape, zero, dtype=port.dtype)
