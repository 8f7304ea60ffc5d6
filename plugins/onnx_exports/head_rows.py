"""Composition of single heads: their features, activation and rotation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.graph.folding import Refusal
from plugins.onnx_exports.root_tensors import Activation, JoinedForm, PastCache, RootTensors
from plugins.onnx_exports.values import NO_TERM, Floats, Ids, LinearForm


@dataclass(frozen=True)
class RotaryEmbedding:
    """A rotary embedding of the first `width` elements of a head, after a scale.

    Attributes:
        width: 0 without rotary embedding.
        scale: factor of all elements.
        stretch: factor of those that turn besides, as LongRoPE and YaRN have it.
        cos, sin: [rows, width/2].
    """

    width: int
    scale: float
    stretch: float
    cos: Floats
    sin: Floats


@dataclass(frozen=True)
class HeadRows:
    """Rows of heads, each the head of one token.

    Attributes:
        owner: index into `owners`, by row.
        start: first feature of the head, by row.
    """

    owners: Sequence[Activation]
    owner: Ids
    token: Ids
    start: Ids
    rotation: RotaryEmbedding


@dataclass(frozen=True)
class CacheRows:
    """Keys or values of one head each, past and new.

    Attributes:
        caches: cache of the past, by batch.
        head: key/value head, by batch.
        new: new entries, a row for each of [batch, AR].
        scale: factor of past and new entries after they were joined.
    """

    caches: tuple[PastCache, ...]
    head: Ids
    new: HeadRows
    scale: float


def head_rows(roots: RootTensors, form: LinearForm) -> HeadRows:
    """Interpret a form [rows, head_dim] as rows of heads."""
    n_rows, dim = form.shape
    largest = np.iinfo(np.int64).max
    low = np.min([np.where(ids == NO_TERM, largest, ids) for ids in form.ids], axis=(0, 2))
    own = np.zeros((n_rows, dim))
    crossed = np.zeros((n_rows, dim))
    partner = np.full((n_rows, dim), -1)
    where = np.arange(dim)
    for term, part in enumerate(form.ids):
        here, relative = part != NO_TERM, part - low[:, None]
        if (here & (relative >= dim)).any():
            raise Refusal("a head mixes features that lie apart")
        coef = form.dense(term)
        same = here & (relative == where)
        own += np.where(same, coef, 0.0)
        other = here & ~same
        if (other & (partner >= 0) & (partner != relative)).any():
            raise Refusal("a head's elements mix more than two features each")
        crossed += np.where(other, coef, 0.0)
        partner = np.where(other, relative, partner)
    owners, owner, token, start = roots.activations(low)
    if (start + dim > np.array([rows.features for rows in owners])[owner]).any():
        raise Refusal("a head crosses from one token to the next")
    rotation = _rotation(own, crossed, partner, roots.precision.tolerance)
    return HeadRows(owners, owner, token, start, rotation)


def cache_rows(roots: RootTensors, form: LinearForm, past: int) -> CacheRows:
    """Interpret keys or values [batch, CL, head_dim] as a cache and new entries."""
    if len(form.ids) != 1 or not isinstance(form.coefs[0], float):
        raise Refusal("keys or values change after they were joined with the cache")
    ids = form.ids[0]
    n_batch, length, dim = ids.shape
    if length <= past:
        raise Refusal(f"attends to {length} tokens, with a past of {past}")
    bases, owner = roots.owners(np.ascontiguousarray(ids[:, 0, 0]))
    caches = tuple(base for base in bases if isinstance(base, PastCache))
    if len(caches) != len(bases):
        raise Refusal("attends to keys or values that do not begin with a cache")
    heads = np.zeros(n_batch, dtype=np.int64)
    for index, cache in enumerate(caches):
        mine = owner == index
        heads[mine] = _cache_heads(cache, ids[mine][:, :past])
    rows = head_rows(roots, _expand_joined(roots, LinearForm((ids[:, past:].reshape(-1, dim),))))
    if not np.array_equal(rows.token, np.tile(np.arange(length - past), n_batch)):
        raise Refusal("new keys or values do not follow the cache in the order of tokens")
    by_batch = rows.start.reshape(n_batch, -1), rows.owner.reshape(n_batch, -1)
    if any((part != part[:, :1]).any() for part in by_batch):
        raise Refusal("new keys or values of a head come from different features")
    by_batch_caches = tuple(caches[int(index)] for index in owner)
    return CacheRows(by_batch_caches, heads, rows, form.coefs[0])


def _cache_heads(cache: PastCache, ids: Ids) -> Ids:
    """Return which heads of the cache [batch, past, head_dim] are; check that they are heads."""
    _, past, dim = ids.shape
    first = ids[:, 0, 0] - cache.offset
    along = [int(ids[0, 1, 0] - ids[0, 0, 0]) if past > 1 else 0]
    along.append(int(ids[0, 0, 1] - ids[0, 0, 0]) if dim > 1 else 0)
    steps = np.arange(past)[:, None] * along[0] + np.arange(dim) * along[1]
    if not np.array_equal(ids - ids[:, :1, :1], np.broadcast_to(steps, ids.shape)):
        raise Refusal(f"{cache.role.value.name} is read in an unusual order")
    strides = [math.prod(cache.dims[axis + 1 :]) for axis in range(len(cache.dims))]
    pairs = zip(strides, cache.dims, strict=True)
    sizes = {stride: size for stride, size in pairs if size > 1}
    for step, size in zip(along, (past, dim), strict=True):
        if size > 1 and sizes.pop(step, None) != size:
            raise Refusal(f"{cache.role.value.name} {list(cache.dims)} is not read whole")
    if len(sizes) > 1:
        raise Refusal(f"{cache.role.value.name} {list(cache.dims)} has too many dimensions")
    if not sizes:
        return np.full(len(first), cache.role.head or 0)
    ((stride, _),) = sizes.items()
    return first // stride


def _expand_joined(roots: RootTensors, form: LinearForm) -> LinearForm:
    """Replace elements of joined forms by the elements they are made of."""
    ids = form.ids[0]
    base = roots.single_owner(ids)
    if isinstance(base, JoinedForm):
        return _elements(base.form, ids - base.offset)
    if base is not None:
        return form
    owners, owner = roots.owners(ids)
    if not any(isinstance(base, JoinedForm) for base in owners):
        return form
    n_terms = max(len(base.form.ids) for base in owners if isinstance(base, JoinedForm))
    parts = [np.full_like(ids, NO_TERM) for _ in range(n_terms)]
    coefs = [np.zeros(ids.shape) for _ in range(n_terms)]
    for index, base in enumerate(owners):
        if not isinstance(base, JoinedForm):
            raise Refusal("joins keys that are rotated with others that are not")
        mine = owner == index
        elements = _elements(base.form, ids[mine] - base.offset)
        for term, part in enumerate(elements.ids):
            parts[term][mine] = part
            coefs[term][mine] = elements.dense(term)
    return LinearForm(tuple(parts), tuple(coefs), varies=True)


def _elements(form: LinearForm, where: Ids) -> LinearForm:
    return form.moved(lambda part: part.reshape(-1)[where])


def _rotation(
    own: Floats, crossed: Floats, partner: npt.NDArray[Any], tolerance: float
) -> RotaryEmbedding:
    dim = own.shape[1]
    if (partner != partner[:1]).any():
        raise Refusal("heads are rotated in different ways")
    has_partner = partner[0] >= 0
    width = int(has_partner.sum())
    if not width:
        empty = np.zeros((len(own), 0))
        return RotaryEmbedding(0, _constant(own, tolerance), 1.0, empty, empty)
    half = width // 2
    where = np.arange(width)
    if width % 2 or not has_partner[:width].all():
        raise Refusal(f"rotates {width} of {dim} elements of a head, and not the first ones")
    if np.array_equal(partner[0, :width], where ^ 1):
        raise Refusal("has an interleaved rotary embedding, which Genie graphs do not have")
    if not np.array_equal(partner[0, :width], (where + half) % width):
        raise Refusal("has a rotary embedding of unknown pairing")
    cos, sin = own[:, :half], -crossed[:, :half]
    if not (
        np.allclose(cos, own[:, half:width], atol=tolerance)
        and np.allclose(sin, crossed[:, half:width], atol=tolerance)
    ):
        raise UnequalHalvesRefusal
    length = scale = _constant(np.hypot(cos, sin), tolerance)
    if width < dim:
        scale_of_rest = _constant(own[:, width:], tolerance)
        if abs(scale_of_rest - length) > tolerance * abs(length):
            scale = scale_of_rest
    return RotaryEmbedding(width, scale, length / scale, cos / length, sin / length)


class UnequalHalvesRefusal(Refusal):
    """The two halves of a head are turned by different angles."""

    def __init__(self) -> None:
        super().__init__("turns the two halves of a head by different angles")


def _constant(numbers: Floats, tolerance: float) -> float:
    value = float(np.median(numbers))
    if not np.allclose(numbers, value, rtol=tolerance, atol=0.0):
        raise Refusal("scales the elements of a head differently")
    return value
