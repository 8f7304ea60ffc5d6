"""Grids of activations in mllm's graphs, from ranges that our canonical graph shows on text.

Names are those of modules in `pymllm/mobile/backends/qualcomm/transformers/*/modeling_*.py`
(https://github.com/UbiquitousLearning/mllm, MIT licence), which its C++ models look up. The same
table serves the way back, from a file to encodings of our graph: `ActivationGrid.values` of those
that are `own`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from buildlib.encodings.model import Encoding, asymmetric_encoding, symmetric_encoding
from buildlib.graph import interface
from buildlib.quantize.calibration import Range
from plugins.mllm.config import Family, ModelConfig

SUFFIX = ".fake_quant"
"""Between the name of an activation and its `.scale` and `.zero_point`."""
_BELOW = 20.0
"""Masked scores are the least score of their row less this."""
_SIGMOID = (0.0, 65535 / 65536)


@dataclass(frozen=True)
class ActivationGrid:
    """One grid of mllm's graph.

    Attributes:
        name: of mllm's module.
        values: of our canonical graph that it covers.
        fixed: range that needs no text.
        factor: by which our values are larger than mllm's.
        mirrored: covers the negated values, too.
        cache: uint8 around 128; others are uint16.
        below: by which the range begins lower.
        own: whether our values lie on this very grid, times `factor`.
    """

    name: str
    values: tuple[str, ...] = ()
    fixed: Range | None = None
    factor: float = 1.0
    mirrored: bool = False
    cache: bool = False
    below: float = 0.0
    own: bool = True

    def encoding(self, ranges: Mapping[str, Range]) -> Encoding:
        """Return the grid as mllm's graph has it.

        Args:
            ranges: smallest and largest value of all `values`, unless the range is fixed.
        """
        bounds = [self.fixed] if self.fixed else [ranges[value] for value in self.values]
        low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
        low, high = low / self.factor - self.below, high / self.factor
        if self.cache:
            return symmetric_encoding(self.name, max(-low, high), 8)
        if self.mirrored:
            low, high = min(low, -high), max(high, -low)
        return asymmetric_encoding(self.name, low, high, 16)


def activations(model: ModelConfig, family: Family) -> Iterator[ActivationGrid]:
    """Yield all activations of a model, in the order in which it computes them."""
    last = model.num_hidden_layers - 1
    yield ActivationGrid("model.sin_embedding_input_qdq", (interface.SIN,), (-1.0, 1.0))
    yield ActivationGrid("model.cos_embedding_input_qdq", (interface.COS,), (-1.0, 1.0))
    for layer in range(model.num_hidden_layers):
        module, ours = f"model.layers.{layer}", f"layer_{layer}"
        if layer:
            before = (f"layer_{layer - 1}_output",)
            yield ActivationGrid(f"{module}.input_layernorm_input_qdq", before)
        yield from _attention(f"{module}.self_attn", layer, model.head_dim**-0.5, family)
        yield ActivationGrid(f"{module}.add_0_lhs_input_qdq", (f"{ours}_o_proj",))
        yield ActivationGrid(f"{module}.add_0_output_qdq", (f"{ours}_attention_residual",))
        yield from _mlp(f"{module}.mlp", ours)
        yield ActivationGrid(f"{module}.add_1_lhs_input_qdq", (f"{ours}_down_proj",))
    yield ActivationGrid("model.norm_input_qdq", (f"layer_{last}_output",))
    yield ActivationGrid("lm_head_input_qdq", ("final_norm",))
    yield ActivationGrid("lm_head_output_qdq", ("lm_head",))


def _attention(module: str, layer: int, scale: float, family: Family) -> Iterator[ActivationGrid]:
    ours = f"layer_{layer}"
    normed, scores = (f"{ours}_attention_norm",), (f"{ours}_scores",)
    yield ActivationGrid(f"{module}.q_proj_input_qdq", normed)
    if family != "qwen3":
        yield ActivationGrid(f"{module}.k_proj_input_qdq", normed, own=False)
        yield ActivationGrid(f"{module}.v_proj_input_qdq", normed, own=False)
    for which, factor in (("q", scale), ("k", 1.0)):
        projected = f"{ours}_{which}_proj"
        if family == "qwen3":
            yield ActivationGrid(f"{module}.{which}_norm_input_qdq", (projected,))
            heads, name = f"{ours}_{which}_norm", "norm_output_qdq"
        else:
            heads, name = projected, "proj_output_qdq"
        # One grid for x and -x: QNN joins (-x2, x1) without a new one.
        yield ActivationGrid(f"{module}.{which}_{name}", (heads,), mirrored=True)
        yield ActivationGrid(
            f"{module}.{which}_rope_neg_half_qdq", (heads,), mirrored=True, own=False
        )
        stem, grid = f"{ours}_{which}", f"{module}.{which}_rope"
        cos = (f"{stem}_first_cos", f"{stem}_second_cos")
        sin = (f"{stem}_first_sin", f"{stem}_second_sin")
        turned = (f"{stem}_first_rotated", f"{stem}_second_rotated")
        yield ActivationGrid(f"{grid}_mul_0_output_qdq", cos, factor=factor)
        yield ActivationGrid(f"{grid}_mul_1_output_qdq", sin, factor=factor, mirrored=True)
        yield ActivationGrid(f"{grid}_add_0_output_qdq", turned, factor=factor)
    keys, values = (interface.past_key(layer, "out"),), (interface.past_value(layer, "out"),)
    yield ActivationGrid(f"{module}.k_cast_to_int8_qdq", keys, cache=True)
    yield ActivationGrid(f"{module}.v_cast_to_int16_qdq", (f"{ours}_v_proj",))
    yield ActivationGrid(f"{module}.v_cast_to_int8_qdq", values, cache=True)
    yield ActivationGrid(f"{module}.qk_matmul_output_qdq", scores, factor=scale, own=False)
    yield ActivationGrid(f"{module}.scaling_qdq", fixed=(0.0, scale))
    yield ActivationGrid(f"{module}.mul_0_output_qdq", scores)
    yield ActivationGrid(f"{module}.reduce_min_output_qdq", scores, own=False)
    yield ActivationGrid(f"{module}.neg_20_qdq", fixed=(-_BELOW, 0.0))
    yield ActivationGrid(f"{module}.minus_0_output_qdq", scores, below=_BELOW, own=False)
    yield ActivationGrid(f"{module}.where_attn_qdq", scores, below=_BELOW, own=False)
    weights = (f"{ours}_attention_weights",)
    yield ActivationGrid(f"{module}.softmax_output_qdq", weights, (0.0, 1.0))
    yield ActivationGrid(f"{module}.attn_value_matmul_output_qdq", (f"{ours}_attended",))


def _mlp(module: str, ours: str) -> Iterator[ActivationGrid]:
    yield ActivationGrid(f"{module}.up_proj_input_qdq", (f"{ours}_mlp_norm",))
    yield ActivationGrid(f"{module}.up_proj_output_qdq", (f"{ours}_up_proj",))
    yield ActivationGrid(f"{module}.gate_proj_output_qdq", (f"{ours}_gate_proj",))
    yield ActivationGrid(f"{module}.sigmoid_output_qdq", (f"{ours}_gate_sigmoid",), _SIGMOID)
    yield ActivationGrid(f"{module}.act_output_qdq", (f"{ours}_gate_silu",))
    yield ActivationGrid(f"{module}.down_proj_input_qdq", (f"{ours}_gated",))
