"""Encodings for values without one."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.grid import activation_grid
from buildlib.encodings.model import Encoding, Encodings
from buildlib.errors import EncodingsError, InvalidOptionError
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import load_model
from buildlib.graph.shape import GraphShape
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner, read_ports
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.grids import check_shared_caches
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.recipe import (
    cache_bits,
    check_blocks,
    complete_encodings,
    matrix_uses,
    weight_format,
)

WINDOWS = [[int(t) for t in np.random.default_rng(n).integers(0, 300, 48)] for n in range(2)]
NONE = Encodings()


def without(encodings: Encodings, drop: Callable[[Encoding], bool]) -> Encodings:
    kept = {
        group: tuple(e for e in getattr(encodings, group) if not drop(e))
        for group in ("activation_encodings", "param_encodings")
    }
    return encodings.model_copy(update=kept)


def changed(encodings: Encodings, name: str, **update: object) -> Encodings:
    found = tuple(
        e.model_copy(update=update) if e.name == name else e for e in encodings.activation_encodings
    )
    return encodings.model_copy(update={"activation_encodings": found})


def test_complete_encodings_stay_unchanged(
    path: Path, config: DecoderConfig, whole: Encodings
) -> None:
    assert complete_encodings(path, whole, config).by_name() == whole.by_name()


def test_fixed_ranges_need_no_text(path: Path, config: DecoderConfig, whole: Encodings) -> None:
    def follows(encoding: Encoding) -> bool:
        name = encoding.name
        known = ("position_ids_cos", "probabilities", "norm.weight", "_flat")
        return any(part in name for part in known) or (name.endswith("_in") and "past" in name)

    less = without(whole, follows)
    assert len(less.by_name()) < len(whole.by_name()) - 8
    found = complete_encodings(path, less, config).by_name()
    assert set(found) == set(whole.by_name())
    for name, encoding in whole.by_name().items():
        assert found[name].bw == encoding.bw
        assert found[name].scale == pytest.approx(encoding.scale)
        assert found[name].offset == encoding.offset


def test_rotations_have_bounds(
    path: Path, config: DecoderConfig, whole: Encodings, tmp_path: Path
) -> None:
    less = without(whole, lambda e: "rotated" in e.name and "past" not in e.name)
    assert len(less.by_name()) < len(whole.by_name())
    found = complete_encodings(path, less, config)
    apply_encodings(path, found, tmp_path / "q.onnx")
    for name, encoding in found.by_name().items():
        wanted = whole.by_name()[name]
        if "rotated" in name and encoding.bw == 16:
            assert wanted.scale[0] * 0.99 < encoding.scale[0] < wanted.scale[0] * 4


def test_missing_ones_are_counted_and_named(
    path: Path, config: DecoderConfig, whole: Encodings
) -> None:
    less = without(whole, lambda e: "up_proj" in e.name or "o_proj" in e.name)
    with pytest.raises(EncodingsError, match=r"up_proj.*values of the model need one"):
        complete_encodings(path, less, config)
    less = without(whole, lambda e: "mlp.up_proj.weight" in e.name)
    with pytest.raises(EncodingsError, match=r"layers\.0\.mlp\.up_proj\.weight.*2 values"):
        complete_encodings(path, less, config)


def test_text_fills_in_only_missing_encodings(
    path: Path, config: DecoderConfig, whole: Encodings, tmp_path: Path
) -> None:
    less = without(whole, lambda e: "layers.1" in e.name or "layers.0.mlp" in e.name)
    assert 10 < len(less.by_name()) < len(whole.by_name()) - 10
    found = complete_encodings(path, less, config, WINDOWS).by_name()
    assert set(found) == set(whole.by_name())
    assert all(found[name] == encoding for name, encoding in less.by_name().items())


@pytest.mark.parametrize(
    "bits", [Bitwidths(), Bitwidths(8, 32, 4), Bitwidths(kv_bitwidth=16), Bitwidths(8, 32, 8, 16)]
)
def test_requested_bits_are_used(
    path: Path, config: DecoderConfig, bits: Bitwidths, tmp_path: Path
) -> None:
    found = complete_encodings(path, NONE, config, WINDOWS, bits)
    names = found.by_name()
    assert names["logits"].bw == bits.act_bitwidth
    kv_bits = bits.kv_bitwidth or 8
    for name in ("past_key_0_in", "past_value_1_out", "layer_1_keys", "layer_0_values"):
        assert (names[name].bw, names[name].offset) == (kv_bits, (-(1 << (kv_bits - 1)),)), name
    assert names["model.layers.0.mlp.up_proj.weight"].bw == bits.param_bitwidth
    quantized = apply_encodings(path, found, tmp_path / "q.onnx")
    assert read_ports(quantized).outputs["logits"].dtype == f"uint{bits.act_bitwidth}"
    assert read_ports(quantized).inputs["past_value_0_in"].dtype == (
        "uint8" if kv_bits == 8 else "int16"
    )
    with HostLoop({16: [OnnxRunner(quantized)]}, config) as loop:
        assert np.isfinite(loop.feed(WINDOWS[0][:16])).all()


def test_weights_are_in_blocks_where_their_inputs_are_whole_ones(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """By default; a size that was asked for is for all weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 112, "head_dim": 16, "num_attention_heads": 4}
    checkpoint = Checkpoint.load(make_checkpoint(tmp_path / "model", **sizes))
    path = export_onnx(checkpoint, GraphShape(16, 96), tmp_path)
    graph = load_model(path).graph
    bits = Bitwidths.from_options(QuantizationOptions(param_bitwidth=4))
    sizes_by_name = {use.name: weight_format(use, bits).block_size for use in matrix_uses(graph)}
    assert len(sizes_by_name) == 2 * 7 + 1
    for name, size in sizes_by_name.items():
        assert size == (None if "down_proj" in name else 32), name
    asked = QuantizationOptions(param_bitwidth=4, lpbq_block_size=32)
    with pytest.raises(InvalidOptionError, match=r"down_proj.* 112 inputs, which 32 does not"):
        check_blocks(matrix_uses(graph), (), Bitwidths.from_options(asked))
    wide = make_checkpoint(tmp_path / "wide", **{**sizes, "intermediate_size": 448})
    (tmp_path / "64").mkdir()
    graph = load_model(
        export_onnx(Checkpoint.load(wide), GraphShape(16, 96), tmp_path / "64")
    ).graph
    asked = QuantizationOptions(param_bitwidth=4, lpbq_block_size=64)
    with pytest.raises(InvalidOptionError, match=r"down_proj.* 448 inputs, .*emulator dies.* 32"):
        check_blocks(matrix_uses(graph), (), Bitwidths.from_options(asked))


