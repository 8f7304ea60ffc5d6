"""mllm's quantized graph in NumPy, from the tensors of its file alone.

Written after what its modules compute (`pymllm/mobile/backends/qualcomm/transformers/*`,
https://github.com/UbiquitousLearning/mllm, MIT licence), not after our canonical graph: joined
halves that turn, scores scaled after their product, and a mask that lowers them by 20.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plugins.mllm.config import Family, ModelConfig
from plugins.mllm.tensors import Tensor

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NumpyGraph:
    """The graph of a file; of the float model if the weights are given.

    Attributes:
        weights: of the checkpoint, in place of those of the file.
        rounds: whether activations are put on their grids.
    """

    tensors: Mapping[str, Tensor]
    model: ModelConfig
    family: Family
    weights: Mapping[str, npt.NDArray[np.generic]] | None = None
    rounds: bool = True

    def logits(self, ids: list[int]) -> Array:
        """Return the logits [n, vocab] after each token."""
        hidden = self._table("model.embed_tokens")[ids]
        for layer in range(self.model.num_hidden_layers):
            name = f"model.layers.{layer}"
            if layer:
                hidden = self._grid(f"{name}.input_layernorm_input_qdq", hidden)
            attended = self._attention(
                f"{name}.self_attn", self._norm(f"{name}.input_layernorm", hidden)
            )
            attended = self._grid(f"{name}.add_0_lhs_input_qdq", attended)
            hidden = self._grid(f"{name}.add_0_output_qdq", hidden + attended)
            mixed = self._mlp(f"{name}.mlp", self._norm(f"{name}.post_attention_layernorm", hidden))
            hidden = hidden + self._grid(f"{name}.add_1_lhs_input_qdq", mixed)
        hidden = self._norm("model.norm", self._grid("model.norm_input_qdq", hidden))
        scores = self._linear("lm_head", self._grid("lm_head_input_qdq", hidden))
        return self._grid("lm_head_output_qdq", scores)

    def _mlp(self, name: str, x: Array) -> Array:
        x = self._grid(f"{name}.up_proj_input_qdq", x)
        up = self._grid(f"{name}.up_proj_output_qdq", self._linear(f"{name}.up_proj", x))
        gate = self._grid(f"{name}.gate_proj_output_qdq", self._linear(f"{name}.gate_proj", x))
        sigmoid = self._grid(f"{name}.sigmoid_output_qdq", 1 / (1 + np.exp(-gate)))
        gate = self._grid(f"{name}.act_output_qdq", gate * sigmoid)
        mixed = self._grid(f"{name}.down_proj_input_qdq", gate * up)
        return self._linear(f"{name}.down_proj", mixed)

    def _attention(self, name: str, x: Array) -> Array:
        x = self._grid(f"{name}.q_proj_input_qdq", x)
        query, key = (self._turned(name, which, x) for which in "qk")
        if self.family != "qwen3":
            x = self._grid(f"{name}.v_proj_input_qdq", x)
        value = self._heads(self._linear(f"{name}.v_proj", x))
        value = self._grid(f"{name}.v_cast_to_int16_qdq", value)
        value = self._grid(f"{name}.v_cast_to_int8_qdq", value, bits=8)
        key = self._grid(f"{name}.k_cast_to_int8_qdq", key, bits=8)
        group = self.model.num_attention_heads // self.model.num_key_value_heads
        key, value = np.repeat(key, group, 0), np.repeat(value, group, 0)
        scores = self._grid(f"{name}.qk_matmul_output_qdq", query @ key.transpose(0, 2, 1))
        factor = self._grid(f"{name}.scaling_qdq", np.array(self.model.head_dim**-0.5))
        scores = self._grid(f"{name}.mul_0_output_qdq", scores * factor)
        least = self._grid(f"{name}.reduce_min_output_qdq", scores.min(-1, keepdims=True))
        below = self._grid(f"{name}.neg_20_qdq", np.array(-20.0))
        masked = self._grid(f"{name}.minus_0_output_qdq", least + below)
        seen = np.tri(x.shape[0], dtype=bool)
        scores = self._grid(f"{name}.where_attn_qdq", np.where(seen, scores, masked))
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        parts = self._grid(f"{name}.softmax_output_qdq", scores / scores.sum(-1, keepdims=True))
        attended = self._grid(f"{name}.attn_value_matmul_output_qdq", parts @ value)
        return self._linear(f"{name}.o_proj", attended.transpose(1, 0, 2).reshape(len(x), -1))

    def _turned(self, name: str, which: str, x: Array) -> Array:
        if self.family == "qwen3":
            rows = self._grid(
                f"{name}.{which}_norm_input_qdq", self._linear(f"{name}.{which}_proj", x)
            )
            heads = self._norm(f"{name}.{which}_norm", self._heads(rows))
            heads = self._grid(f"{name}.{which}_norm_output_qdq", heads)
        else:
            x = self._grid(f"{name}.{which}_proj_input_qdq", x)
            rows = self._linear(f"{name}.{which}_proj", x)
            heads = self._heads(self._grid(f"{name}.{which}_proj_output_qdq", rows))
        cos, sin = (self.rotations(kind)[: len(x)] for kind in ("cos", "sin"))
        half = self.model.head_dim // 2
        other = self._grid(f"{name}.{which}_rope_neg_half_qdq", -heads[..., half:])
        swapped = np.concatenate([other, heads[..., :half]], -1)
        one = self._grid(f"{name}.{which}_rope_mul_0_output_qdq", heads * cos)
        two = self._grid(f"{name}.{which}_rope_mul_1_output_qdq", swapped * sin)
        return self._grid(f"{name}.{which}_rope_add_0_output_qdq", one + two)

    def _heads(self, rows: Array) -> Array:
        return rows.reshape(len(rows), -1, self.model.head_dim).transpose(1, 0, 2)

    def rotations(self, which: str) -> Array:
        """Return the cosines or sines [CL, head_dim]."""
        if not self.rounds:
            angles = np.outer(
                np.arange(self.model.max_cache_length),
                self.model.rope_theta
                ** (-np.arange(0, self.model.head_dim, 2) / self.model.head_dim),
            )
            angles = np.concatenate([angles, angles], 1)
            return np.asarray(np.cos(angles) if which == "cos" else np.sin(angles))
        grid = f"model.{which}_embedding_input_qdq.fake_quant"
        return np.asarray(self._affine(f"model.mllm_max_{which}_embedding", grid)[0])

    def _norm(self, name: str, x: Array) -> Array:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.model.rms_norm_eps)
        return np.asarray(x / scale * self._table(name))

    def _table(self, name: str) -> Array:
        if self.weights is not None:
            return np.asarray(self.weights[f"{name}.weight"], np.float64)
        return self._affine(f"{name}.weight", name)

    def _affine(self, name: str, grid: str) -> Array:
        integers = self.tensors[name].load().astype(np.float64)
        return np.asarray((integers - self._one(f"{grid}.zero_point")) * self._one(f"{grid}.scale"))

    def _linear(self, name: str, x: Array) -> Array:
        weight = self.weight(name)
        bias = self.tensors.get(f"{name}.bias")
        return np.asarray(x @ weight.T + (0.0 if bias is None else bias.load()))

    def weight(self, name: str) -> Array:
        """Return a weight [out, in]."""
        if self.weights is not None:
            tied = "model.embed_tokens" if name == "lm_head" else name
            found = self.weights.get(f"{name}.weight", self.weights.get(f"{tied}.weight"))
            assert found is not None
            return np.asarray(found, np.float64)
        integers = self.tensors[f"{name}.weight"].load()[0, 0].T.astype(np.float64)
        if f"{name}.scale" in self.tensors:
            return np.asarray(integers * self.tensors[f"{name}.scale"].load().reshape(-1, 1))
        signed = np.where(integers > 7, integers - 16, integers)
        scale2 = self.tensors[f"{name}.scale2"].load().astype(np.float64)
        blocks = self.tensors[f"{name}.scale1"].load().reshape(len(scale2), -1)
        steps = np.repeat(blocks * scale2[:, None], signed.shape[1] // blocks.shape[1], 1)
        return np.asarray(signed * steps)

    def _grid(self, name: str, x: Array, bits: int = 16) -> Array:
        if not self.rounds:
            return x
        scale, zero = (self._one(f"{name}.fake_quant.{kind}") for kind in ("scale", "zero_point"))
        integers = np.clip(np.rint(x / scale) + zero, 0, (1 << bits) - 1)
        return np.asarray((integers - zero) * scale)

    def _one(self, name: str) -> float:
        return float(self.tensors[name].load().item())
