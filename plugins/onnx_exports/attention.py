"""Attention, from products of queries and keys to the outputs of heads.

However the source lays heads out, a row of scores is of one query head and one token, and its
columns are the slots of one key/value head. Both are read from the ids, so repeated, grouped, fused
and single heads are one case.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from buildlib.graph.folding import Refusal
from buildlib.graph.values import operand
from plugins.onnx_exports.head_rows import (
    CacheRows,
    HeadRows,
    RotaryEmbedding,
    UnequalHalvesRefusal,
    cache_rows,
    head_rows,
)
from plugins.onnx_exports.probe import Probe
from plugins.onnx_exports.root_tensors import Activation, AttentionOutput, RootTensors
from plugins.onnx_exports.values import AttentionScores, Concrete, Floats, Ids, LinearForm, Numbers

_SEEN = 1e-3
_HIDDEN = -30.0
"""Masked scores are at most this; exports use -50, -100, the smallest float, or -inf."""


@dataclass(frozen=True)
class Source:
    """Position of a head: features [start, start + head_dim) of an activation."""

    rows: Activation
    start: int


@dataclass(frozen=True, eq=False)
class Head:
    """One query head with the keys and values that it reads.

    Attributes:
        query_rotation, key_rotation: of the query, and of new keys before they enter the cache.
        joined_scale: factor of past and new keys after they were joined.
        weights: its probabilities, among those of other heads.
        origins: values of the source by role.
    """

    layer: int
    kv: int
    dim: int
    query: Source
    key: Source
    value: Source
    query_rotation: RotaryEmbedding
    key_rotation: RotaryEmbedding
    joined_scale: float
    weights: AttentionScores
    origins: tuple[tuple[str, ir.Value], ...]


@dataclass(frozen=True, eq=False)
class _Product:
    """One product of queries and keys.

    Attributes:
        offset: id of its first row.
        batch: batch of the keys that each row is multiplied with.
    """

    offset: int
    queries: HeadRows
    keys: CacheRows
    batch: Ids
    dim: int


class Attention:
    """Interprets the attention of all layers of a model.

    Args:
        fed: cosines and sines [AR, width/2] that the host feeds, if the source takes them.

    Attributes:
        tables: cosines and sines of the source, known after its first rotation.
    """

    def __init__(
        self, roots: RootTensors, probe: Probe, fed: tuple[Floats, Floats] | None = None
    ) -> None:
        self.roots = roots
        self.probe = probe
        self.fed = fed
        self.tables: tuple[Floats, Floats] | None = None
        self.width = 0
        self._products: list[_Product] = []
        self._end = 0

    def score(self, node: ir.Node, queries: LinearForm, keys: LinearForm) -> AttentionScores:
        """Multiply queries [..., rows, head_dim] with keys [..., head_dim, CL]."""
        dim, length = keys.shape[-2:]
        if queries.shape[-1] != dim:
            raise Refusal(f"multiplies {queries.shape} with {keys.shape}", node)
        if length != self.probe.cl:
            raise Refusal(f"attends to {length} slots, not to {self.probe.cl}", node)
        lead = np.broadcast_shapes(queries.shape[:-2], keys.shape[:-2])
        n_keys = int(np.prod(keys.shape[:-2], dtype=np.int64))
        batch = np.broadcast_to(
            np.arange(n_keys).reshape(*keys.shape[:-2], 1), (*lead, queries.shape[-2])
        )
        whole = (*lead, *queries.shape[-2:])
        flat = queries.moved(lambda part: np.broadcast_to(part, whole).reshape(-1, dim))
        query_rows = head_rows(self.roots, flat)
        self._check_tables(query_rows.rotation, query_rows.token)
        by_slot = keys.moved(lambda part: part.reshape(n_keys, dim, length).swapaxes(1, 2))
        key_rows = cache_rows(self.roots, by_slot, self.probe.past)
        self._check_tables(key_rows.new.rotation, key_rows.new.token)
        product = _Product(self._end, query_rows, key_rows, batch.reshape(-1), dim)
        self._products.append(product)
        self._end += batch.size
        rows = np.arange(product.offset, self._end).reshape(batch.shape)
        query, key = operand(node, 0), operand(node, 1)
        origins = (("query", query), ("keys", key), ("scores", node.outputs[0]))
        return AttentionScores(rows, length, origins=origins)

    def add_mask(self, node: ir.Node, scores: AttentionScores, mask: Concrete) -> AttentionScores:
        """Add a mask, which must be the causal one or a sliding window's, to scores."""
        if not mask.varies and mask.array.size == 1 and float(mask.array.reshape(())) == 0.0:
            return scores
        visible, tokens, numbers = self._visible_and_mask(scores, mask.array)
        window = self._window(tokens, numbers > _HIDDEN)
        visible = self._within(visible, tokens, window)
        ok = np.where(visible, np.abs(numbers) < _SEEN, numbers <= _HIDDEN)
        if scores.masked or not ok.all():
            raise Refusal("adds a mask that is not the causal one, nor a sliding window's", node)
        return scores.after("masked", node.outputs[0], masked=True, window=window)

    def select(
        self, node: ir.Node, scores: AttentionScores, keep: Concrete, other: Concrete
    ) -> AttentionScores:
        """Select scores by `keep`, else `other`, which must hide as the causal mask does."""
        visible, tokens, mask = self._visible_and_mask(scores, keep.array.astype(bool))
        window = self._window(tokens, mask)
        same = np.array_equal(mask, self._within(visible, tokens, window))
        if not same or float(other.array.max()) > _HIDDEN:
            raise Refusal("selects scores by a mask that is not the causal one", node)
        return scores.after("masked", node.outputs[0], masked=True, window=window)

    def _window(self, tokens: Ids, visible: Numbers) -> int | None:
        """Return how far back the last token sees; None if to the first slot, or to none."""
        last = self.probe.past + self.probe.ar - 1
        rows = visible.reshape(-1, visible.shape[-1])[tokens.reshape(-1) == self.probe.ar - 1]
        slots = np.flatnonzero(rows[0]) if len(rows) else np.empty(0, np.int64)
        if not len(slots) or slots[0] <= self.probe.first_visible:
            return None
        return int(last - slots[0] + 1)

    def _within(self, visible: Numbers, tokens: Ids, window: int | None) -> Numbers:
        if window is None:
            return visible
        oldest = self.probe.past + tokens - window + 1
        return np.asarray(visible & (np.arange(visible.shape[-1]) >= oldest[..., None]))

    def attend_values(
        self, node: ir.Node, weights: AttentionScores, values: LinearForm
    ) -> LinearForm:
        """Multiply probabilities with values [..., CL, head_dim]."""
        if weights.stage != "probabilities":
            raise Refusal("multiplies scores that went through no Softmax with values", node)
        length, dim = values.shape[-2:]
        n_values = int(np.prod(values.shape[:-2], dtype=np.int64))
        lead = np.broadcast_shapes(weights.rows.shape[:-1], values.shape[:-2])
        rows = np.broadcast_to(weights.rows, (*lead, weights.rows.shape[-1]))
        batch = np.broadcast_to(
            np.arange(n_values).reshape(*values.shape[:-2], 1), rows.shape
        ).reshape(-1)
        flat = values.moved(lambda part: part.reshape(n_values, length, dim))
        value_rows = cache_rows(self.roots, flat, self.probe.past)
        rotation = value_rows.new.rotation
        if rotation.width or abs(rotation.scale * value_rows.scale - 1.0) > 1e-5:
            raise Refusal("rotates or scales values", node)
        heads, head, token = self._heads(node, weights, rows.reshape(-1), batch, value_rows)
        if any(spec.dim != dim for spec in heads):
            raise Refusal(f"has values of {dim} elements and keys of {heads[0].dim}", node)
        n_tokens = self.roots.ar
        if not np.array_equal(np.sort(head * n_tokens + token), np.arange(len(heads) * n_tokens)):
            raise Refusal("does not have each head of each token once", node)
        features = len(heads) * dim
        output = AttentionOutput(
            n_tokens * features, node.outputs[0], features, _unwritten, heads=heads
        )
        base = self.roots.add(output)
        first = base.offset + token * features + head * dim
        return LinearForm(((first[:, None] + np.arange(dim)).reshape(*rows.shape, dim),))

    def _heads(
        self, node: ir.Node, weights: AttentionScores, rows: Ids, batch: Ids, values: CacheRows
    ) -> tuple[tuple[Head, ...], Ids, Ids]:
        """Return the heads, and for each row its head and its token."""
        heads: list[Head] = []
        head = np.zeros_like(rows)
        origins = (*weights.origins, ("values", node.inputs[1]), ("attended", node.outputs[0]))
        for product, mine in self._by_product(rows):
            local, queries = rows[mine] - product.offset, product.queries
            keys = np.stack(
                [queries.owner[local], queries.start[local], product.batch[local], batch[mine]]
            )
            unique, first, inverse = np.unique(keys, axis=1, return_index=True, return_inverse=True)
            if unique.shape[1] != np.unique(unique[:3], axis=1).shape[1]:
                raise Refusal("reads one head's values in several ways", node)
            for column in np.argsort(first):
                owner, start, key_batch, value_batch = (int(n) for n in unique[:, column])
                head[mine[inverse.reshape(-1) == column]] = len(heads)
                query = Source(queries.owners[owner], start)
                heads.append(
                    _head(product, query, key_batch, values, value_batch, weights, origins)
                )
        return tuple(heads), head, self._tokens(rows)

    def _by_product(self, rows: Ids) -> Iterator[tuple[_Product, Ids]]:
        """Yield each product with rows among `rows` [n], and their places there."""
        offsets = [product.offset for product in self._products]
        index = np.searchsorted(offsets, rows, side="right") - 1
        for number in np.unique(index):
            yield self._products[int(number)], np.flatnonzero(index == number)

    def _visible_and_mask(
        self, scores: AttentionScores, mask: Numbers
    ) -> tuple[Numbers, Ids, Numbers]:
        """Return visibility, token and mask by row; repeated rows only once."""
        tokens = self._tokens(scores.rows)
        if np.broadcast_shapes(mask.shape, scores.shape) != scores.shape:
            raise Refusal(f"masks scores {scores.shape} by {mask.shape}")
        mask = mask.reshape((1,) * (len(scores.shape) - mask.ndim) + mask.shape)
        for axis in range(tokens.ndim):
            first = tokens.take([0], axis)
            if mask.shape[axis] == 1 and (tokens == first).all():
                tokens = first
        numbers = np.broadcast_to(mask, (*tokens.shape, scores.width))
        return self.probe.visible()[tokens], tokens, numbers

    def _tokens(self, rows: Ids) -> Ids:
        flat = rows.reshape(-1)
        tokens = np.zeros_like(flat)
        for product, mine in self._by_product(flat):
            tokens[mine] = product.queries.token[flat[mine] - product.offset]
        return tokens.reshape(rows.shape)

    def _check_tables(self, rotation: RotaryEmbedding, token: Ids) -> None:
        """Check that all heads turn by the same angles."""
        if not rotation.width:
            return
        if self.tables is None:
            first = [int(np.flatnonzero(token == t)[0]) for t in range(self.roots.ar)]
            self.tables = (rotation.cos[first], rotation.sin[first])
            self._check_fed(*self.tables)
        cos, sin = self.tables
        if cos.shape[1] * 2 != rotation.width:
            reason = f"rotates {rotation.width} elements of a head, elsewhere {cos.shape[1] * 2}"
            raise Refusal(reason)
        if not self._are_near((rotation.cos, rotation.sin), (cos[token], sin[token])):
            raise Refusal(
                "has rotary embeddings of different angles, or in the other direction; a model "
                "with two bases, such as Gemma 3, is built from its checkpoint"
            )
        self.width = rotation.width

    def _check_fed(self, cos: Floats, sin: Floats) -> None:
        """Check that heads turn by the cosines and sines that a host feeds."""
        if self.fed is None:
            return
        fed_cos, fed_sin = (table[:, : cos.shape[1]] for table in self.fed)
        if fed_cos.shape == cos.shape and self._are_near((cos, sin), (fed_cos, fed_sin)):
            return
        if not self.probe.full_tables:
            raise UnequalHalvesRefusal
        raise Refusal("turns heads otherwise than by the cosines and sines that it is fed")

    def _are_near(self, tables: tuple[Floats, Floats], others: tuple[Floats, Floats]) -> bool:
        pairs = zip(tables, others, strict=True)
        tolerance = self.roots.precision.tolerance
        return all(np.allclose(one, other, atol=tolerance) for one, other in pairs)