@pytest.mark.parametrize("key", ["act_bitwidth", "bias_bitwidth", "param_bitwidth", "kv_bitwidth"])
def test_bits_that_cannot_be_built(key: str) -> None:
    with pytest.raises(InvalidOptionError, match=key):
        Bitwidths(**{**asdict(Bitwidths()), key: 12})


def test_contradictory_caches_are_refused_by_name(
    path: Path, config: DecoderConfig, whole: Encodings, tmp_path: Path
) -> None:
    scale = whole.by_name()["past_key_1_in"].scale
    for update in ({"scale": (2 * scale[0],)}, {"offset": (-3,)}, {"bw": 16, "offset": (-9,)}):
        wrong = changed(whole, "past_key_1_in", **update)
        for action in (
            lambda wrong=wrong: complete_encodings(path, wrong, config),
            lambda wrong=wrong: apply_encodings(path, wrong, tmp_path / "q.onnx"),
        ):
            with pytest.raises(EncodingsError, match=r"past_key_1_in.*past_key_1_out"):
                action()
    alike = changed(whole, "past_key_1_in", scale=(scale[0] * (1 + 1e-8),))
    apply_encodings(path, alike, tmp_path / "alike.onnx")


def test_given_caches_decide_the_bits_of_all(
    path: Path, config: DecoderConfig, whole: Encodings
) -> None:
    wide = complete_encodings(path, NONE, config, WINDOWS, Bitwidths(kv_bitwidth=16))
    kept = {"past_key_0_in", "past_key_0_out"}
    some = without(wide, lambda e: e.name not in kept)
    for asked in (None, 8):
        found = complete_encodings(path, some, config, WINDOWS, Bitwidths(kv_bitwidth=asked))
        assert cache_bits(found) == 16
        assert found.by_name()["past_key_0_in"] == wide.by_name()["past_key_0_in"]
    assert (cache_bits(whole), cache_bits(NONE)) == (8, None)


def test_masked_scores_have_a_grid_that_hidden_ones_do_not_widen(whole: Encodings) -> None:
    found = whole.by_name()
    layers = [name for name in found if name.endswith("_masked_scores")]
    spreads = [np.ptp(activation_grid(found[name]).ends) for name in layers]
    assert found["attention_mask"].scale[0] == pytest.approx(max(spreads) / 65535, rel=1e-3)
    scores, masked = (
        activation_grid(found[f"layer_0_{name}"]) for name in ("scores", "masked_scores")
    )
    ends = [
        float(grid.dequantize(np.array([0, 65535], np.uint16))[end])
        for grid in (scores, masked)
        for end in (0, 1)
    ]
    assert ends[2:] == pytest.approx([ends[0] - 100, ends[1]], abs=0.01)


def test_caches_of_two_widths_are_refused(
    path: Path, config: DecoderConfig, whole: Encodings
) -> None:
    """As Genie refuses their container: "Only one bitwidth permitted per cache group"."""
    mixed = whole
    for end in ("in", "out"):
        mixed = changed(mixed, f"past_value_1_{end}", bw=16, offset=(-(1 << 15),))
    less = without(mixed, lambda e: e.name == "layer_1_values")
    with pytest.raises(EncodingsError, match="past_value_1_in: it has 16 bits and past_key_0_in 8"):
        complete_encodings(path, less, config)


def test_models_that_share_caches_must_agree_on_their_grids(whole: Encodings) -> None:
    check_shared_caches({"the model": whole, "ar1": whole})
    wrong = changed(whole, "past_value_0_out", offset=(-3,))
    with pytest.raises(EncodingsError, match=r"past_value_0_out: ar1 .* than the model") as caught:
        check_shared_caches({"the model": whole, "ar1": wrong})
    assert "uint8" in str(caught.value)


def test_encodings_of_unknown_values_are_refused(
    path: Path, config: DecoderConfig, whole: Encodings
) -> None:
    extra = whole.activation_encodings[0].model_copy(update={"name": "nowhere"})
    more = (*whole.activation_encodings, extra)
    wrong = whole.model_copy(update={"activation_encodings": more})
    with pytest.raises(EncodingsError, match=r"nowhere.*no such tensor"):
        complete_encodings(path, wrong, config)
