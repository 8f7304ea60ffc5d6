"""Resolution of linear forms to activations of the canonical graph, by cutting and joining."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from buildlib.graph.folding import Refusal
from plugins.onnx_exports.encoding_transfer import transfer_encoding
from plugins.onnx_exports.root_tensors import (
    Activation,
    AttentionOutput,
    ProjectedActivation,
    RootTensors,
    as_activation,
    token_and_feature,
)
from plugins.onnx_exports.values import Floats, Ids, LinearForm, Numbers
from plugins.onnx_exports.writer import Writer

_MOST_PIECES = 1024


@dataclass(frozen=True)
class Piece:
    """Features [start, stop) of an activation."""

    rows: Activation
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """True if it is all features."""
        return self.start == 0 and self.stop == self.rows.features


@dataclass(frozen=True)
class Placement:
    """An activation, and the place of each element of a form in it.

    Attributes:
        token: token of each element; a form need not have all tokens.
    """

    rows: Activation
    token: Ids
    feature: Ids

    @property
    def local(self) -> Ids:
        """Index into the activation, row-major."""
        return np.asarray(self.token * self.rows.features + self.feature)

    def move_to(self, rows: Activation, node: ir.Node) -> LinearForm:
        """Return the same arrangement of another activation with as many features."""
        if rows.features != self.rows.features:
            raise Refusal("changes the number of features", node)
        return LinearForm((rows.offset + self.local,))


class ActivationResolver:
    """Finds or writes the activation that holds exactly the elements of a form.

    Args:
        attend: writes the attention of all heads of a layer.
    """

    def __init__(
        self,
        roots: RootTensors,
        writer: Writer,
        attend: Callable[[tuple[AttentionOutput, ...]], Activation],
    ) -> None:
        self.roots = roots
        self.writer = writer
        self._attend = attend
        self._joined: dict[tuple[tuple[int, int, int], ...], Activation] = {}

    def resolve(self, form: LinearForm, origin: ir.Value) -> Placement:
        """Return the activation that has exactly the elements of the form."""
        if form.varies or len(form.ids) != 1:
            raise Refusal("uses position-dependent values outside a rotary embedding")
        pieces, token, feature = self._trace(form.ids[0])
        rows = self.join(pieces, origin)
        placed = Placement(rows, token, feature)
        if form.is_plain:
            return placed
        factor = self._factor(form, placed)
        product = self.writer.elementwise([rows], "Mul", origin, constants=[factor])
        return Placement(product, token, feature)

    def differs_by_token(self, form: LinearForm, numbers: Numbers) -> bool:
        """Return whether `numbers`, which broadcast with `form`, are others for other tokens."""
        axes = [
            axis
            for axis in range(-min(numbers.ndim, len(form.shape)), 0)
            if numbers.shape[axis] > 1 and np.ptp(numbers, axis).any()
        ]
        if not axes:
            return False
        _, _, token, _ = self.roots.activations(form.ids[0])
        return any(token.shape[axis] > 1 and np.ptp(token, axis).any() for axis in axes)

    def join(self, pieces: Sequence[Piece], origin: ir.Value) -> Activation:
        """Return the activation made of these pieces, in order."""
        key = tuple((piece.rows.offset, piece.start, piece.stop) for piece in pieces)
        if key in self._joined:
            return self._joined[key]
        attended = tuple(piece.rows for piece in pieces if isinstance(piece.rows, AttentionOutput))
        if attended:
            if len(attended) != len(pieces) or not all(piece.is_whole for piece in pieces):
                raise Refusal("uses some heads of an attention only")
            rows = self._attend(attended)
        elif len(pieces) == 1:
            rows = self._cut(pieces[0])
        else:
            values = [self.writer.value(self._cut(piece), stacked=False) for piece in pieces]
            value = self.writer.op("Concat", values, f"{origin.name}_joined", axis=-1)
            features = sum(piece.stop - piece.start for piece in pieces)
            rows = self.writer.activation(value, origin, features)
            transfer_encoding(value, [piece.rows.origin for piece in pieces])
        self._joined[key] = rows
        return rows

    def _cut(self, piece: Piece) -> Activation:
        if piece.is_whole:
            return piece.rows
        key = ((piece.rows.offset, piece.start, piece.stop),)
        if key not in self._joined:
            bounds = self.writer.builder.ints(piece.start, piece.stop, -1)
            flat = self.writer.value(piece.rows, stacked=False)
            name = f"{flat.name}_{piece.start}_to_{piece.stop}"
            value = self.writer.op("Slice", [flat, *bounds], name)
            width = piece.stop - piece.start
            self._joined[key] = self.writer.activation(value, piece.rows.origin, width)
        return self._joined[key]

    def _trace(self, ids: Ids) -> tuple[list[Piece], Ids, Ids]:
        """Return pieces in order of appearance, and token and joined feature of each element."""
        base = self.roots.single_owner(ids)
        if isinstance(base, Activation) and ids.size == base.size:
            ordered = self._ordered(base, ids)
            if ordered is not None or _is_permutation(ids, base):
                token, feature = ordered or token_and_feature(base, ids)
                return [Piece(base, 0, base.features)], token, feature
        if base is not None:
            owners = [as_activation(base)]
            token, feature = token_and_feature(owners[0], ids)
            owner = np.zeros_like(ids)
        else:
            owners, owner, token, feature = self.roots.activations(ids)
        first = token == token.min()
        pieces: list[Piece] = []
        where: dict[tuple[int, int], int] = {}
        total = 0
        run = np.stack([owner[first], feature[first]], axis=-1).reshape(-1, 2)
        breaks = np.flatnonzero((np.diff(run[:, 0]) != 0) | (np.diff(run[:, 1]) != 1)) + 1
        if len(breaks) >= _MOST_PIECES:
            raise Refusal("rearranges single features")
        starts = [0, *breaks.tolist()]
        result = np.zeros_like(ids)
        for begin, end in zip(starts, [*starts[1:], len(run)], strict=True):
            number, start = int(run[begin, 0]), int(run[begin, 1])
            stop = start + end - begin
            if (number, start) in where:
                raise Refusal("repeats features")
            where[number, start] = total
            inside = (owner == number) & (feature >= start) & (feature < stop)
            result[inside] = feature[inside] - start + total
            pieces.append(Piece(owners[number], start, stop))
            total += stop - start
        n_tokens = int(np.unique(token).size)
        if ids.size != n_tokens * total or np.unique(token * total + result).size != ids.size:
            raise Refusal("has other features for other tokens")
        return pieces, token, result

    def _ordered(self, base: Activation, ids: Ids) -> tuple[Ids, Ids] | None:
        """Return token and feature of a whole activation in order, without computing them."""
        ar, features = self.roots.ar, base.features
        if ids.shape[-2:] != (ar, features) or (np.diff(ids.reshape(-1)) != 1).any():
            return None
        token = np.broadcast_to(np.arange(ar)[:, None], (ar, features))
        feature = np.broadcast_to(np.arange(features), (ar, features))
        return np.broadcast_to(token, ids.shape), np.broadcast_to(feature, ids.shape)

    def _factor(self, form: LinearForm, placed: Placement) -> ir.Value:
        coef = form.coefs[0]
        if isinstance(coef, float):
            return self.writer.factor(coef)
        vector = np.zeros(placed.rows.features)
        vector[placed.feature.reshape(-1)] = coef.reshape(-1)
        if not np.array_equal(vector[placed.feature], coef):
            raise Refusal("multiplies tokens by different numbers")
        return self.writer.constant(self.writer.name("factors"), vector)


def feature_vector(placed: Placement, numbers: Numbers, period: int) -> Floats | None:
    """Return `numbers` by feature modulo `period`, or None if they differ between tokens."""
    vector = np.zeros(period, dtype=np.float64)
    where = placed.feature % period
    vector[where.reshape(-1)] = numbers.reshape(-1)
    return vector if np.array_equal(vector[where], numbers) else None


def unbiased_projection(rows: Activation) -> ProjectedActivation | None:
    """Return the projection that can still take a bias, or None."""
    if isinstance(rows, ProjectedActivation) and rows.bias is None and rows.value is None:
        return rows
    return None


def _is_permutation(ids: Ids, base: Activation) -> bool:
    counts = np.bincount((ids - base.offset).reshape(-1), minlength=base.size)
    return bool((counts == 1).all())
