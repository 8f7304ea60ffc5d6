"""Root tensors: those to which the elements of all others are traced back.

A root tensor owns a range of ids. An activation [AR, features] is written to the canonical graph:
its element of token t and feature f has the id `offset + t * features + f`.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from buildlib.graph.folding import Refusal
from plugins.onnx_exports.precision import SINGLE, Precision
from plugins.onnx_exports.roles import Role
from plugins.onnx_exports.values import NO_TERM, Ids, LinearForm

_MOST_OWNERS = 1024


@dataclass(eq=False)
class RootTensor:
    """A tensor that others are made of.

    Attributes:
        origin: the value of the source that has these numbers.
        offset: the id of its first element, which `RootTensors.add` gives it.
    """

    size: int
    origin: ir.Value
    offset: int = field(init=False)


@dataclass(eq=False)
class Activation(RootTensor):
    """An activation of `features` numbers a token.

    Attributes:
        write: makes the canonical value [AR, features] or [1, AR, features] when first needed.
        stacked: whether it has the leading 1.
        value: result of `write`.
        twin: the same with, or without, the leading 1.
    """

    features: int
    write: Callable[[], ir.Value]
    stacked: bool = False
    value: ir.Value | None = None
    twin: ir.Value | None = None


@dataclass(eq=False, kw_only=True)
class NormedActivation(Activation):
    """x / sqrt(mean(x^2) + eps), by groups of features; written once its gain is known.

    Attributes:
        parent: x.
        group: features that are normalised together.
        gain: factor of each feature of a group, [group].
    """

    parent: Activation
    group: int
    epsilon: float
    gain: ir.Value | None


@dataclass(eq=False, kw_only=True)
class ProjectedActivation(Activation):
    """X times a weight; a bias may follow.

    Attributes:
        parent: x.
        weight: canonical value, [out, in] if `transposed`, else [in, out].
    """

    parent: Activation
    weight: ir.Value
    transposed: bool
    bias: ir.Value | None


@dataclass(eq=False)
class TokenIds(RootTensor):
    """The token ids, [AR]."""


@dataclass(eq=False)
class PastCache(RootTensor):
    """Past keys or values of a layer, or of one head of it.

    Attributes:
        dims: their shape in the source.
    """

    role: Role
    dims: tuple[int, ...]


@dataclass(eq=False)
class JoinedForm(RootTensor):
    """A form that was joined with a cache; ids are those of its elements, row-major."""

    form: LinearForm


@dataclass(eq=False)
class AttentionOutput(Activation):
    """The output of the heads of one product of probabilities and values.

    Attributes:
        heads: the heads, in the order of the features.
    """

    heads: tuple[object, ...] = ()


AnyRoot = TypeVar("AnyRoot", bound=RootTensor)


@dataclass
class RootTensors:
    """All root tensors of a model, by id."""

    ar: int
    precision: Precision = SINGLE
    _all: list[RootTensor] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)
    _end: int = 0

    def add(self, base: AnyRoot) -> AnyRoot:
        """Register a root tensor."""
        base.offset = self._end
        self._all.append(base)
        self._offsets.append(base.offset)
        self._end += base.size
        return base

    def owner(self, number: int) -> RootTensor:
        """Return the root tensor that an id belongs to."""
        return self._all[bisect_right(self._offsets, number) - 1]

    def single_owner(self, ids: Ids) -> RootTensor | None:
        """Return the one root tensor that all ids belong to, or None."""
        present = ids if ids.size and int(ids.min()) != NO_TERM else ids[ids != NO_TERM]
        if not present.size:
            return None
        base = self.owner(int(present.min()))
        return base if int(present.max()) < base.offset + base.size else None

    def owners(self, ids: Ids) -> tuple[list[RootTensor], Ids]:
        """Return the root tensors that ids belong to, and for each id the index of its own."""
        owners: list[RootTensor] = []
        owner = np.full_like(ids, -1)
        while (rest := ids[owner < 0]).size:
            base = self.owner(int(rest.min()))
            if len(owners) >= _MOST_OWNERS:
                raise Refusal("joins too many tensors")
            owner[(ids >= base.offset) & (ids < base.offset + base.size)] = len(owners)
            owners.append(base)
        return owners, owner

    def activations(self, ids: Ids) -> tuple[list[Activation], Ids, Ids, Ids]:
        """Return the activations that ids belong to; for each id its own, token and feature."""
        bases, owner = self.owners(ids)
        owners = [as_activation(base) for base in bases]
        offsets = np.array([rows.offset for rows in owners])[owner]
        features = np.array([rows.features for rows in owners])[owner]
        local = ids - offsets
        return owners, owner, local // features, local % features

    def form_of(self, base: RootTensor, dims: tuple[int, ...]) -> LinearForm:
        """Return a whole root tensor as a form of shape `dims`."""
        return LinearForm((np.arange(base.offset, base.offset + base.size).reshape(dims),))


def as_activation(base: RootTensor) -> Activation:
    """Return a root tensor that must be an activation."""
    if not isinstance(base, Activation):
        raise Refusal("treats token ids or a cache as an activation")
    return base


def token_and_feature(rows: Activation, ids: Ids) -> tuple[Ids, Ids]:
    """Return token and feature of each element."""
    local = ids - rows.offset
    return local // rows.features, local % rows.features
