"""QDQ models: their ports, and the cost of quantization."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.tokenizer import load_tokenizer
from buildlib.encodings.files import load_encodings
from buildlib.encodings.model import Encodings
from buildlib.errors import EncodingsError, ModelFileError
from buildlib.graph.shape import GraphShape
from buildlib.numerics.evaluation import text_perplexity, text_samples
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner, read_ports
from buildlib.passes.arcl import convert_arcl
from buildlib.quantize.qdq import apply_encodings
from tests.buildlib.model_folders import export_checkpoint


@pytest.fixture(scope="module")
def quantized(path: Path, whole: Encodings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return apply_encodings(path, whole, tmp_path_factory.mktemp("qdq") / "model.qdq.onnx")


def test_ports_are_what_genie_feeds(quantized: Path) -> None:
    ports = read_ports(quantized)
    types = {name: port.dtype.name for name, port in {**ports.inputs, **ports.outputs}.items()}
    assert types.pop("input_ids") == "int32"
    for name, dtype in types.items():
        assert dtype == ("uint8" if name.startswith("past_") else "uint16")
    for layer in (0, 1):
        for kind in ("key", "value"):
            grid = ports.inputs[f"past_{kind}_{layer}_in"].grid
            assert grid is not None
            assert grid.zero_point == (128,)
            assert grid == ports.outputs[f"past_{kind}_{layer}_out"].grid


def test_layout_operators_have_one_grid_on_both_sides(quantized: Path) -> None:
    graph = onnx.load(quantized, load_external_data=False).graph
    makers = {output: node for node in graph.node for output in node.output}
    users = {name: node for node in graph.node for name in node.input}
    checked = 0
    for node in graph.node:
        if node.op_type not in {"Reshape", "Transpose", "Concat", "Split", "Gather"}:
            continue
        inputs = node.input if node.op_type == "Concat" else node.input[:1]
        grids = {tuple(makers[name].input[1:]) for name in inputs}
        for output in node.output:
            quantize = users[output]
            assert quantize.op_type == "QuantizeLinear"
            grids.add(tuple(quantize.input[1:]))
        assert len(grids) == 1, node.name
        checked += 1
    assert checked > 20


def test_weights_are_int8_by_channel_in_a_file_beside_the_model(quantized: Path) -> None:
    graph = onnx.load(quantized, load_external_data=False).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    weight = tensors["model.layers.0.mlp.up_proj.weight_q"]
    assert weight.data_type == onnx.TensorProto.INT8
    assert weight.external_data[0].value == "model.qdq.weights"
    dequantize = next(node for node in graph.node if node.input[0] == weight.name)
    assert tensors[dequantize.input[1]].dims == [72]
    assert [a.i for a in dequantize.attribute if a.name == "axis"] == [0]
    assert not any(t.data_type == onnx.TensorProto.FLOAT16 for t in graph.initializer)


def test_the_same_encodings_give_the_same_bytes(
    path: Path, whole: Encodings, quantized: Path, tmp_path: Path
) -> None:
    again = apply_encodings(path, whole, tmp_path / quantized.name)
    assert again.read_bytes() == quantized.read_bytes()
    weights = again.with_suffix(".weights")
    assert weights.read_bytes() == quantized.with_suffix(".weights").read_bytes()


def test_layout_operators_inherit_encodings(
    path: Path, whole: Encodings, quantized: Path, tmp_path: Path
) -> None:
    moved = ("_split", "_flat", "_heads", "keys", "values", "embedding", "_rotated")
    stays = ("first_rotated", "second_rotated")
    kept = [
        e for e in whole.activation_encodings
        if not e.name.endswith(moved) or "half_rotated" in e.name or e.name.endswith(stays)
    ]  # fmt: skip
    less = whole.model_copy(update={"activation_encodings": tuple(kept)})
    assert len(kept) < len(whole.activation_encodings) - 10
    out = apply_encodings(path, less, tmp_path / quantized.name)
    assert read_ports(out) == read_ports(quantized)


def test_missing_encodings_are_named(path: Path, whole: Encodings, tmp_path: Path) -> None:
    for field in ("activation_encodings", "param_encodings"):
        kept = tuple(e for e in getattr(whole, field) if "up_proj" not in e.name)
        with pytest.raises(EncodingsError, match="up_proj"):
            apply_encodings(path, whole.model_copy(update={field: kept}), tmp_path / "o.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_model_is_not_quantized_again(
    quantized: Path, whole: Encodings, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match="it is a float model"):
        apply_encodings(quantized, whole, tmp_path / "o.onnx")


def test_quantization_costs_less_than_a_percent(trained: Path, tmp_path: Path) -> None:
    text = (trained / "text" / "calibration.txt").read_text()
    shape = GraphShape(32, 192)
    folder = export_checkpoint(trained, text, tmp_path, shape, n_windows=3)
    model = folder / "model.onnx"
    encodings = load_encodings(folder / "model.encodings")
    one = convert_arcl(model, GraphShape(1, 192), folder / "ar1.onnx")
    quantized = [
        apply_encodings(path, encodings, folder / f"{path.stem}.qdq.onnx") for path in (model, one)
    ]
    config = load_config(folder / "config.json")
    held_out = (trained / "text" / "heldout.txt").read_text()
    tokens = (
        load_tokenizer(folder / "tokenizer.json").encode(held_out, add_special_tokens=False).ids
    )
    values = []
    for paths in ([model, one], quantized):
        chains = {ar: [OnnxRunner(p)] for ar, p in zip((32, 1), paths, strict=True)}
        with HostLoop(chains, config) as loop:
            windows = [tokens[start : start + 191] for start in (0,)]
            values.append(text_perplexity(loop, text_samples(windows, config.begin)))
            assert len(loop.greedy(tokens[:20], 5)) == 5
    assert values[1] == pytest.approx(values[0], rel=0.01)
    assert np.isfinite(values).all()


def test_scales_and_zero_points_stand_once(quantized: Path) -> None:
    """The QNN provider looks through all initializers for each input of each node."""
    graph = onnx.load(quantized, load_external_data=False).graph
    grids = [tensor for tensor in graph.initializer if re.match("(scale|zero_point)_", tensor.name)]
    contents = {(one.data_type, tuple(one.dims), one.raw_data) for one in grids}
    assert len(grids) == len(contents) > 10
    assert max(len(one.name) for one in grids) <= 15  # longer ones are copied at each look
