"""Calibration segment by segment sees what calls of the whole model show."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.encodings.grid import activation_grid
from buildlib.encodings.model import Encodings, asymmetric_encoding
from buildlib.errors import BuildError, ModelFileError
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import load_model, save_model
from buildlib.graph.shape import GraphShape
from buildlib.numerics import segment_loop
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import Arrays, OnnxRunner
from buildlib.numerics.segment_loop import SegmentLoop
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.calibration import (
    Histogram,
    RangeEstimator,
    RangeObserver,
    beginnings,
    instrument_ranges,
    mse,
    observe_ranges,
    percentile,
    window_count,
    window_length,
)
from buildlib.quantize.options import RangeName
from buildlib.quantize.recipe import complete_encodings

SHAPE = GraphShape(8, 40)


def whole_model_ranges(model: Path, windows: list[list[int]], folder: Path) -> RangeObserver:
    """Ranges over calls that go through the whole model one after another."""
    ranges = RangeObserver()
    config = load_config(folder / "config.json")
    probed = instrument_ranges(model, model.with_name("probed.onnx"))
    with HostLoop({SHAPE.ar: [OnnxRunner(probed)]}, config, on_outputs=ranges.observe) as loop:
        for window in windows:
            loop.reset()
            loop.feed(window[: len(window) // SHAPE.ar * SHAPE.ar])
    return ranges


@given(data=st.data())
@settings(max_examples=3)
def test_ranges_equal_those_of_the_whole_model(
    data: st.DataObject,
    make_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    kind = data.draw(st.sampled_from(["llama", "qwen2", "qwen3"]))
    heads, kv_heads = data.draw(st.sampled_from([(2, 1), (4, 4), (6, 2)]))
    folder = make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        data.draw(st.sampled_from([np.float16, np.float32])),
        model_type=kind,
        num_hidden_layers=data.draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=data.draw(st.booleans()),
    )
    lengths = data.draw(st.lists(st.integers(8, 40), min_size=1, max_size=3))
    rng = np.random.default_rng(len(lengths))
    windows = [rng.integers(0, 300, length).tolist() for length in lengths]
    model = export_onnx(Checkpoint.load(folder), SHAPE, folder)
    told: list[tuple[int, int]] = []
    found = observe_ranges(
        model, load_config(folder / "config.json"), windows, lambda *now: told.append(now)
    ).ranges()
    expected = whole_model_ranges(model, windows, folder).ranges()
    if max(lengths) >= SHAPE.past:  # no shorter context holds them
        assert found == expected
    assert found.keys() == expected.keys()
    for name, limits in expected.items():
        assert found[name] == pytest.approx(limits, rel=1e-5, abs=1e-6), name
    assert told == [(n + 1, len(told)) for n in range(len(told))]
    assert {path.name for path in folder.iterdir()} <= {
        "config.json", "model.onnx", "model.safetensors", "probed.onnx", "tokenizer.json",
    }  # fmt: skip


def test_hidden_states_in_files_are_those_in_memory(
    path: Path, config: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = [list(range(32)), list(range(100, 148))]
    kinds, results = [], []
    for limit in (segment_loop._IN_MEMORY_BYTES, 0):
        monkeypatch.setattr(segment_loop, "_IN_MEMORY_BYTES", limit)
        with SegmentLoop(path, config, windows) as loop:
            hidden = loop.run(1, loop.run(0, None))
            assert hidden is not None
            assert hidden.shape == (loop.n_calls, 1, 16, 40)
            kinds.append(type(hidden))
            results.append(np.array(hidden))
    assert kinds == [np.ndarray, np.memmap]
    assert np.array_equal(results[0], results[1])


def test_a_segment_can_be_changed_on_the_way(path: Path, config: DecoderConfig) -> None:
    """Inputs of a projection can be seen, and its weight replaced; the next layer sees that."""
    seen: list[tuple[int, ...]] = []

    def show_input(model: ir.Model) -> None:
        (value,) = [v for n in model.graph for v in n.outputs if v.name == "layer_0_gated"]
        model.graph.outputs.append(value)

    def keep(outputs: Arrays, n_tokens: int) -> None:
        seen.append(outputs["layer_0_gated"].shape)
        assert n_tokens == 16

    def without_mlp(model: ir.Model) -> None:
        value = model.graph.initializers["model.layers.0.mlp.down_proj.weight"]
        zeros = np.zeros(value.shape.numpy(), np.float16)  # type: ignore[union-attr]
        value.const_value = ir.tensor(zeros, name=value.name)

    with SegmentLoop(path, config, [list(range(48))]) as loop:
        embedded = loop.run(0, None)
        after = loop.run(1, embedded, on_outputs=keep, change=show_input)
        changed = loop.run(1, embedded, change=without_mlp)
        assert loop.run(loop.n_segments - 1, after) is None
    assert seen == [(16, 72)] * 3
    assert after is not None
    assert changed is not None
    assert not np.allclose(after, changed)


def test_a_decode_graph_is_calibrated_in_calls_of_many_tokens(
    tiny: Path, config: DecoderConfig, tmp_path: Path
) -> None:
    windows = [list(range(1, 60))]
    ranges = []
    for shape in (GraphShape(1, 64), GraphShape(32, 64)):
        model = export_onnx(Checkpoint.load(tiny), shape, tmp_path / str(shape))
        with SegmentLoop(model, config, windows) as loop:
            assert loop.shape == GraphShape(32, 64)
            assert loop.n_calls == 1
        ranges.append(observe_ranges(model, config, windows).ranges())
    assert ranges[0] == ranges[1]


def test_texts_and_models_that_cannot_be_calibrated_are_refused(
    path: Path, config: DecoderConfig, tmp_path: Path
) -> None:
    for tokens, said in (([1, 2, 3], "at least 16"), ([300] * 16, "vocabulary")):
        with pytest.raises(BuildError, match=said):
            observe_ranges(path, config, [tokens])
    model = load_model(path)
    model.graph.outputs[:] = [v for v in model.graph.outputs if v.name != "logits"]
    broken = save_model(model, tmp_path / "model.onnx")
    with pytest.raises(ModelFileError, match="logits is missing"):
        observe_ranges(broken, config, [[1] * 16])


@pytest.mark.parametrize(
    ("ar", "cl", "length", "count"),
    [(32, 192, 192, 8), (128, 1024, 1024, 2), (128, 4096, 2048, 1), (4096, 8192, 4096, 1)],
)
def test_windows_are_as_long_as_the_context_up_to_2048_tokens(
    ar: int, cl: int, length: int, count: int
) -> None:
    assert window_length(GraphShape(ar, cl)) == length
    assert window_count(length) == count


def test_short_windows_begin_as_chats_and_texts_do() -> None:
    """A chat begins with the first special token of the text; turns within it are no beginning."""
    mark, end, text = 5000, 5001, list(range(2000))
    for place in (400, 1200):
        text[place : place + 12 : 4] = [mark, end, mark]
    special = frozenset({mark, end})
    windows = beginnings([text[:1024]], text, special, None, 32)
    assert [window[0] for window in windows[:2]] == [mark] * 2
    assert [window[1] for window in windows[:2]] == [401, 1201]
    assert [window[0] for window in windows[2:]] == [187, 561, 936, 1310, 1684]
    assert {len(window) for window in windows} == {128}
    assert [window[:2] for window in beginnings([text[:1024]], text, special, 7, 256)] == [
        [7, mark],
        [7, mark],
    ]
    assert beginnings([text[:256]] * 8, text[:400], special, None, 32) == []


@pytest.mark.parametrize(
    ("tokens", "length", "count"), [(512, 512, 1), (100, 128, 1), (2048, 1024, 2), (9000, 1024, 8)]
)
def test_as_many_tokens_calibrate_as_are_asked_for(tokens: int, length: int, count: int) -> None:
    shape = GraphShape(128, 1024)
    assert window_length(shape, tokens) == length
    assert window_count(length, tokens) == count


def histogram(values: np.ndarray) -> Histogram:
    found = Histogram(float(values.min()), float(values.max()))
    for part in np.array_split(values, 7):
        found.add(part)
    return found


def with_outliers() -> np.ndarray:
    values = np.random.default_rng(0).normal(size=100_000)
    values[:3] = 40.0, 35.0, -60.0
    return values


def test_percentiles_leave_out_one_value_in_ten_thousand() -> None:
    values = with_outliers()
    low, high = percentile(histogram(values), 8)
    assert -6.0 < low < -3.0
    assert 3.0 < high < 6.0
    assert 0.99 * 2e-4 * len(values) > ((values < low) | (values > high)).sum()


@pytest.mark.parametrize("bits", [8, 16])
def test_mse_has_the_least_error(bits: int) -> None:
    values = np.append(with_outliers(), np.full(10, 20.0))

    def error(limits: tuple[float, float]) -> float:
        grid = activation_grid(asymmetric_encoding("x", *limits, bits))
        return float(np.square(grid.dequantize(grid.quantize(values)) - values).mean())

    seen = histogram(values)
    least, whole = error(mse(seen, bits)), error((seen.low, seen.high))
    assert least <= min(whole, error(percentile(seen, bits))) * 1.02
    assert bits == 16 or least < 0.9 * whole


@pytest.mark.parametrize("estimate", [percentile, mse])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_values_have_a_range(estimate: RangeEstimator, value: float) -> None:
    low, high = estimate(histogram(np.full(5, value)), 8)
    assert low <= high
    assert asymmetric_encoding("x", low, high, 8).scale[0] > 0


def test_narrower_ranges_are_in_the_encodings(path: Path, config: DecoderConfig) -> None:
    windows = [np.random.default_rng(2).integers(0, 300, 48).tolist()]
    whole, *narrow_ones = (
        complete_encodings(path, Encodings(), config, windows, Bitwidths(8), ranges=name).by_name()
        for name in get_args(RangeName)
    )
    for narrow in narrow_ones:
        assert narrow.keys() == whole.keys()
        parts = [narrow[name].scale[0] / whole[name].scale[0] for name in whole]
        assert max(parts) <= 1.01
        assert min(parts) < 0.99
