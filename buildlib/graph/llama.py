"""Float ONNX of a Llama, Mistral or Qwen, with (AR, CL) only in the shapes of its inputs.

Projections are Gemm with transposed weights, because a checkpoint stores them that way: its bytes
are used in place. Query heads are grouped by the key/value head they share, [n_kv, group, AR,
head_dim], so keys and values are never repeated.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from buildlib.checkpoint.checkpoint import Checkpoint, expected_tensors
from buildlib.checkpoint.config import LlamaConfig
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.graph import interface
from buildlib.graph.builder import GraphBuilder
from buildlib.graph.files import save_model
from buildlib.graph.shape import GraphShape, check_sliding_window
from buildlib.graph.values import infer_shapes


def export_onnx(checkpoint: Checkpoint, shape: GraphShape, folder: Path) -> Path:
    """Write `folder/model.onnx`, float32, with the checkpoint's own files linked beside it."""
    model = build_llama(checkpoint, shape)
    infer_shapes(model)
    return save_model(model, folder / MODEL_FILE)


def build_llama(checkpoint: Checkpoint, shape: GraphShape) -> ir.Model:
    """Build the whole model: embedding, decoder layers, final norm and output projection.

    Raises:
        InvalidShapeError: the context is longer than attention reaches (`sliding_window`).
    """
    config = checkpoint.config
    check_sliding_window(shape, config.sliding_window)
    builder = GraphBuilder()
    inputs = {
        name: builder.input(
            name, ir.DataType.INT32 if name == interface.INPUT_IDS else ir.DataType.FLOAT, dims
        )
        for name, dims in interface.input_shapes(config, shape).items()
    }
    embedding = builder.weight(checkpoint.tensors["model.embed_tokens.weight"])
    hidden = builder.op("Gather", [embedding, inputs[interface.INPUT_IDS]], "embedding", axis=0)
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
    expected = expected_tensors(config)
    for layer in range(config.num_hidden_layers):
        decoder = _Layer(builder, checkpoint, inputs, layer, expected)
        hidden, new_key, new_value = decoder.build(hidden)
        outputs += [new_key, new_value]
    norm = _rms_norm(builder, checkpoint, "model.norm.weight", hidden, "final_norm")
    flat = builder.op("Reshape", [norm, builder.shape(-1, config.hidden_size)], "final_norm_flat")
    head = builder.weight(checkpoint.lm_head, "lm_head.weight")
    scores = builder.op("Gemm", [flat, head], "lm_head", transB=1)
    dims = builder.shape(1, -1, config.vocab_size)
    logits = builder.op("Reshape", [scores, dims], interface.LOGITS)
    return [logits, *outputs]


def _rms_norm(
    builder: GraphBuilder, checkpoint: Checkpoint, weight: str, value: ir.Value, name: str
) -> ir.Value:
    gain = builder.weight(checkpoint.tensors[weight])
    epsilon = checkpoint.config.rms_norm_eps
    return builder.op("RMSNormalization", [value, gain], name, axis=-1, epsilon=epsilon)


