"""Float ONNX of a decoder, Llama or its like, with (AR, CL) only in the shapes of its inputs.

`build_decoder` makes the inputs and the embedding, `decode` all that follows, a `_Layer` at a time.

Projections are Gemm with transposed weights, because a checkpoint stores them that way: its bytes
are used in place. Query heads are grouped by the key/value head they share, [n_kv, group, AR,
head_dim], so keys and values are never repeated. `buildlib.checkpoint.architectures.Family` and the
configuration's keys say how relatives differ from Llama.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.checkpoint import Checkpoint, projections
from buildlib.checkpoint.config import CheckpointConfig
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.checkpoint.tensor_file import TensorRef
from buildlib.graph import interface
from buildlib.graph.builder import GraphBuilder
from buildlib.graph.files import save_model
from buildlib.graph.rope import rotation_length
from buildlib.graph.shape import GraphShape, check_context
from buildlib.graph.values import infer_shapes, static_shape

_END = (1 << 31) - 1  # of a Slice to the last entry
_SHORTEST = 1e-12  # a row no longer than this is not divided by its length


def export_onnx(checkpoint: Checkpoint, shape: GraphShape, folder: Path) -> Path:
    """Write `folder/model.onnx`, float32, with the checkpoint's own files linked beside it."""
    model = build_decoder(checkpoint, shape)
    infer_shapes(model)
    return save_model(model, folder / MODEL_FILE)


def build_decoder(checkpoint: Checkpoint, shape: GraphShape) -> ir.Model:
    """Build the whole model: embedding, decoder layers, final norm and output projection."""
    config = checkpoint.config
    check_context(shape, config.context_limit(windowed=True))
    builder = GraphBuilder()
    inputs = {
        name: builder.input(
            name, ir.DataType.INT32 if name == interface.INPUT_IDS else ir.DataType.FLOAT, dims
        )
        for name, dims in interface.input_shapes(config, shape).items()
    }
    embedding = builder.weight(checkpoint.tensors["model.embed_tokens.weight"])
    hidden = builder.op("Gather", [embedding, inputs[interface.INPUT_IDS]], "embedding", axis=0)
    hidden = _scaled(builder, hidden, config.embedding_multiplier, "embedding_scaled")
    outputs = decode(builder, checkpoint, inputs, hidden)
    return builder.model(list(inputs.values()), outputs, config.model_type)


def decode(
    builder: GraphBuilder, checkpoint: Checkpoint, inputs: dict[str, ir.Value], hidden: ir.Value
) -> list[ir.Value]:
    """Add decoder layers, final norm and output projection on hidden states [1, AR, hidden].

    Args:
        builder: gets the nodes.
        checkpoint: with the tensors of all of them.
        inputs: mask, rotary positions and caches by name.
        hidden: before the first layer.

    Returns:
        The outputs: logits, then new keys and values of each layer.
    """
    config = checkpoint.config
    outputs: list[ir.Value] = []
    inputs = dict(inputs)
    mask = inputs[interface.ATTENTION_MASK]
    window, length = config.sliding_window, (static_shape(mask) or (0,))[-1]
    if window is not None and length > window:
        inputs[interface.WINDOW_MASK] = window_mask(builder, mask, window)
    for layer in range(config.num_hidden_layers):
        decoder = _Layer(builder, checkpoint, inputs, layer)
        hidden, new_key, new_value = decoder.build(hidden)
        outputs += [new_key, new_value]
    norm = _norm(builder, checkpoint, "model.norm", hidden, "final_norm")
    return [_head(builder, checkpoint, norm), *outputs]


def window_mask(builder: GraphBuilder, mask: ir.Value, window: int) -> ir.Value:
    """Add the mask of layers that see a sliding window: `mask` with more slots hidden.

    Genie feeds no such mask, but slots stand in the order of positions. So a slot is in the window
    of a token if the token sees fewer than `window` slots after it, which a running sum counts.
    """
    op, factor = builder.op, builder.factor
    hidden = op("Mul", [mask, factor(-1.0 / interface.MASKED)], "window_hidden")
    visible = op("Add", [hidden, factor(1.0)], "window_seen")
    counts = op("CumSum", [visible, *builder.ints(3)], "window_counts")
    total = op("Slice", [counts, *builder.ints(-1, _END, 3)], "window_total")
    later = op("Sub", [total, counts], "window_later")
    near = op("Less", [later, factor(window - 0.5)], "window_near")
    near.dtype = ir.DataType.BOOL
    return op("Where", [near, mask, factor(interface.MASKED)], interface.WINDOW_MASK)