def _head(
    product: _Product,
    query: Source,
    key_batch: int,
    values: CacheRows,
    value_batch: int,
    weights: AttentionScores,
    origins: tuple[tuple[str, ir.Value | None], ...],
) -> Head:
    keys = product.keys
    key_cache, value_cache = keys.caches[key_batch].role, values.caches[value_batch].role
    kv = int(keys.head[key_batch])
    if (key_cache.kind, value_cache.kind) != ("key", "value"):
        raise Refusal(f"{key_cache.value.name} and {value_cache.value.name} are swapped")
    if (key_cache.layer, kv) != (value_cache.layer, int(values.head[value_batch])):
        raise Refusal(f"reads {key_cache.value.name} with {value_cache.value.name}")
    if product.queries.rotation.width != keys.new.rotation.width:
        raise Refusal("rotates queries and keys differently")
    extra = (("key_cache", key_cache.value), ("value_cache", value_cache.value))
    return Head(
        layer=key_cache.layer,
        kv=kv,
        dim=product.dim,
        query=query,
        key=_new(keys.new, key_batch, len(keys.caches)),
        value=_new(values.new, value_batch, len(values.caches)),
        query_rotation=product.queries.rotation,
        key_rotation=keys.new.rotation,
        joined_scale=keys.scale,
        weights=weights,
        origins=tuple((name, value) for name, value in (*origins, *extra) if value is not None),
    )


def _new(rows: HeadRows, batch: int, n_batch: int) -> Source:
    row = batch * (len(rows.start) // n_batch)
    return Source(rows.owners[int(rows.owner[row])], int(rows.start[row]))


def _unwritten() -> ir.Value:
    raise Refusal("uses some heads of an attention only")
