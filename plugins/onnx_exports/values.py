"""Abstract values of the source graph, at one (AR, CL).

The importer runs the source on symbols instead of numbers. A token-dependent tensor is a
`LinearForm`: for each of its elements, the elements of root tensors that it is made of. Reshape,
Transpose, Slice, Expand and the like only move these, in any spelling, so the result shows the
computation of the graph and not its layout.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.graph.files import tensor_array

Ids = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

NO_TERM = -1
"""The id of a term that an element does not have."""


@dataclass(frozen=True, eq=False)
class Concrete:
    """Numbers that are the same for every text.

    Attributes:
        varies: they follow from positions or the mask, so they differ from call to call.
        source: the initializer that holds just these numbers, if one does.
    """

    array: Numbers
    varies: bool = False
    source: ir.Value | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions in the source."""
        return self.array.shape


def dims_in_file(source: ir.Value) -> tuple[int, ...]:
    """Return the dimensions of a parameter as stored."""
    tensor = source.const_value
    assert tensor is not None  # noqa: S101  (initializers have numbers)
    return tuple(int(dim) for dim in tensor.shape.numpy())


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter, not read until an operator other than a projection needs its numbers.

    Attributes:
        dims: its shape now, after reshapes that add or drop dimensions of one.
        transposed: whether its two true dimensions are swapped against the file.
    """

    source: ir.Value
    dims: tuple[int, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions in the source."""
        return self.dims

    @cached_property
    def concrete(self) -> Concrete:
        """The numbers of the weight."""
        tensor = self.source.const_value
        assert tensor is not None  # noqa: S101  (made from initializers alone)
        array = tensor_array(tensor)
        if self.transposed:
            array = array.reshape(_true_dims(array.shape)).T
        return Concrete(array.reshape(self.dims), source=None if self.transposed else self.source)


@dataclass(frozen=True, eq=False)
class LinearForm:
    """For each element, the sum of `coefs[k]` times the element `ids[k]` over all terms k.

    Attributes:
        ids: by term, an array of the tensor's shape.
        coefs: by term, one number, or an array of the tensor's shape.
        varies: coefficients follow from positions, as in a rotary embedding.
    """

    ids: tuple[Ids, ...]
    coefs: tuple[float | Floats, ...] = (1.0,)
    varies: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions in the source."""
        return self.ids[0].shape

    @property
    def is_plain(self) -> bool:
        """True if each element is an element of another tensor, unchanged."""
        return len(self.ids) == 1 and isinstance(self.coefs[0], float) and self.coefs[0] == 1.0

    def moved(self, move: Callable[[Numbers], Numbers]) -> "LinearForm":
        """Return the form with its elements rearranged by `move`, a function of arrays."""
        ids = tuple(move(part) for part in self.ids)
        coefs = tuple(coef if isinstance(coef, float) else move(coef) for coef in self.coefs)
        return LinearForm(ids, coefs, self.varies)

    def dense(self, term: int) -> Floats:
        """Return the coefficients of a term as an array."""
        return np.broadcast_to(np.asarray(self.coefs[term], dtype=np.float64), self.shape)

    def scaled(self, factor: Numbers, *, varies: bool) -> "LinearForm":
        """Return the product with numbers that broadcast with it."""
        shape = np.broadcast_shapes(self.shape, factor.shape)
        ids = tuple(np.broadcast_to(part, shape) for part in self.ids)
        by = float(factor.reshape(())) if factor.size == 1 else factor.astype(np.float64)
        coefs: list[float | Floats] = []
        for coef in self.coefs:
            product = coef * by
            scalar = isinstance(product, float)
            coefs.append(product if scalar else np.broadcast_to(product, shape))
        return LinearForm(ids, tuple(coefs), self.varies or varies)

    def plus(self, other: "LinearForm", sign: float) -> "LinearForm":
        """Return the sum with another form of a shape that broadcasts with it."""
        shape = np.broadcast_shapes(self.shape, other.shape)
        other = other.scaled(np.asarray(sign), varies=False)
        ids = tuple(np.broadcast_to(part, shape) for part in (*self.ids, *other.ids))
        coefs = tuple(
            coef if isinstance(coef, float) else np.broadcast_to(coef, shape)
            for coef in (*self.coefs, *other.coefs)
        )
        return LinearForm(ids, coefs, self.varies or other.varies)


@dataclass(frozen=True, eq=False)
class NormStep:
    """A step on the way from x to 1/sqrt(mean(x^2) + eps).

    Attributes:
        stage: `square`, `mean`, `root` or `inverse`, the last step taken.
        axis: of the mean, counted from the end.
    """

    source: LinearForm
    dims: tuple[int, ...]
    stage: str
    axis: int = -1
    epsilon: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions in the source."""
        return self.dims


@dataclass(frozen=True, eq=False)
class AttentionScores:
    """Products of queries and keys, at a stage from scores to probabilities.

    Attributes:
        rows: the query of each row of CL scores; all dimensions but the last.
        width: CL, the last dimension.
        stage: `scores`, `probabilities`, or `nan` for the answer to whether these are NaN.
        scale: factor of scores, after their bound if they have one.
        bounded: factor of scores before the hyperbolic tangent that bounds them; None: none does.
        masked: whether the causal mask was added.
        window: how many slots back that mask lets a token see, its own included; None for all.
        origins: values of the source at each stage so far, by role.
    """

    rows: Ids
    width: int
    stage: str = "scores"
    scale: float = 1.0
    bounded: float | None = None
    masked: bool = False
    window: int | None = None
    origins: tuple[tuple[str, ir.Value], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions in the source."""
        return (*self.rows.shape, self.width)

    def after(self, role: str, value: ir.Value, **changes: Any) -> "AttentionScores":  # noqa: ANN401
        """Return the scores after a step that made `value` of the source."""
        return replace(self, origins=(*self.origins, (role, value)), **changes)


AbstractValue = Concrete | Weight | LinearForm | NormStep | AttentionScores


def _true_dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if dim != 1)
