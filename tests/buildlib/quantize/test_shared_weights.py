"""Integer weights: written once, shared by the models of every AR."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from buildlib.encodings.files import load_encodings
from buildlib.encodings.grid import Grid, weight_grid
from buildlib.errors import EncodingsError, ModelFileError
from buildlib.graph.shape import GraphShape
from buildlib.numerics.runners import OnnxRunner, read_ports
from buildlib.passes.arcl import convert_arcl
from buildlib.quantize.qdq import apply_encodings, quantize_weights
from buildlib.quantize.weight_file import WeightFile, index_path, pack_int4
from buildlib.quantize.weight_grids import lpbq_encoding, per_channel_encoding
from tests.buildlib.onnx_models import model_of

ARS = (16, 1)
Reals = npt.NDArray[Any]


@pytest.fixture(scope="module")
def parts(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("parts")
    return {
        ar: convert_arcl(
            tiny_export / "model.onnx", GraphShape(ar, 96), folder / f"ar{ar}_cl96_1_of_1.onnx"
        )
        for ar in ARS
    }


@pytest.fixture(scope="module")
def weights(parts: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_weights(parts[16], tmp_path_factory.mktemp("weights") / "1_of_1.weights")


def test_all_ars_refer_to_one_file(parts: dict[int, Path], weights: Path, tmp_path: Path) -> None:
    for ar, part in parts.items():
        encodings = load_encodings(part.with_suffix(".encodings"))
        folder = tmp_path / f"ar{ar}"
        qdq = apply_encodings(part, encodings, folder / "model.qdq.onnx", weights)
        assert sorted(p.name for p in folder.iterdir()) == ["1_of_1.weights", "model.qdq.onnx"]
        assert (folder / weights.name).samefile(weights)
        alone = apply_encodings(part, encodings, tmp_path / f"alone{ar}" / "model.qdq.onnx")
        assert read_ports(alone) == read_ports(qdq)
        rng = np.random.default_rng(ar)
        feeds = {
            name: rng.integers(0, 200, port.shape).astype(port.dtype)
            for name, port in read_ports(qdq).inputs.items()
        }
        expected, found = (OnnxRunner(path).run(feeds) for path in (alone, qdq))
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)


def test_the_same_weights_give_the_same_bytes(
    parts: dict[int, Path], weights: Path, tmp_path: Path
) -> None:
    again = quantize_weights(parts[1], tmp_path / "again.weights")
    assert again.read_bytes() == weights.read_bytes()
    assert index_path(again).read_bytes() == index_path(weights).read_bytes()


def test_another_grid_is_refused(parts: dict[int, Path], weights: Path, tmp_path: Path) -> None:
    encodings = load_encodings(parts[1].with_suffix(".encodings"))
    params = list(encodings.param_encodings)
    number = next(i for i, e in enumerate(params) if "up_proj" in e.name)
    doubled = tuple(2.0 * scale for scale in params[number].scale)
    params[number] = params[number].model_copy(update={"scale": doubled})
    changed = encodings.model_copy(update={"param_encodings": tuple(params)})
    with pytest.raises(EncodingsError, match=r"up_proj.*on another grid"):
        apply_encodings(parts[1], changed, tmp_path / "o.onnx", weights)
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_file_is_refused(parts: dict[int, Path], weights: Path, tmp_path: Path) -> None:
    encodings = load_encodings(parts[1].with_suffix(".encodings"))
    copy = tmp_path / weights.name
    copy.write_bytes(weights.read_bytes()[:-1])
    index = json.loads(index_path(weights).read_text())
    for text, said in (
        (json.dumps(index), "size"),
        (json.dumps(index | {"version": 9}), "version 9"),
        (json.dumps(index | {"tensors": [{}]}), "cannot be read"),
        ("{", "cannot be read"),
    ):
        index_path(copy).write_text(text)
        with pytest.raises(ModelFileError, match=said):
            apply_encodings(parts[1], encodings, tmp_path / "o.onnx", copy)
    index_path(copy).unlink()
    with pytest.raises(ModelFileError, match="No such file"):
        apply_encodings(parts[1], encodings, tmp_path / "o.onnx", copy)


def test_a_failure_leaves_nothing(parts: dict[int, Path], tmp_path: Path) -> None:
    encodings = load_encodings(parts[1].with_suffix(".encodings"))
    none = encodings.model_copy(update={"param_encodings": ()})
    with pytest.raises(EncodingsError, match="need one and have none"):
        quantize_weights(parts[1], tmp_path / "1_of_1.weights", none)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    axis=st.integers(0, 1),
    kind=st.sampled_from(["int4", "int8", "int16", "uint16", "lpbq"]),
    transposed=st.booleans(),
    dtype=st.sampled_from([np.float32, np.float16]),
)
def test_stored_integers_equal_those_of_onnx_runtime(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    axis: int,
    kind: str,
    transposed: bool,
    dtype: type[np.float32 | np.float16],
) -> None:
    folder = tmp_path_factory.mktemp("stored")
    rng = np.random.default_rng(seed)
    shape = tuple(16 * int(n) for n in rng.integers(1, 5, 2))
    values = rng.normal(size=shape).astype(dtype)
    if kind == "lpbq":
        grid = weight_grid(lpbq_encoding("w", values, axis, 16))
    elif kind == "uint16":
        grid = Grid(np.dtype(np.uint16), (1e-4,), (32000,))
    else:
        grid = weight_grid(per_channel_encoding("w", values, axis, int(kind[3:])))
    stored_axis = 1 - axis if transposed else axis
    with WeightFile(folder / "w.weights") as file:
        file.weight("w", ir.tensor(values), grid, stored_axis, transposed=transposed)
        file.finish()
    integers = grid.quantize(values, axis)
    laid = np.ascontiguousarray(integers.T if transposed else integers).reshape(-1)
    expected = pack_int4(laid.astype(np.int8).view(np.uint8)) if grid.bits == 4 else laid
    assert (folder / "w.weights").read_bytes() == expected.tobytes()
    reals = grid.dequantize(integers, axis)
    np.testing.assert_array_equal(reals, by_onnx_runtime(values, grid, axis))


def by_onnx_runtime(values: Reals, grid: Grid, axis: int) -> Reals:
    """QuantizeLinear and DequantizeLinear of values on a grid."""
    layout = grid.layout(values.shape, axis)
    n_channels = values.shape[axis]
    scale = np.array(grid.scale, np.float32)
    attributes = {"axis": axis}
    if grid.block_size is not None:
        factors = np.frombuffer(grid.block_scale, np.uint8).reshape(n_channels, -1)
        scale = factors.astype(np.float32) * scale[:, None]
        scale = scale if axis == 0 else np.ascontiguousarray(scale.T)
        attributes = {"axis": 1 - axis, "block_size": grid.block_size}
    elif len(scale) == 1:
        scale = scale.reshape(())
    zero = np.full(scale.shape, grid.zero_point[0]).astype(grid.dtype)
    assert layout.zero.min() == layout.zero.max()
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    for node in nodes:
        for key, value in attributes.items():
            node.attribute.append(helper.make_attribute(key, value))
    x, y = ({name: (np.float32, values.shape)} for name in "xy")
    model = model_of(nodes, x, y, {"scale": scale, "zero": zero})
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    found: Reals = session.run(None, {"x": values.astype(np.float32)})[0]
    return found
