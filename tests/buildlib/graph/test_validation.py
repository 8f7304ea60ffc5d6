"""Damage that no shape reveals is found before anything is built."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from buildlib.checkpoint.config import load_config
from buildlib.errors import BuildError, ModelFileError
from buildlib.graph.files import link_into, load_model
from buildlib.graph.shape import GraphShape
from buildlib.graph.validation import check_interface, check_model, check_sizes, check_types

Change = Callable[[onnx.GraphProto], object]


def changed(export: Path, folder: Path, change: Change) -> ir.Model:
    model = onnx.load(export / "model.onnx", load_external_data=False)
    change(model.graph)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    link_into(export / "model.safetensors", folder)
    return load_model(path)


def node(graph: onnx.GraphProto, op_type: str, name: str = "") -> onnx.NodeProto:
    nodes: list[onnx.NodeProto] = [one for one in graph.node if one.op_type == op_type]
    return next(one for one in nodes if name in one.name)


def tensor(graph: onnx.GraphProto, name: str = "model.norm.weight") -> onnx.TensorProto:
    tensors: list[onnx.TensorProto] = list(graph.initializer)
    return next(one for one in tensors if one.name.endswith(name))


def port(graph: onnx.GraphProto, name: str) -> onnx.TypeProto.Tensor:
    values: list[onnx.ValueInfoProto] = [*graph.input, *graph.output]
    return next(one.type.tensor_type for one in values if one.name == name)


def inline(graph: onnx.GraphProto, value: float) -> onnx.TensorProto:
    values = np.ones(list(tensor(graph).dims), np.float16)
    values[7] = value
    tensor(graph).CopyFrom(numpy_helper.from_array(values, tensor(graph).name))
    return tensor(graph)


def short(graph: onnx.GraphProto) -> None:
    inline(graph, 1.0).raw_data = inline(graph, 1.0).raw_data[:5]


def long_entry(graph: onnx.GraphProto) -> None:
    for entry in tensor(graph, "layers.0.input_layernorm.weight").external_data:
        if entry.key == "length":
            entry.value = str(int(entry.value) - 2 + 4)


def list_as_axis(graph: onnx.GraphProto) -> None:
    softmax = node(graph, "Softmax")
    del softmax.attribute[:]
    softmax.attribute.append(helper.make_attribute("axis", [0, 1]))


def two_of_one_name(graph: onnx.GraphProto) -> None:
    graph.node[3].name = graph.node[4].name = "twin"


def below_the_rest(graph: onnx.GraphProto) -> None:
    to = tensor(graph, node(graph, "Reshape").input[1])
    to.CopyFrom(numpy_helper.from_array(np.array([-1, -8193]), to.name))


def complex_shape(graph: onnx.GraphProto) -> None:
    to = tensor(graph, node(graph, "Reshape").input[1])
    values = np.full(len(numpy_helper.to_array(to)), np.nan, np.complex64)
    to.CopyFrom(numpy_helper.from_array(values, to.name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: inline(graph, np.nan), "norm.weight.*not finite"),
        (lambda graph: inline(graph, -np.inf), "norm.weight.*not finite"),
        (short, "norm.weight.*cannot be read"),
        (long_entry, "layernorm.weight.*80 bytes by its shape, its entry says 82"),
        (lambda graph: setattr(graph.node[3], "name", "a\nb"), "a name in it cannot be used"),
        (lambda graph: graph.input.append(graph.input[-1]), "made 2 times"),
        (
            lambda graph: node(graph, "Split").attribute.append(helper.make_attribute("body", 1)),
            r"Split \('.*'\) has an attribute 'body', unknown to opset 23",
        ),
        (list_as_axis, r"Softmax \('.*'\) has 'axis' as INTS, not INT"),
        (
            lambda graph: tensor(graph, "gate_proj.weight").ClearField("data_location"),
            r"tensor '.*gate_proj.weight' has no data, \d+ bytes are needed",
        ),
        (lambda graph: setattr(graph.node[1], "domain", "nowhere"), "no opset for its"),
        (
            lambda graph: setattr(
                port(graph, "past_key_0_in"), "elem_type", onnx.TensorProto.INT32
            ),
            "do not fit .*Concat.* type",
        ),
        (two_of_one_name, "2 nodes have the name 'twin'"),
        (
            lambda graph: node(graph, "Sigmoid").input.append("embedding"),
            r"Sigmoid \('.*'\) has 2 inputs, it takes 1",
        ),
        (
            lambda graph: node(graph, "Gemm").input.extend(["embedding"] * 2),
            r"Gemm \('.*'\) has 4 inputs, it takes 2 to 3",
        ),
        (below_the_rest, r"Reshape \('.*'\) has a dimension -8193"),
        (complex_shape, r"Reshape \('.*'\) has a shape of COMPLEX64"),
        (lambda graph: graph.ClearField("node"), "holds no graph"),
    ],
)
def test_each_damage_is_named_in_one_line(
    tiny_export: Path, tmp_path: Path, change: Change, message: str
) -> None:
    model = changed(tiny_export, tmp_path, change)
    with pytest.raises(ModelFileError, match=message) as caught:
        check_model(model, tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)


def sized(name: str, axis: int, size: int) -> Change:
    return lambda graph: setattr(port(graph, name).shape.dim[axis], "dim_value", size)


def wide_bias(graph: onnx.GraphProto) -> None:
    gemm = node(graph, "Gemm", "k_proj")
    gemm.input.append(gemm.input[0])


def other_rank(graph: onnx.GraphProto) -> None:
    port(graph, "past_key_0_in").shape.dim.add().dim_value = 1


def untyped_output(graph: onnx.GraphProto) -> None:
    graph.output[1].type.tensor_type.elem_type = onnx.TensorProto.UNDEFINED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wide_bias, r"Gemm '.*k_proj.*' adds .*, \[16, 40\], to \[16, 24\]"),
        (other_rank, r"past_key_0_in is .*, the mask says AR 16 and CL 96"),
        (sized("past_value_1_out", 0, 1), r"_1_out is .* by its inputs, not \(1, 1, 16, 12\)"),
        (sized("position_ids_sin", 0, 2), r"position_ids_sin is .*must begin with \[1, 1, 16\]"),
        (untyped_output, "past_key_0_out has no type"),
        (sized("attention_mask", 3, 1 << 40), "CL can be 1048576 at most"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    tiny_export: Path, tmp_path: Path, change: Change, message: str
) -> None:
    check_types(load_model(tiny_export / "model.onnx"), tiny_export)
    model = changed(tiny_export, tmp_path, change)
    with pytest.raises(ModelFileError, match=message):
        check_types(model, tmp_path / "model.onnx")


def test_large_numbers_are_accepted(tiny_export: Path, tmp_path: Path) -> None:
    model = changed(tiny_export, tmp_path, lambda graph: inline(graph, 6e4))
    check_model(model, tmp_path / "model.onnx")
    values = np.full(40, 3e38, np.float32)
    model.graph.initializers["model.norm.weight"].const_value = ir.tensor(values)
    check_model(model, tmp_path / "model.onnx")  # the sum overflows, the terms do not


@pytest.mark.parametrize("name", ["past_value_1_out", "past_key_0_in", "logits"])
def test_every_cache_has_input_and_output(tiny_export: Path, name: str) -> None:
    model = load_model(tiny_export / "model.onnx")
    check_interface(model, tiny_export)
    for ends in (model.graph.inputs, model.graph.outputs):
        ends[:] = [value for value in ends if value.name != name]
    with pytest.raises(ModelFileError, match=f"{name} is missing"):
        check_interface(model, tiny_export)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 3, "num_hidden_layers is 3, the ONNX model has 2"),
        ("num_key_value_heads", 3, "num_key_value_heads is 3, the ONNX model has 2"),
        ("head_dim", 14, "head_dim is 14, the ONNX model has 12"),
        ("vocab_size", 301, "vocab_size is 301, the ONNX model has 300"),
        ("partial_rotary_factor", 0.5, "rotary dimensions / 2 is 3, the ONNX model has 6"),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    key: str, value: float, message: str, tiny_export: Path
) -> None:
    path = tiny_export / "config.json"
    config, model = load_config(path), load_model(tiny_export / "model.onnx")
    check_sizes(model, config, path)
    with pytest.raises(ModelFileError, match=message):
        check_sizes(model, config.model_copy(update={key: value}), path)


def test_checking_weights_copies_none_of_them(tmp_path: Path) -> None:
    values = np.ones(1 << 24, np.float32)
    values.tofile(tmp_path / "data")
    tensor = ir.ExternalTensor(
        "data", 0, values.nbytes, ir.DataType.FLOAT, shape=ir.Shape(values.shape), name="w",
        base_dir=tmp_path,
    )  # fmt: skip
    value = ir.Value(name="w", const_value=tensor)
    used = ir.node("Identity", [value], name="used")
    graph = ir.Graph([], used.outputs, nodes=[used], initializers=[value], opset_imports={"": 23})
    tracemalloc.start()
    try:
        check_model(ir.Model(graph, ir_version=10), tmp_path / "m")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes / 2


@pytest.mark.parametrize(
    ("ar", "cl", "reason"),
    [
        (0, 8, "AR must be at least 1"),
        (-1, 8, "AR must be at least 1"),
        (8, 8, "CL must be larger than AR"),
        (9, 8, "CL must be larger than AR"),
        (1, (1 << 20) + 1, "CL can be 1048576 at most"),
        (5, 192, "AR must divide CL; divisors near 5: 4, 6"),
        (40, 192, "AR must divide CL; divisors near 40: 32, 48"),
        (100, 192, "AR must divide CL; divisors near 100: 96"),
    ],
)
def test_impossible_shapes_are_refused(ar: int, cl: int, reason: str) -> None:
    with pytest.raises(BuildError) as caught:
        GraphShape(ar, cl)
    assert str(caught.value) == f"invalid shape AR {ar}, CL {cl}: {reason}"
    assert caught.value.exit_code == 2


def test_its_name_and_past() -> None:
    shape = GraphShape(32, 192)
    assert (str(shape), shape.past) == ("ar32_cl192", 160)