def _head(builder: GraphBuilder, checkpoint: Checkpoint, norm: ir.Value) -> ir.Value:
    """Add the output projection on [1, AR, hidden], with its factors and its bound."""
    config = checkpoint.config
    cap = config.final_logit_softcapping
    factor = config.logits_multiplier / (cap or 1.0)
    norm = _scaled(builder, norm, factor, "final_norm_scaled")
    flat = builder.op("Reshape", [norm, builder.shape(-1, config.hidden_size)], "final_norm_flat")
    head = builder.weight(checkpoint.lm_head, "lm_head.weight")
    scores = builder.op("Gemm", [flat, head], "lm_head", transB=1)
    if config.family.normalized_head:
        factors = builder.constant("lm_head_row_factors", _row_factors(checkpoint.lm_head))
        scores = builder.op("Mul", [scores, factors], "lm_head_normalized")
    if cap is not None:
        bounded = builder.op("Tanh", [scores], "lm_head_tanh")
        scores = _scaled(builder, bounded, cap, "lm_head_capped")
    dims = builder.shape(1, -1, config.vocab_size)
    return builder.op("Reshape", [scores, dims], interface.LOGITS)


def _row_factors(head: TensorRef) -> npt.NDArray[np.float32]:
    """Return 1 / length of each row of a matrix, some rows at a time."""
    rows = head.numpy()
    step = max(1, (1 << 24) // rows.shape[1])
    lengths = [
        np.linalg.norm(np.asarray(rows[start : start + step], np.float32), axis=1)
        for start in range(0, len(rows), step)
    ]
    return np.asarray(1.0 / np.maximum(np.concatenate(lengths), _SHORTEST), np.float32)


def _scaled(builder: GraphBuilder, value: ir.Value, factor: float, name: str) -> ir.Value:
    if factor == 1.0:
        return value
    return builder.op("Mul", [value, builder.factor(factor)], name)


def _norm(
    builder: GraphBuilder, checkpoint: Checkpoint, stem: str, value: ir.Value, name: str
) -> ir.Value:
    config = checkpoint.config
    gain = _gain(builder, checkpoint, f"{stem}.weight")
    settings = {"axis": -1, "epsilon": config.rms_norm_eps}
    if config.family.norm == "rms":
        return builder.op("RMSNormalization", [value, gain], name, **settings)
    bias = builder.weight(checkpoint.tensors[f"{stem}.bias"])
    return builder.op("LayerNormalization", [value, gain, bias], name, **settings)


def _gain(builder: GraphBuilder, checkpoint: Checkpoint, weight: str) -> ir.Value:
    """Return the gain of a norm; in the model file where it is not the stored one."""
    stored, offset = checkpoint.tensors[weight], checkpoint.config.family.gain_offset
    if not offset:
        return builder.weight(stored)
    return builder.constant(weight, np.asarray(stored.numpy(), np.float32) + np.float32(offset))


@dataclass(frozen=True)
class _Layer:
    """Builds one decoder layer; every value it makes is called `layer_{index}_...`."""

    builder: GraphBuilder
    checkpoint: Checkpoint
    inputs: dict[str, ir.Value]
    index: int

    @property
    def config(self) -> CheckpointConfig:
        return self.checkpoint.config

    def build(self, hidden: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Build a layer from [1, AR, hidden] to the same; return it with the new key and value."""
        norms = self.config.family.layer_norms
        flat = self._normed(hidden, norms.before_attention, "attention_norm")
        attended, new_key, new_value = self._attention(flat)
        projected = self._project(attended, "self_attn.o_proj")
        residual = self._residual(projected, norms.after_attention, "attention")
        hidden = self._op("Add", [hidden, residual], "attention_residual")
        if not self.config.use_parallel_residual:
            flat = self._normed(hidden, norms.before_mlp, "mlp_norm")
        residual = self._residual(self._mlp(flat), norms.after_mlp, "mlp")
        return self._op("Add", [hidden, residual], "output"), new_key, new_value

    def _residual(self, rows: ir.Value, norm: str | None, which: str) -> ir.Value:
        """Turn [AR, hidden] into the [1, AR, hidden] that is added to the residual stream."""
        config = self.config
        back = self.builder.shape(1, -1, config.hidden_size)
        residual = self._op("Reshape", [rows, back], f"{which}_output")
        if norm is not None:
            residual = self._norm(norm, residual, f"{which}_output_norm")
        name = f"layer_{self.index}_{which}_output_scaled"
        return _scaled(self.builder, residual, config.residual_multiplier, name)

    def _attention(self, flat: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        config, op = self.config, self._op
        kv, group, dim = config.num_key_value_heads, config.group_size, config.head_dim
        cap = config.attn_logit_softcapping
        factor = config.attention_scale / (cap or 1.0)
        if config.rotary_dim == dim:
            factor *= self._rotation_length**2
        scale = np.array(factor, dtype=np.float32)
        query = op(
            "Mul",
            [
                self._head_norm(self._heads(flat, "q", group), "q"),
                self.builder.constant(f"attention_scale_{factor:.9g}", scale),
            ],
            "q_scaled",
        )
        query = self._rotated(query, "q")
        key = self._rotated(self._head_norm(self._heads(flat, "k", 1), "k"), "k")
        new_key = self.builder.op(
            "Transpose", [key], interface.past_key(self.index, "out"), perm=[0, 1, 3, 2]
        )
        new_value = self._heads(flat, "v", 1, interface.past_value(self.index, "out"))
        past_key = self.inputs[interface.past_key(self.index, "in")]
        past_value = self.inputs[interface.past_value(self.index, "in")]
        keys = op("Concat", [past_key, new_key], "keys", axis=3)
        values = op("Concat", [past_value, new_value], "values", axis=2)
        scores = op("MatMul", [query, keys], "scores")
        if cap is not None:
            bounded = op("Tanh", [scores], "scores_tanh")
            scores = _scaled(self.builder, bounded, cap, f"layer_{self.index}_scores_capped")
        masked = op("Add", [scores, self._mask], "masked_scores")
        weights = op("Softmax", [masked], "attention_weights", axis=-1)
        attended = op("MatMul", [weights, values], "attended")
        attended = op("Transpose", [attended], "attended_by_token", perm=[2, 0, 1, 3])
        dims = self.builder.shape(-1, kv * group * dim)
        return op("Reshape", [attended, dims], "attended_flat"), new_key, new_value

    def _heads(self, flat: ir.Value, which: str, group: int, name: str | None = None) -> ir.Value:
        """Project [AR, hidden] and split into [n_kv, group, AR, head_dim]."""
        config = self.config
        projected = self._project(flat, f"self_attn.{which}_proj")
        if config.qk_norm == "all_heads" and which != "v":
            stem = self._qk_norm_tensor(which)
            projected = self._norm(stem, projected, f"{which}_norm")
        dims = self.builder.shape(-1, config.num_key_value_heads, group, config.head_dim)
        split = self._op("Reshape", [projected, dims], f"{which}_split")
        name = name or f"layer_{self.index}_{which}_heads"
        return self.builder.op("Transpose", [split], name, perm=[1, 2, 0, 3])

    def _qk_norm_tensor(self, which: str) -> str:
        return self.config.family.qk_norm_tensors["qk".index(which)]

    def _head_norm(self, heads: ir.Value, which: str) -> ir.Value:
        """Normalise each head of [n_kv, group, AR, head_dim], if the model does."""
        stem = self._qk_norm_tensor(which)
        match self.config.qk_norm:
            case "head":
                return self._norm(stem, heads, f"{which}_norm")
            case "each_head":
                return self._each_head_norm(stem, heads, which)
        return heads

    def _each_head_norm(self, stem: str, heads: ir.Value, which: str) -> ir.Value:
        """Normalise each head by LayerNormalization without bias, with a gain of its own.

        The compiler takes no LayerNormalization without bias, so its bias is zero.
        """
        config, prefix = self.config, f"model.layers.{self.index}.{stem}"
        kv, dim = config.num_key_value_heads, config.head_dim
        group = config.group_size if which == "q" else 1
        names = (f"{prefix}.norms.{head}.weight" for head in range(kv * group))
        gains = [np.asarray(self.checkpoint.tensors[name].numpy(), np.float32) for name in names]
        ones, zeros = (
            self.builder.constant(f"{name}_{dim}", np.full(dim, number, dtype=np.float32))
            for name, number in (("ones", 1.0), ("zeros", 0.0))
        )
        settings = {"axis": -1, "epsilon": config.rms_norm_eps}
        normed = self._op("LayerNormalization", [heads, ones, zeros], f"{which}_normed", **settings)
        gain = self.builder.constant(f"{prefix}.weight", np.stack(gains).reshape(kv, group, 1, dim))
        return self._op("Mul", [normed, gain], f"{which}_norm")

    def _rotated(self, heads: ir.Value, which: str) -> ir.Value:
        """Apply the rotary position embedding to [n_kv, group, AR, head_dim].

        Of models that turn neighbours the even dimensions come out before the odd ones: queries and
        keys alike, so that their products are the same.
        """
        if not self.config.has_rope(self.index):
            return heads
        op = self._op
        prefix = interface.LOCAL_PREFIX if self.config.has_local_rope(self.index) else ""
        cos, sin = (self.inputs[prefix + name] for name in (interface.COS, interface.SIN))
        first, second, *rest = self._halves(heads, which)
        if which == "q" and rest:  # else the scale of all scores has it
            length, layer = self._rotation_length**2, f"layer_{self.index}"
            first = _scaled(self.builder, first, length, f"{layer}_q_first_scaled")
            second = _scaled(self.builder, second, length, f"{layer}_q_second_scaled")
        first_cos = op("Mul", [first, cos], f"{which}_first_cos")
        second_sin = op("Mul", [second, sin], f"{which}_second_sin")
        second_cos = op("Mul", [second, cos], f"{which}_second_cos")
        first_sin = op("Mul", [first, sin], f"{which}_first_sin")
        halves = [
            op("Sub", [first_cos, second_sin], f"{which}_first_rotated"),
            op("Add", [second_cos, first_sin], f"{which}_second_rotated"),
        ]
        return op("Concat", [*halves, *rest], f"{which}_rotated", axis=-1)

    @property
    def _mask(self) -> ir.Value:
        whole = self.inputs[interface.ATTENTION_MASK]
        windowed = self.config.has_window(self.index)
        return self.inputs.get(interface.WINDOW_MASK, whole) if windowed else whole

    @property
    def _rotation_length(self) -> float:
        turned = self.config.has_rope(self.index) and not self.config.has_local_rope(self.index)
        return rotation_length(self.config) if turned else 1.0

    def _halves(self, heads: ir.Value, which: str) -> tuple[ir.Value, ...]:
        """Return the two halves that turn against each other, and the rest, if there is any."""
        dim, turned = self.config.head_dim, self.config.rotary_dim
        prefix = f"layer_{self.index}_{which}"
        if self.config.family.interleaved:
            pieces = {"first": (0, turned, 2), "second": (1, turned, 2)}
            pieces |= {"passed": (turned, dim, 1)} if turned < dim else {}
            return tuple(
                self.builder.op(
                    "Slice", [heads, *self.builder.ints(start, stop, -1, step)], f"{prefix}_{name}"
                )
                for name, (start, stop, step) in pieces.items()
            )
        names = (f"{prefix}_first", f"{prefix}_second", f"{prefix}_passed")
        if turned == dim:
            return self.builder.ops("Split", [heads], names[:2], axis=-1, num_outputs=2)
        sizes = np.array([turned // 2, turned // 2, dim - turned], dtype=np.int64)
        sizes_value = self.builder.constant(f"split_{turned}_of_{dim}", sizes)
        return self.builder.ops("Split", [heads, sizes_value], names, axis=-1)

    def _mlp(self, flat: ir.Value) -> ir.Value:
        """Build a gated MLP: down(activation(gate(x)) * up(x))."""
        gate = self._activation(self._project(flat, "mlp.gate_proj"))
        product = self._op("Mul", [gate, self._project(flat, "mlp.up_proj")], "gated")
        return self._project(product, "mlp.down_proj")

    def _activation(self, gate: ir.Value) -> ir.Value:
        match self.config.hidden_act:
            case "gelu":
                return self._op("Gelu", [gate], "gate_gelu")
            case "gelu_tanh":
                return self._op("Gelu", [gate], "gate_gelu", approximate="tanh")
        return self._op("Mul", [gate, self._op("Sigmoid", [gate], "gate_sigmoid")], "gate_silu")

    def _norm(self, stem: str, value: ir.Value, name: str) -> ir.Value:
        full = f"model.layers.{self.index}.{stem}"
        return _norm(self.builder, self.checkpoint, full, value, f"layer_{self.index}_{name}")

    def _normed(self, hidden: ir.Value, stem: str | None, name: str) -> ir.Value:
        """Return [AR, hidden] of [1, AR, hidden], normalised if the model has a norm there."""
        normed = hidden if stem is None else self._norm(stem, hidden, name)
        return self._op(
            "Reshape", [normed, self.builder.shape(-1, self.config.hidden_size)], f"{name}_flat"
        )

    def _project(self, flat: ir.Value, which: str) -> ir.Value:
        _, _, biased = projections(self.config)[which]
        stem = f"model.layers.{self.index}.{which}"
        names = [f"{stem}.weight", *([f"{stem}.bias"] if biased else [])]
        parameters = [self.builder.weight(self.checkpoint.tensors[name]) for name in names]
        return self._op("Gemm", [flat, *parameters], which.rpartition(".")[2], transB=1)

    def _op(
        self, op_type: str, inputs: list[ir.Value], name: str, **attributes: object
    ) -> ir.Value:
        return self.builder.op(op_type, inputs, f"layer_{self.index}_{name}", **attributes)
