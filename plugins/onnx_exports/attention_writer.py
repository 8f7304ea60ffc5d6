"""Canonical attention of a layer, written from the heads recognised in the source."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from buildlib.encodings.attachment import inherit
from buildlib.graph import interface
from buildlib.graph.decoder import window_mask
from buildlib.graph.folding import Refusal
from plugins.onnx_exports.attention import Head, Source
from plugins.onnx_exports.encoding_transfer import transfer_encoding
from plugins.onnx_exports.resolver import ActivationResolver, Piece
from plugins.onnx_exports.root_tensors import Activation, AttentionOutput, NormedActivation
from plugins.onnx_exports.rotation_encodings import WHOLE, RotationSteps, Step
from plugins.onnx_exports.values import AttentionScores
from plugins.onnx_exports.writer import Writer


class AttentionWriter:
    """Writes each layer's attention once, and keeps its new keys and values.

    Attributes:
        caches: canonical inputs of past keys and values by name, without lengths.
        outputs: new entries by name.
        rotations_written: of queries and of keys, still without encodings.
        value_ranges: ids of the activations that values are projected to.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.caches: dict[str, ir.Value] = {}
        self.outputs: dict[str, ir.Value] = {}
        self.mask = _input(interface.ATTENTION_MASK)
        self.cos = _input(interface.COS)
        self.sin = _input(interface.SIN)
        self.rotations_written: list[RotationSteps] = []
        self.value_ranges: list[tuple[int, int]] = []
        self.resolver: ActivationResolver | None = None
        self._windowed: tuple[int, ir.Value] | None = None

    def write_attention(self, parts: tuple[AttentionOutput, ...]) -> Activation:
        """Write the attention of all heads of a layer, [AR, n_heads * head_dim]."""
        heads = [head for part in parts for head in part.heads if isinstance(head, Head)]
        first = heads[0]
        kvs = sorted({head.kv for head in heads})
        group, rest = divmod(len(heads), len(kvs))
        if {head.layer for head in heads} != {first.layer}:
            raise Refusal("joins heads of several layers")
        if rest or [head.kv for head in heads] != [kv for kv in kvs for _ in range(group)]:
            raise Refusal(f"layer {first.layer}: heads are not grouped by key/value head")
        if kvs != list(range(len(kvs))):
            raise Refusal(f"layer {first.layer}: reads key/value heads {kvs} only")
        if interface.past_key(first.layer, "in") in self.caches:
            raise Refusal(f"layer {first.layer}: its caches are read twice")
        if len({_settings(head) for head in heads}) > 1:
            raise Refusal(f"layer {first.layer}: heads differ in scale or rotation")
        if not first.weights.masked and self.writer.roots.ar > 1:
            raise Refusal(f"layer {first.layer}: no causal mask between scores and Softmax")
        return self._write(heads, group, len(kvs), parts[-1].origin)

    def _write(self, heads: list[Head], group: int, n_kv: int, origin: ir.Value) -> Activation:
        head, builder, op = heads[0], self.writer.builder, self._op
        layer, dim = head.layer, head.dim
        query_scale = self._snapped(head.query_rotation.scale * head.joined_scale, dim)
        query = self._heads([h.query for h in heads], (n_kv, group, dim), layer, "q")
        query = self._scaled(query, query_scale, layer, "q")
        query = self._rotated(query, heads, "q", query_scale)
        transfer_encoding(query, _origins(heads, "query"), head.joined_scale)
        own = heads[::group]
        key_scale = self._snapped(head.key_rotation.scale, dim)
        key = self._heads([h.key for h in own], (n_kv, 1, dim), layer, "k")
        key = self._scaled(key, key_scale, layer, "k")
        key = self._rotated(key, own, "k", key_scale)
        new_key = self._new(interface.past_key(layer, "out"), [key], perm=[0, 1, 3, 2])
        name = interface.past_value(layer, "out")
        new_value = self._heads([h.value for h in own], (n_kv, 1, dim), layer, "v", name)
        self.outputs[name] = new_value
        for source in (h.value for h in own):
            first = source.rows.offset
            self.value_ranges.append((first, first + source.rows.size))
        past_key = self._cache(interface.past_key(layer, "in"), (n_kv, 1, dim, -1), own)
        past_value = self._cache(interface.past_value(layer, "in"), (n_kv, 1, -1, dim), own)
        for new, past in ((key, past_key), (new_key, past_key), (new_value, past_value)):
            transfer_encoding(new, [past])
        keys = inherit(op(layer, "Concat", [past_key, new_key], "keys", axis=3), past_key)
        values = inherit(op(layer, "Concat", [past_value, new_value], "values", axis=2), past_value)

        def step(
            kind: str, inputs: list[ir.Value], name: str, role: str, **attributes: object
        ) -> ir.Value:
            result = op(layer, kind, inputs, name, **attributes)
            return transfer_encoding(result, _origins(heads, role))

        scores = step("MatMul", [query, keys], "scores", "scores")
        if head.weights.bounded is not None:
            bounded = self._snapped(head.weights.bounded, dim)
            scores = self._scaled(scores, bounded, layer, "scores_to_bound")
            transfer_encoding(scores, _origins(heads, "to_bound"))
            scores = step("Tanh", [scores], "scores_tanh", "bounded")
        scale = self._snapped(head.weights.scale, dim)
        if scale != 1.0:
            factor = self.writer.factor(scale)
            scores = step("Mul", [scores, factor], "scaled_scores", "scaled")
        scores = step("Add", [scores, self._mask_of(head.weights)], "masked_scores", "masked")
        weights = step("Softmax", [scores], "attention_weights", "weights", axis=-1)
        attended = step("MatMul", [weights, values], "attended", "attended")
        by_token = op(layer, "Transpose", [attended], "attended_by_token", perm=[2, 0, 1, 3])
        inherit(by_token, attended)
        width = len(heads) * dim
        flat = op(layer, "Reshape", [by_token, builder.shape(-1, width)], "attended_flat")
        inherit(flat, attended)
        rows = self.writer.activation(flat, origin, width)
        inherit(flat, attended)
        return rows

    def _mask_of(self, scores: AttentionScores) -> ir.Value:
        """Return the mask that a host feeds, or that of a sliding window, written once."""
        if scores.window is None:
            return self.mask
        if self._windowed is None:
            mask = window_mask(self.writer.builder, self.mask, scores.window)
            self._windowed = (scores.window, mask)
        window, mask = self._windowed
        if window != scores.window:
            raise Refusal(f"has sliding windows of {window} and of {scores.window} tokens")
        return mask

    def _heads(
        self,
        sources: Sequence[Source],
        dims: tuple[int, int, int],
        layer: int,
        which: str,
        name: str | None = None,
    ) -> ir.Value:
        """Return [n_kv, group, AR, head_dim], normalised by head if the source does so."""
        n_kv, group, dim = dims
        norms = [
            source.rows
            for source in sources
            if isinstance(source.rows, NormedActivation) and source.rows.group == dim
        ]
        flat = self._flat([_below(source, dim) for source in sources], dim)
        shape = self.writer.builder.shape(-1, n_kv, group, dim)
        split = inherit(self._op(layer, "Reshape", [flat, shape], f"{which}_split"), flat)
        name = name or self.writer.name(f"layer_{layer}_{which}_heads")
        heads = self.writer.builder.op("Transpose", [split], name, perm=[1, 2, 0, 3])
        inherit(heads, flat)
        if not norms:
            return heads
        gains = {id(norm.gain) for norm in norms}
        if len(norms) != len(sources) or len(gains) > 1:
            raise Refusal(f"layer {layer}: heads are normalised differently")
        normed = self.writer.rms_norm(heads, norms[0], f"layer_{layer}_{which}_normed")
        return inherit(normed, norms[0].origin)

    def _flat(self, sources: Sequence[Source], dim: int) -> ir.Value:
        assert self.resolver is not None  # noqa: S101  (set when both are made)
        pieces: list[Piece] = []
        for source in sources:
            last = pieces[-1] if pieces else None
            if last is not None and last.rows is source.rows and last.stop == source.start:
                pieces[-1] = Piece(source.rows, last.start, source.start + dim)
            else:
                pieces.append(Piece(source.rows, source.start, source.start + dim))
        rows = self.resolver.join(pieces, pieces[0].rows.origin)
        return self.writer.value(rows, stacked=False)

    def _rotated(
        self, heads: ir.Value, specs: Sequence[Head], which: str, scale: float
    ) -> ir.Value:
        """Apply the rotary embedding to the first elements of each head."""
        layer, dim, name = specs[0].layer, specs[0].dim, f"layer_{specs[0].layer}_{which}"
        rotation = specs[0].query_rotation if which == "q" else specs[0].key_rotation
        width, unturned = rotation.width, []
        if not width:
            return heads
        turning = heads
        if width < dim:
            sizes = np.array([width, dim - width], dtype=np.int64)
            split = self.writer.builder.constant(f"split_{width}_{dim}", sizes)
            names = (self.writer.name(f"{name}_to_rotate"), self.writer.name(f"{name}_passed"))
            turning, *unturned = self.writer.builder.ops("Split", [heads, split], names, axis=-1)
            for value in (turning, *unturned):
                inherit(value, heads)
            turning = self._scaled(turning, rotation.stretch, layer, f"{which}_to_rotate")
            scale *= rotation.stretch
        names = (self.writer.name(f"{name}_first"), self.writer.name(f"{name}_second"))
        first, second = self.writer.builder.ops("Split", [turning], names, axis=-1, num_outputs=2)
        inherit(first, heads)
        inherit(second, heads)
        steps: dict[Step, ir.Value] = {
            (half, table): self._op(layer, "Mul", [value, turn], f"{which}_{half}_{table}")
            for half, value in (("first", first), ("second", second))
            for table, turn in (("cos", self.cos), ("sin", self.sin))
        }
        sums = {
            "first": ("Sub", [steps["first", "cos"], steps["second", "sin"]]),
            "second": ("Add", [steps["second", "cos"], steps["first", "sin"]]),
        }
        for half, (kind, terms) in sums.items():
            steps[half, "rotated"] = self._op(layer, kind, terms, f"{which}_{half}_rotated")
        halves = [steps[half, "rotated"] for half in sums]
        result = self._op(layer, "Concat", [*halves, *unturned], f"{which}_rotated", axis=-1)
        steps[WHOLE] = result
        sources = [spec.query if which == "q" else spec.key for spec in specs]
        below = [(source.rows, source.start) for source in sources]
        self.rotations_written.append(RotationSteps(below, width, dim, scale, steps))
        return result

    def _scaled(self, heads: ir.Value, scale: float, layer: int, which: str) -> ir.Value:
        if scale == 1.0:
            return heads
        product = self._op(layer, "Mul", [heads, self.writer.factor(scale)], f"{which}_scaled")
        return transfer_encoding(product, [heads], scale)

    def _snapped(self, scale: float, dim: int) -> float:
        """Return the exact number that a measured scale stands for."""
        for exact in (1.0, dim**-0.5):
            if abs(scale - exact) <= self.writer.roots.precision.snap * exact:
                return exact
        return scale

    def _new(self, name: str, inputs: list[ir.Value], perm: list[int]) -> ir.Value:
        self.outputs[name] = self.writer.builder.op("Transpose", inputs, name, perm=perm)
        return self.outputs[name]

    def _cache(self, name: str, dims: tuple[int, ...], heads: Sequence[Head]) -> ir.Value:
        value = _input(name)
        value.shape = ir.Shape([dim if dim > 0 else None for dim in dims])
        self.caches[name] = value
        which = "key_cache" if name.startswith("past_key") else "value_cache"
        return transfer_encoding(value, _origins(heads, which))

    def _op(
        self, layer: int, op_type: str, inputs: list[ir.Value], name: str, **attributes: object
    ) -> ir.Value:
        return self.writer.op(op_type, inputs, f"layer_{layer}_{name}", **attributes)


def _below(source: Source, dim: int) -> Source:
    """Return the input of a normalisation by head; other sources unchanged."""
    rows = source.rows
    if isinstance(rows, NormedActivation) and rows.group == dim:
        if source.start % dim:
            raise Refusal("normalises features across heads")
        return Source(rows.parent, source.start)
    return source


def _origins(heads: Sequence[Head], name: str) -> list[ir.Value]:
    """Return the counterparts in the source of a canonical value, head by head."""
    return [value for head in heads for which, value in head.origins if which == name]


def _settings(head: Head) -> tuple[object, ...]:
    """Return all that heads of one product of queries and keys must have in common."""
    query, key, scores = head.query_rotation, head.key_rotation, head.weights
    scales = (query.scale, query.stretch, key.scale, key.stretch, head.joined_scale, scores.scale)
    rounded = (f"{scale:.4g}" for scale in (*scales, scores.bounded or 0.0))
    return (*rounded, key.width, head.dim, scores.masked, scores.window)


def _input(name: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))
