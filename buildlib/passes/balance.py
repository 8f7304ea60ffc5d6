"""Assignment of layers to parts, so that they take equally long to compile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from buildlib.errors import InvalidOptionError

Weights = Mapping[str, int]
"""Bytes of each weight by name; a part holds a weight of several layers only once."""

MAX_PART_BYTES = 1 << 30
"""Weights of one part, as they are encoded.

AI Hub cuts its Genie bundles into parts of about this size; a session on the NPU addresses less
than 4 GiB, and loads several parts.
"""

EMULATED_PART_BYTES = 384 << 20
"""The same for the emulator, where more parts cost nothing.

Conversion takes time with the square of a part's nodes, and the compiler nine times the weights of
a part with two graphs, which share none there: 0.18B in two parts took 70 s and 1.6 GiB in place of
81 s and 2.5 GiB.
"""

HEAD_COST, TABLE_COST = 0.35, 0.1
"""Time to convert and compile a byte of the output projection and of a table, in that of a byte of
layers.

At Llama-3.2-1B's shape in W4A16 a layer of 30 MB took 20 s, the head of 262 MB 44 s, and the table
of 525 MB 30 s; layers of 8 bits take as long as those of 4.
"""


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a model from its input to its logits.

    Attributes:
        embedding: empty for a model that takes embeddings.
        layers: weights of each decoder layer.
        head: final norm and output projection.
    """

    embedding: Weights
    layers: tuple[Weights, ...]
    head: Weights

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return _bytes([self.embedding, *self.layers, self.head])


@dataclass(frozen=True)
class SplitEnds:
    """Ends of a model, embedding and head, that are parts of their own."""

    embedding: bool = False
    head: bool = False

    @property
    def count(self) -> int:
        """Parts that hold no layer."""
        return self.embedding + self.head


def balance_layers(
    weights: ModelWeights, n_parts: int, apart: SplitEnds, limit: int = MAX_PART_BYTES
) -> list[range]:
    """Return the layers of each part; `n_parts` includes an embedding and a head of their own.

    Their times to compile differ as little as can be with parts of at most `limit` bytes of
    weights, or, where that is too few, with the largest part as small as possible.
    """
    n_layers = len(weights.layers)
    check_part_count(n_parts, n_layers, apart.count)
    n_inner = n_parts - apart.count
    sizes = _RunSizes(_units(weights, apart))
    low, high = 0, sizes.size(0, n_layers)
    while low < high:
        middle = (low + high) // 2
        count = sizes.fewest_parts(middle)
        low, high = (low, middle) if count and count <= n_inner else (middle + 1, high)
    costs = [float(_bytes([layer])) for layer in weights.layers]
    costs[0] += 0 if apart.embedding else TABLE_COST * _bytes([weights.embedding])
    costs[-1] += 0 if apart.head else HEAD_COST * _bytes([weights.head])
    inner = sizes.most_even(n_inner, max(low, limit), costs)
    empty = [range(0)] if apart.embedding else []
    return [*empty, *inner, *([range(n_layers, n_layers)] if apart.head else [])]


def check_part_count(n_parts: int, n_layers: int, n_apart: int) -> None:
    """Check that each part other than a separate embedding or head gets a layer."""
    if not 1 <= n_parts - n_apart <= n_layers:
        extra = f" besides {n_apart} without layers" if n_apart else ""
        counts = f"{n_parts} parts cannot be made of {n_layers} layers{extra}"
        reason = f"{counts} (num_hidden_layers of config.json)"
        raise InvalidOptionError("split_model.num_splits", reason, ())


def choose_emulated_splits(weights: ModelWeights, apart: SplitEnds) -> int:
    """Return the number of parts for the emulator."""
    count = -(-weights.total // EMULATED_PART_BYTES)
    fewest = choose_splits(weights, MAX_PART_BYTES, apart)
    return max(fewest, min(count, len(weights.layers)) + apart.count)


def choose_splits(weights: ModelWeights, limit: int, apart: SplitEnds | None = None) -> int:
    """Return the fewest parts of at most `limit` bytes of weights each."""
    apart = apart or SplitEnds()
    alone = {"the embedding": weights.embedding if apart.embedding else {}}
    alone["the head"] = weights.head if apart.head else {}
    units = _units(weights, apart)
    alone |= {f"layer {index}": unit for index, unit in enumerate(units)}
    for name, unit in alone.items():
        if _bytes([unit]) > limit:
            reason = (
                f"{name} alone has {_bytes([unit]):,} bytes of weights, a part at most {limit:,}"
            )
            raise InvalidOptionError("split_model.num_splits", reason, ())
    return apart.count + _RunSizes(units).fewest_parts(limit)


def _units(weights: ModelWeights, apart: SplitEnds) -> list[Weights]:
    """Return the indivisible units: layers, the outermost with the ends that are not separate."""
    units = list(weights.layers)
    if not apart.embedding:
        units[0] = {**weights.embedding, **units[0]}
    if not apart.head:
        units[-1] = {**units[-1], **weights.head}
    return units


class _RunSizes:
    """Bytes of every run of units."""

    def __init__(self, units: Sequence[Weights]) -> None:
        self._n = len(units)
        self._sums = [0, *accumulate(sum(unit.values()) for unit in units)]
        self._twice: list[tuple[int, int, int]] = []  # (a user, the next, bytes)
        users: dict[str, int] = {}
        for index, unit in enumerate(units):
            for name, size in unit.items():
                if name in users:
                    self._twice.append((users[name], index, size))
                users[name] = index

    def size(self, start: int, stop: int) -> int:
        """Return the bytes of units [start, stop)."""
        saved = sum(size for a, b, size in self._twice if start <= a and b < stop)
        return self._sums[stop] - self._sums[start] - saved

    def fewest_parts(self, limit: int) -> int:
        """Return the number of parts of at most `limit`; 0 if a unit exceeds it."""
        count = start = 0
        while start < self._n:
            stop = start
            while stop < self._n and self.size(start, stop + 1) <= limit:
                stop += 1
            if stop == start:
                return 0
            count, start = count + 1, stop
        return count

    def most_even(self, n_parts: int, limit: int, costs: Sequence[float]) -> list[range]:
        """Return parts of at most `limit` with the smallest sum of their squared costs.

        Args:
            n_parts: number of parts.
            limit: bytes of a part.
            costs: of each unit.
        """
        sums = [0, *accumulate(costs)]
        # By where the last part stops: its squared costs, and where all parts start.
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
        for _ in range(n_parts):
            after: dict[int, tuple[float, tuple[int, ...]]] = {}
            for start, (cost, starts) in best.items():
                for stop in range(start + 1, self._n + 1):
                    if self.size(start, stop) > limit:
                        break
                    parts = (cost + (sums[stop] - sums[start]) ** 2, (*starts, start))
                    after[stop] = min(after.get(stop, parts), parts)
            best = after
        _, starts = best[self._n]
        return [range(a, b) for a, b in zip(starts, (*starts[1:], self._n), strict=True)]


def _bytes(groups: Sequence[Weights]) -> int:
    return sum({name: size for group in groups for name, size in group.items()}.values())