@dataclass(frozen=True)
class _Layer:
    """Builds one decoder layer; every value it makes is called `layer_{index}_...`.

    Attributes:
        expected: names of the tensors that the configuration asks for; a file may hold others.
    """

    builder: GraphBuilder
    checkpoint: Checkpoint
    inputs: dict[str, ir.Value]
    index: int
    expected: Collection[str]

    @property
    def config(self) -> LlamaConfig:
        return self.checkpoint.config

    def build(self, hidden: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Build a layer from [1, AR, hidden] to the same; return it with the new key and value."""
        config = self.config
        flat = self._normed(hidden, "input_layernorm", "attention_norm")
        attended, new_key, new_value = self._attention(flat)
        back = self.builder.shape(1, -1, config.hidden_size)
        projected = self._project(attended, "self_attn.o_proj")
        residual = self._op("Reshape", [projected, back], "attention_output")
        hidden = self._op("Add", [hidden, residual], "attention_residual")
        flat = self._normed(hidden, "post_attention_layernorm", "mlp_norm")
        residual = self._op("Reshape", [self._mlp(flat), back], "mlp_output")
        return self._op("Add", [hidden, residual], "output"), new_key, new_value

    def _attention(self, flat: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        config, op = self.config, self._op
        kv, group, dim = config.num_key_value_heads, config.group_size, config.head_dim
        scale = np.array(1.0 / math.sqrt(dim), dtype=np.float32)
        query = op(
            "Mul",
            [
                self._head_norm(self._heads(flat, "q", group), "q"),
                self.builder.constant("attention_scale", scale),
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
        masked = op("Add", [scores, self.inputs[interface.ATTENTION_MASK]], "masked_scores")
        weights = op("Softmax", [masked], "attention_weights", axis=-1)
        attended = op("MatMul", [weights, values], "attended")
        attended = op("Transpose", [attended], "attended_by_token", perm=[2, 0, 1, 3])
        dims = self.builder.shape(-1, kv * group * dim)
        return op("Reshape", [attended, dims], "attended_flat"), new_key, new_value

    def _heads(self, flat: ir.Value, which: str, group: int, name: str | None = None) -> ir.Value:
        """Project [AR, hidden] and split into [n_kv, group, AR, head_dim]."""
        config = self.config
        projected = self._project(flat, f"self_attn.{which}_proj")
        dims = self.builder.shape(-1, config.num_key_value_heads, group, config.head_dim)
        split = self._op("Reshape", [projected, dims], f"{which}_split")
        name = name or f"layer_{self.index}_{which}_heads"
        return self.builder.op("Transpose", [split], name, perm=[1, 2, 0, 3])

    def _head_norm(self, heads: ir.Value, which: str) -> ir.Value:
        """Normalise each head of [n_kv, group, AR, head_dim], if the model does."""
        if not self.config.qk_norm:
            return heads
        weight = f"model.layers.{self.index}.self_attn.{which}_norm.weight"
        name = f"layer_{self.index}_{which}_norm"
        return _rms_norm(self.builder, self.checkpoint, weight, heads, name)

    def _rotated(self, heads: ir.Value, which: str) -> ir.Value:
        """Apply the rotary position embedding to [n_kv, group, AR, head_dim]."""
        op = self._op
        cos, sin = self.inputs[interface.COS], self.inputs[interface.SIN]
        names = tuple(f"layer_{self.index}_{which}_{half}" for half in ("first", "second"))
        first, second = self.builder.ops("Split", [heads], names, axis=-1, num_outputs=2)
        first_cos = op("Mul", [first, cos], f"{which}_first_cos")
        second_sin = op("Mul", [second, sin], f"{which}_second_sin")
        second_cos = op("Mul", [second, cos], f"{which}_second_cos")
        first_sin = op("Mul", [first, sin], f"{which}_first_sin")
        halves = [
            op("Sub", [first_cos, second_sin], f"{which}_first_rotated"),
            op("Add", [second_cos, first_sin], f"{which}_second_rotated"),
        ]
        return op("Concat", halves, f"{which}_rotated", axis=-1)

    def _mlp(self, flat: ir.Value) -> ir.Value:
        """Build SwiGLU: down(silu(gate(x)) * up(x))."""
        op = self._op
        gate = self._project(flat, "mlp.gate_proj")
        gate = op("Mul", [gate, op("Sigmoid", [gate], "gate_sigmoid")], "gate_silu")
        product = op("Mul", [gate, self._project(flat, "mlp.up_proj")], "gated")
        return self._project(product, "mlp.down_proj")

    def _normed(self, hidden: ir.Value, weight: str, name: str) -> ir.Value:
        full = f"model.layers.{self.index}.{weight}.weight"
        normed = _rms_norm(
            self.builder, self.checkpoint, full, hidden, f"layer_{self.index}_{name}"
        )
        return self._op(
            "Reshape", [normed, self.builder.shape(-1, self.config.hidden_size)], f"{name}_flat"
        )

    def _project(self, flat: ir.Value, which: str) -> ir.Value:
        prefix = f"model.layers.{self.index}.{which}."
        names = (prefix + "weight", prefix + "bias")
        parameters = [
            self.builder.weight(self.checkpoint.tensors[name])
            for name in names
            if name in self.expected
        ]
        return self._op("Gemm", [flat, *parameters], which.rpartition(".")[2], transB=1)

    def _op(
        self, op_type: str, inputs: list[ir.Value], name: str, **attributes: object
    ) -> ir.Value:
        return self.builder.op(op_type, inputs, f"layer_{self.index}_{name}", **attributes)
