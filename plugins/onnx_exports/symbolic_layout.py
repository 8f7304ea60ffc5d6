"""Layout operators on values that depend on the text."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from buildlib.graph.folding import Refusal
from plugins.onnx_exports import array_layout as layout
from plugins.onnx_exports.constants import arrays_of
from plugins.onnx_exports.root_tensors import JoinedForm, PastCache, RootTensors
from plugins.onnx_exports.values import (
    NO_TERM,
    AbstractValue,
    AttentionScores,
    Concrete,
    LinearForm,
    NormStep,
    Numbers,
    Weight,
)


class SymbolicLayout:
    """Moves ids and coefficients as the source moves numbers."""

    def __init__(self, roots: RootTensors) -> None:
        self.roots = roots

    def rearranged(
        self, node: ir.Node, value: AbstractValue, parameters: list[AbstractValue | None]
    ) -> AbstractValue:
        """Return the result of an operator that only moves elements."""
        if any(part is not None and not isinstance(part, Concrete | Weight) for part in parameters):
            raise Refusal("takes shapes or indices that depend on the text", node)
        if isinstance(value, AttentionScores):
            return self._moved_scores(node, value, parameters)
        if not isinstance(value, LinearForm):
            raise Refusal(f"moves {describe(value)}", node)
        move = layout.array_function(node, len(value.shape), arrays_of(parameters))
        return value.moved(move)

    def split(self, node: ir.Node, inputs: list[AbstractValue | None]) -> list[AbstractValue]:
        """Return the pieces of a Split."""
        value = inputs[0]
        sizes = next(iter(arrays_of(inputs[1:])), None)
        axis = layout.axis_of(node)
        if isinstance(value, AttentionScores) and axis not in {-1, len(value.shape) - 1}:
            if axis < 0:
                raise Refusal("splits attention scores from behind", node)
            return [replace(value, rows=part) for part in layout.split(node, value.rows, sizes)]
        if not isinstance(value, LinearForm):
            raise Refusal(f"splits {describe(value)}", node)

        def piece(index: int) -> AbstractValue:
            return value.moved(lambda array: layout.split(node, array, sizes)[index])

        return [piece(index) for index in range(len(layout.split(node, value.ids[0], sizes)))]

    def concatenated(self, node: ir.Node, inputs: list[AbstractValue | None]) -> AbstractValue:
        """Return the result of a Concat."""
        axis = layout.axis_of(node)
        scores = [part for part in inputs if isinstance(part, AttentionScores)]
        if len(scores) == len(inputs):
            if axis in {-1, len(scores[0].shape) - 1}:
                raise Refusal("joins attention scores along the context", node)
            return _joined_scores(node, scores, axis if axis >= 0 else axis + 1)
        forms = [part for part in inputs if isinstance(part, LinearForm)]
        if len(forms) != len(inputs):
            raise Refusal("joins tensors that depend on the text with others", node)
        if any(self._is_cached(form) for form in forms):
            forms = [self._frozen(node, form) for form in forms]
        n_terms = max(len(form.ids) for form in forms)
        ids = tuple(
            np.concatenate([_term_ids(form, term) for form in forms], axis)
            for term in range(n_terms)
        )
        coefs: list[float | Numbers] = []
        for term in range(n_terms):
            first = forms[0].coefs[term] if term < len(forms[0].coefs) else 0.0
            same = isinstance(first, float) and all(
                term < len(form.coefs) and _equals(form.coefs[term], first) for form in forms
            )
            parts = [_term_coefs(form, term) for form in forms] if not same else []
            coefs.append(first if same else np.concatenate(parts, axis))
        return LinearForm(ids, tuple(coefs), any(form.varies for form in forms))

    def _moved_scores(
        self, node: ir.Node, scores: AttentionScores, parameters: list[AbstractValue | None]
    ) -> AttentionScores:
        axis = layout.axis_of(node)
        last = axis in {-1, len(scores.shape) - 1}
        if node.op_type not in layout.LAST_AXIS_SAFE and (node.op_type != "Gather" or last):
            raise Refusal("rearranges attention scores", node)
        move = layout.array_function(node, len(scores.shape), arrays_of(parameters))
        rows = move(np.broadcast_to(scores.rows[..., None], scores.shape))
        if rows.shape[-1] != scores.width or (rows != rows[..., :1]).any():
            raise Refusal("rearranges attention scores", node)
        return replace(scores, rows=rows[..., 0])

    def _is_cached(self, form: LinearForm) -> bool:
        first = int(form.ids[0].reshape(-1)[0]) if form.ids[0].size else NO_TERM
        return first != NO_TERM and isinstance(self.roots.owner(first), PastCache)

    def _frozen(self, node: ir.Node, form: LinearForm) -> LinearForm:
        """Register a form of several terms under ids of its own, to be joined with a cache."""
        if form.is_plain:
            return form
        size = form.ids[0].size
        base = self.roots.add(JoinedForm(size, node.outputs[0], form))
        return self.roots.form_of(base, form.shape)


def describe(value: AbstractValue | None) -> str:
    """Describe a value for messages."""
    if isinstance(value, AttentionScores):
        return "attention scores"
    if isinstance(value, NormStep):
        return "part of a normalisation"
    return "an activation" if isinstance(value, LinearForm) else "numbers"


def _joined_scores(node: ir.Node, scores: list[AttentionScores], axis: int) -> AttentionScores:
    if len({(part.stage, part.scale, part.masked, part.window, part.width) for part in scores}) > 1:
        raise Refusal("joins attention scores that were scaled or masked differently", node)
    origins = tuple(dict.fromkeys(origin for part in scores for origin in part.origins))
    rows = np.concatenate([part.rows for part in scores], axis)
    return replace(scores[0], rows=rows, origins=origins)


def _term_ids(form: LinearForm, term: int) -> layout.Array:
    return form.ids[term] if term < len(form.ids) else np.full(form.shape, NO_TERM)


def _term_coefs(form: LinearForm, term: int) -> layout.Array:
    return form.dense(term) if term < len(form.ids) else np.zeros(form.shape)


def _equals(coef: float | Numbers, number: float | Numbers) -> bool:
    return isinstance(coef, float) and isinstance(number, float) and coef == number
