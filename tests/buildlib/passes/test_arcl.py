"""A model at another (AR, CL) computes the same, token by token."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.errors import BuildError, ModelFileError
from buildlib.graph.files import load_model, save_model
from buildlib.graph.shape import GraphShape
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.passes.arcl import convert_arcl
from tests.buildlib.passes.decoders import Kind, make_decoder, run_once


@pytest.fixture(scope="module")
def config(tiny: Path) -> DecoderConfig:
    return load_config(tiny / "config.json")


def test_its_own_shape_is_the_same_model_bit_by_bit(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "in", Kind(fused="Split", qk_norm=True))
    same = convert_arcl(model, GraphShape(4, 12), tmp_path / "out" / "model.onnx")
    expected = run_once(model)
    for name, values in run_once(same).items():
        np.testing.assert_array_equal(values, expected[name])


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ar=st.integers(1, 40), calls=st.integers(2, 100))
def test_any_shape_computes_the_same_token_by_token(
    tiny_export: Path,
    config: DecoderConfig,
    tmp_path_factory: pytest.TempPathFactory,
    ar: int,
    calls: int,
) -> None:
    shape = GraphShape(ar, ar * max(calls, -(-40 // ar) + 1))
    folder = tmp_path_factory.mktemp("arcl")
    other = convert_arcl(tiny_export / "model.onnx", shape, folder / "model.onnx")
    tokens = list(range(100, 140))
    runners = OnnxRunner(tiny_export / "model.onnx", n_threads=1), OnnxRunner(other, n_threads=1)
    with HostLoop({16: [runners[0]]}, config) as one, HostLoop({ar: [runners[1]]}, config) as two:
        expected, found = one.feed(tokens), two.feed(tokens)
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(found - expected) / scale).max() < 1e-5


@pytest.mark.parametrize(("ar", "cl"), [(0, 8), (8, 8), (16, 8), (3, 8), (-1, 4)])
def test_impossible_shapes_are_one_line(ar: int, cl: int) -> None:
    with pytest.raises(BuildError, match=r"^invalid shape") as caught:
        GraphShape(ar, cl)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["past_key_1_in", "past_value_0_in", "past_key_0_out"])
def test_caches_that_contradict_the_mask_are_refused(name: str, tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "in", Kind())
    proto = onnx.load(model, load_external_data=False)
    for value in (*proto.graph.input, *proto.graph.output):
        if value.name == name:
            for dim in value.type.tensor_type.shape.dim:
                dim.dim_value += dim.dim_value in {4, 8}
    model.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelFileError, match=rf"{name} is \[.*the mask says AR 4 and CL 12"):
        convert_arcl(model, GraphShape(2, 12), tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_a_mask_of_no_shape_is_refused(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "in", Kind())
    proto = onnx.load(model, load_external_data=False)
    mask = next(value for value in proto.graph.input if value.name == "attention_mask")
    mask.type.tensor_type.shape.dim[3].dim_value = 4
    model.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelFileError, match="CL must be larger than AR"):
        convert_arcl(model, GraphShape(2, 12), tmp_path / "out.onnx")


def test_an_ill_typed_model_is_an_error_of_one_line(tmp_path: Path) -> None:
    loaded = load_model(make_decoder(tmp_path / "in", Kind()))
    for value in loaded.graph.inputs:
        if value.name == "position_ids_cos":
            value.dtype = ir.DataType.INT32
    path = save_model(loaded, tmp_path / "in" / "typed.onnx")
    with pytest.raises(BuildError, match=r"^invalid shape .* operators do not fit") as caught:
        convert_arcl(path, GraphShape(2, 12), tmp_path / "out.onnx")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.onnx").exists()
