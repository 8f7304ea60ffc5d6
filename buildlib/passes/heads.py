"""A value of an attention taken apart: a replica of it for each head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of, set_encoding
from buildlib.graph.infer import static_shape

Attribute = int | float | str | list[int]

Axes = tuple[int, int]
"""Which two axes of a rank-4 value count key/value heads, and query heads that share one."""

HEADS_FIRST: Axes = (0, 1)
TOKENS_FIRST: Axes = (1, 2)


@dataclass
class Heads:
    """The heads of one value.

    Attributes:
        whole: the value they are of.
        grid: [n_kv][group] replicas; in each the head axes have size 1.
        axes: the head axes of `whole`.
        stored: the head axes of the replicas, which have the other axes in the same order. None for
            replicas [AR, x] that have no head axes yet. Moving an axis of size 1 moves no numbers:
            it is left until an operator needs it.
    """

    whole: ir.Value
    grid: list[list[ir.Value]]
    axes: Axes
    stored: Axes | None

    @property
    def n_kv(self) -> int:
        """Key/value heads."""
        return len(self.grid)

    @property
    def group(self) -> int:
        """Query heads for each of them; 1 for keys and values themselves."""
        return len(self.grid[0])

    @property
    def in_order(self) -> list[ir.Value]:
        """All replicas, query heads that share keys and values side by side."""
        return [value for row in self.grid for value in row]

    def at(self, kv: int, query: int) -> ir.Value:
        """The replica that query head `query` of key/value head `kv` works with."""
        return self.grid[kv][query if self.group > 1 else 0]

    def settle(self, maker: "Maker") -> "Heads":
        """Give the replicas the axes that `whole` has."""
        if self.stored != self.axes:
            replicas = Replicas(self.whole, self.axes)
            moved = [
                self._moved(value, replicas.make(head), maker)
                for head, value in enumerate(self.in_order)
            ]
            starts = range(0, len(moved), self.group)
            self.grid = [moved[start : start + self.group] for start in starts]
            self.stored = self.axes
        return self

    def _moved(self, value: ir.Value, output: ir.Value, maker: "Maker") -> ir.Value:
        if self.stored is None:
            target = [1 if axis in self.axes else -1 for axis in range(4)]
            target[-1] = (static_shape(value) or (0,))[-1]
            maker.make("Reshape", [value, maker.constant(target)], [output])
        else:
            others = iter(axis for axis in range(4) if axis not in self.stored)
            moved = dict(zip(self.axes, self.stored, strict=True))
            perm = [moved[axis] if axis in moved else next(others) for axis in range(4)]
            maker.make("Transpose", [value], [output], perm=perm)
        return output


class Maker(Protocol):
    """What puts new nodes where they are needed."""

    def make(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        **attributes: Attribute,
    ) -> None:
        """Add a node that makes `outputs`."""

    def constant(self, numbers: Sequence[int]) -> ir.Value:
        """A small int64 initializer, one for all who ask for the same."""


class Replicas:
    """Makes values for the heads of `whole`, alike but for their names, with its encoding."""

    def __init__(self, whole: ir.Value, axes: Axes) -> None:
        self._whole = whole
        self._encoding = encoding_of(whole)
        self._shape: ir.Shape | None = None
        dims = static_shape(whole)
        if dims is not None:
            self._shape = ir.Shape(1 if axis in axes else dim for axis, dim in enumerate(dims))
            self._shape.freeze()  # one object for all

    def make(self, head: int) -> ir.Value:
        """A new value for one head."""
        whole = self._whole
        value = ir.Value(name=f"{whole.name}_head_{head}", type=whole.type, shape=self._shape)
        if self._encoding is not None:
            set_encoding(value, self._encoding)
        return value
