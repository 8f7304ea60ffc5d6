"""A checkpoint quantized for mllm: W4A16 in blocks (LPBQ), with a cache of uint8."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import CheckpointConfig
from buildlib.checkpoint.tokenizer import text_bos, text_windows
from buildlib.encodings.grid import activation_grid
from buildlib.encodings.model import Encoding, Encodings, asymmetric_encoding
from buildlib.errors import InvalidOptionError, ModelFileError
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import load_model, tensor_array
from buildlib.graph.rope import rope_tables, rotation_length
from buildlib.graph.shape import GraphShape
from buildlib.quantize.bitwidths import Bitwidths, WeightFormat
from buildlib.quantize.calibration import Range, observe_ranges
from buildlib.quantize.optimization import optimize_weights
from buildlib.quantize.recipe import value_range
from buildlib.quantize.techniques.base import FloatModel
from buildlib.quantize.weight_grids import chunks, encode_steps, full_steps
from plugins.mllm.activations import SUFFIX, activations
from plugins.mllm.config import AotConfig, ModelConfig
from plugins.mllm.contents import EMBEDDING, ROTATIONS, Linear, head_bits, linears, norms
from plugins.mllm.tensors import Tensor, write_safetensors

Technique = Literal["none", "seqmse", "gptq", "gptaq"]
_BITS = 4
_LONGEST_CALL = 128


def quantize_checkpoint(
    folder: Path,
    model: ModelConfig,
    aot: AotConfig,
    text: str,
    out: Path,
    *,
    n_samples: int = 128,
    technique: Technique = "gptaq",
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Write the safetensors file of a quantized checkpoint, in mllm's names.

    Args:
        folder: in Hugging Face layout, with its `tokenizer.json`.
        model: the model's configuration; its `max_cache_length` is the length of windows of text,
            and that of the tables of rotations.
        aot: how to quantize; checked against `model` before.
        text: of the kind that the model was trained on.
        out: file to write.
        n_samples: windows of text, or as many as the text has.
        technique: that chooses the integers of weights, once keys and values are rescaled; `none`
            does neither, as mllm does.
        progress: gets the kind of work, the number of finished steps, and that of all steps.
    """
    checkpoint = Checkpoint.load(folder)
    check_model(checkpoint, model, aot)
    checkpoint.check_content()
    config, cl = checkpoint.config, model.max_cache_length
    ar = next(ar for ar in range(min(_LONGEST_CALL, cl - 1), 0, -1) if cl % ar == 0)
    tokenizer = checkpoint.tokenizer_path
    windows = text_windows(tokenizer, text, cl, text_bos(tokenizer), n_windows=n_samples)
    tell = progress or (lambda *_: None)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".quantize.") as scratch:
        export = Path(scratch) / "float"
        export.mkdir()
        head = (f"lm_head.weight={_BITS}",) if head_bits(aot) == _BITS else ()
        float_model = FloatModel(
            export_onnx(checkpoint, GraphShape(ar, cl), export),
            Encodings(),
            config,
            windows,
            Bitwidths(
                param_bitwidth=_BITS,
                lpbq_block_size=model.linear_block_size,
                mixed_precision=head,
                input_step=1,
            ),
            n_calibrating=len(windows),
        )
        for step in () if technique == "none" else ("scaling", technique):
            changed, on_layer = Path(scratch) / step, partial(tell, f"{step} of layer")
            changed.mkdir()
            float_model = optimize_weights(float_model, [step], changed, on_layer)
        ranges = float_model.ranges
        if ranges is None:
            on_window = partial(tell, "calibration of segment and window")
            ranges = observe_ranges(float_model.path, config, windows, on_window).ranges()
        write_safetensors(out, _tensors(_Weights(float_model, model, aot), ranges))


def check_model(checkpoint: Checkpoint, model: ModelConfig, aot: AotConfig) -> None:
    """Check that a checkpoint is the model of two configurations, and one that mllm can have."""
    config, family = checkpoint.config, aot.quant_recipe.builtin_llm_pass.model
    reason = next((why for why, present in _unsupported(config, model).items() if present), None)
    if reason is not None:
        raise ModelFileError(checkpoint.folder, reason)
    if config.model_type != family:
        reason = f"the configuration is of {family}, and {checkpoint.folder} a {config.model_type}"
        raise InvalidOptionError("quant_recipe.builtin_llm_pass.model", reason, ())
    for key in ModelConfig.model_fields:
        ours, theirs = getattr(config, key, None), getattr(model, key)
        # The number of positions, and the token that ends a text, are the user's choice.
        free = key in {"max_position_embeddings", "eos_token_id", "bos_token_id"}
        if key == "rope_scaling":  # keys of it have several spellings
            ours, theirs = (value is not None for value in (ours, theirs))
        if hasattr(config, key) and not free and theirs not in (None, ours):
            reason = f"the configuration has {theirs}, and config.json of the checkpoint {ours}"
            raise InvalidOptionError(key, reason, ())


def _unsupported(config: CheckpointConfig, model: ModelConfig) -> dict[str, bool]:
    window = config.sliding_window
    return {
        "mllm's graph has no bias of o_proj, gate_proj, up_proj or down_proj": (
            config.mlp_bias or config.attention_out_bias
        ),
        f"mllm's graph has no sliding window, and it has one of {window} tokens": (
            window is not None and window < model.max_cache_length
        ),
        "mllm's tables of rotations have no such scaling (rope_scaling)": (
            rotation_length(config) != 1.0 or config.rotary_dim != config.head_dim
        ),
        f"mllm's graph has SiLU, not {config.hidden_act}": config.hidden_act != "silu",
    }


