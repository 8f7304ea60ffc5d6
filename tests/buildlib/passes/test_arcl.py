"""A model at another (AR, CL) computes the same, token by token."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildlib.checkpoint.config import load_config
from buildlib.errors import BuildError
from buildlib.graph.shape import GraphShape
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner, read_ports
from buildlib.passes.arcl import convert_arcl
from tests.buildlib.onnx_models import run_once
from tests.buildlib.passes.decoders import Kind, make_decoder


def test_its_own_shape_is_the_same_model_bit_by_bit(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "in", Kind(fused="Split", qk_norm=True))
    same = convert_arcl(model, GraphShape(4, 12), tmp_path / "out" / "model.onnx")
    expected = run_once(model)
    for name, values in run_once(same).items():
        np.testing.assert_array_equal(values, expected[name])


@settings(max_examples=10, deadline=None)
@given(ar=st.integers(1, 40), calls=st.integers(2, 100))
def test_any_shape_computes_the_same_token_by_token(
    tiny_export: Path, tmp_path_factory: pytest.TempPathFactory, ar: int, calls: int
) -> None:
    source, config = tiny_export / "model.onnx", load_config(tiny_export / "config.json")
    shape = GraphShape(ar, ar * max(calls, -(-40 // ar) + 1))
    other = convert_arcl(source, shape, tmp_path_factory.mktemp("arcl") / "model.onnx")
    ports = read_ports(other)
    assert ports.inputs["past_key_1_in"].shape == (2, 1, 12, shape.past)
    assert ports.outputs["logits"].shape == (1, ar, 300)
    assert other.with_name("model.safetensors").samefile(tiny_export / "model.safetensors")
    tokens = list(range(100, 140))
    runners = OnnxRunner(source, n_threads=1), OnnxRunner(other, n_threads=1)
    with HostLoop({16: [runners[0]]}, config) as one, HostLoop({ar: [runners[1]]}, config) as two:
        expected, actual = one.feed(tokens), two.feed(tokens)
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(actual - expected) / scale).max() < 1e-5


def larger(*names: str) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output):
            if value.name in names:
                for dim in value.type.tensor_type.shape.dim:
                    dim.dim_value += dim.dim_value in {4, 8}

    return change


def short_mask(graph: onnx.GraphProto) -> None:
    mask = next(value for value in graph.input if value.name == "attention_mask")
    mask.type.tensor_type.shape.dim[3].dim_value = 4


def integer_cosines(graph: onnx.GraphProto) -> None:
    cos = next(value for value in graph.input if value.name == "position_ids_cos")
    cos.type.tensor_type.elem_type = onnx.TensorProto.INT32


def baked_in_sizes(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        if tensor.name == "shape_1_ar_24":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array([1, 4, 24]), tensor.name))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (larger("past_key_1_in"), r"past_key_1_in is \[.*the mask says AR 4 and CL 12"),
        (larger("past_value_0_in"), r"past_value_0_in is \[.*the mask says AR 4 and CL 12"),
        (larger("past_key_0_out"), r"past_key_0_out is \[.*the mask says AR 4 and CL 12"),
        (short_mask, "CL must be larger than AR"),
        (integer_cosines, r"^invalid shape .* operators do not fit"),
        (baked_in_sizes, "AR 2, CL 12: the model's operators do not fit"),
    ],
)
def test_what_cannot_be_converted_is_one_line_and_writes_nothing(
    change: Callable[[onnx.GraphProto], None], reason: str, tmp_path: Path
) -> None:
    model = make_decoder(tmp_path / "in", Kind())
    proto = onnx.load(model, load_external_data=False)
    change(proto.graph)
    model.write_bytes(proto.SerializeToString())
    with pytest.raises(BuildError, match=reason) as caught:
        convert_arcl(model, GraphShape(2, 12), tmp_path / "out.onnx")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.onnx").exists()