@dataclass(frozen=True)
class _Weights:
    """Weights of a float model, and how they are quantized."""

    model: FloatModel
    config: ModelConfig
    aot: AotConfig

    @cached_property
    def constants(self) -> Mapping[str, ir.Value]:
        return load_model(self.model.path).graph.initializers

    @cached_property
    def encodings(self) -> Mapping[str, Encoding]:
        return self.model.encodings.by_name()

    def array(self, name: str) -> npt.NDArray[Any]:
        source = self.constants[name].const_value
        if source is None:
            msg = f"{name} has no values"
            raise AssertionError(msg)
        return tensor_array(source)

    def encoding(self, one: Linear) -> Encoding:
        """Return the steps of a linear layer: those of the technique, or of whole ranges."""
        name = f"{one.name}.weight"
        if name in self.encodings:
            return self.encodings[name]
        bits = head_bits(self.aot) if one.name == "lm_head" else _BITS
        fmt = WeightFormat(bits, self.config.linear_block_size if bits == _BITS else None)
        steps = np.concatenate([full_steps(rows, fmt) for rows in chunks(self.array(name))])
        return encode_steps(name, steps, fmt, axis=0)


def _tensors(weights: _Weights, ranges: Mapping[str, Range]) -> Iterator[Tensor]:
    """Yield all tensors of the file; each computes its values when it is written."""
    for one in linears(weights.config):
        yield from _linear(weights, one)
    for name in (*(name for name, _ in norms(weights.config, weights.aot)), EMBEDDING):
        yield from _table(name, weights.array(f"{name}.weight"))
    grids = {}
    for activation in activations(weights.config, weights.aot.quant_recipe.builtin_llm_pass.model):
        grids[activation.name] = activation.encoding(ranges)
        yield from _grid(activation.name + SUFFIX, grids[activation.name])
    cl = weights.config.max_cache_length
    for which, table in zip(("cos", "sin"), rope_tables(weights.model.config, cl), strict=True):
        values = np.concatenate([table, table], axis=1)[None]
        grid = activation_grid(grids[f"model.{which}_embedding_input_qdq"])
        yield Tensor.of(ROTATIONS[which], grid.quantize(values))


def _linear(weights: _Weights, one: Linear) -> Iterator[Tensor]:
    array, encoding = weights.array(f"{one.name}.weight"), weights.encoding(one)
    scale = np.array(encoding.scale, np.float32)
    shape = (1, 1, one.inputs, one.outputs)
    bits = encoding.compressed_bw or encoding.bw
    factors = np.frombuffer(encoding.per_block_int_scale or b"\1" * one.outputs, np.uint8)
    steps = factors.reshape(one.outputs, -1) * scale[:, None]
    dtype = "int16" if bits > 8 else "int8"
    load = partial(_integers, array, steps, bits, dtype)
    yield Tensor.computed(f"{one.name}.weight", dtype, shape, load)
    if one.bias:
        yield Tensor.of(f"{one.name}.bias", weights.array(f"{one.name}.bias").astype(np.float32))
    if encoding.block_size is not None:
        yield Tensor.of(f"{one.name}.scale1", factors)
        yield Tensor.of(f"{one.name}.scale2", scale)
        return
    channels = scale.reshape(1, 1, 1, -1)
    yield Tensor.of(f"{one.name}.scale", channels)
    yield Tensor.of(f"{one.name}.zero_point", np.zeros(channels.shape, np.int32))


def _integers(
    array: npt.NDArray[Any], steps: npt.NDArray[np.float32], bits: int, dtype: str
) -> npt.NDArray[Any]:
    """Return weights `[out, in]` as integers `[in, out]`; of 4 bits the low half of a byte."""
    half, stop = 1 << (bits - 1), 0
    integers = np.empty(array.shape[::-1], dtype)
    for rows in chunks(array):
        start, stop = stop, stop + len(rows)
        step = steps[start:stop, :, None]
        blocks = np.rint(rows.reshape(len(rows), step.shape[1], -1) / step)
        whole = np.clip(blocks, -half, half - 1).reshape(rows.shape).astype(dtype)
        integers[:, start:stop] = (whole & 0x0F if bits == _BITS else whole).T
    return integers


def _table(name: str, array: npt.NDArray[Any]) -> Iterator[Tensor]:
    """Yield an embedding or the gain of a norm, uint16 on one grid."""
    encoding = asymmetric_encoding(name, *value_range(name, array), 16)
    grid = activation_grid(encoding)

    def load() -> npt.NDArray[Any]:
        return np.concatenate([grid.quantize(rows) for rows in chunks(array)])

    yield Tensor.computed(f"{name}.weight", "uint16", array.shape, load)
    yield from _grid(name, encoding)


def _grid(name: str, encoding: Encoding) -> Sequence[Tensor]:
    scale = np.array(encoding.scale, np.float32)
    zero_point = -np.array(encoding.offset, np.int32)
    return Tensor.of(f"{name}.scale", scale), Tensor.of(f"{name}.zero_point", zero_point)
