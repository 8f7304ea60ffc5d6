"""Damage that no shape reveals is found before anything is built."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from buildlib.checkpoint.config import load_config
from buildlib.errors import ModelFileError
from buildlib.graph.files import link_into, load_model
from buildlib.graph.validation import check_interface, check_model, check_sizes, check_types


def changed(export: Path, folder: Path, change: Callable[[onnx.GraphProto], None]) -> ir.Model:
    model = onnx.load(export / "model.onnx", load_external_data=False)
    change(model.graph)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    link_into(export / "model.safetensors", folder)
    return load_model(path)


def gain(graph: onnx.GraphProto, name: str = "model.norm.weight") -> onnx.TensorProto:
    found: onnx.TensorProto = next(one for one in graph.initializer if one.name == name)
    return found


def inline(graph: onnx.GraphProto, value: float) -> None:
    values = np.ones(list(gain(graph).dims), np.float16)
    values[7] = value
    gain(graph).CopyFrom(onnx.numpy_helper.from_array(values, gain(graph).name))


def short(graph: onnx.GraphProto) -> None:
    inline(graph, 1.0)
    gain(graph).raw_data = gain(graph).raw_data[:5]


def long_entry(graph: onnx.GraphProto) -> None:
    for entry in gain(graph, "model.layers.0.input_layernorm.weight").external_data:
        if entry.key == "length":
            entry.value = str(int(entry.value) - 2 + 4)


def rename_node(graph: onnx.GraphProto) -> None:
    graph.node[3].name = "a\nb"


def repeat_input(graph: onnx.GraphProto) -> None:
    graph.input.append(graph.input[-1])


def strange_attribute(graph: onnx.GraphProto) -> None:
    split = next(node for node in graph.node if node.op_type == "Split")
    split.attribute.append(onnx.helper.make_attribute("body", 1))


def list_as_axis(graph: onnx.GraphProto) -> None:
    softmax = next(node for node in graph.node if node.op_type == "Softmax")
    del softmax.attribute[:]
    softmax.attribute.append(onnx.helper.make_attribute("axis", [0, 1]))


def no_data(graph: onnx.GraphProto) -> None:
    weight = next(one for one in graph.initializer if one.name.endswith("gate_proj.weight"))
    weight.ClearField("data_location")


def strange_domain(graph: onnx.GraphProto) -> None:
    graph.node[1].domain = "nowhere"


def integer_cache(graph: onnx.GraphProto) -> None:
    cache = next(value for value in graph.input if value.name == "past_key_0_in")
    cache.type.tensor_type.elem_type = onnx.TensorProto.INT32


def two_of_one_name(graph: onnx.GraphProto) -> None:
    graph.node[3].name = graph.node[4].name = "twin"


def one_input_too_many(graph: onnx.GraphProto) -> None:
    sigmoid = next(node for node in graph.node if node.op_type == "Sigmoid")
    sigmoid.input.append(sigmoid.input[0])


def below_the_rest(graph: onnx.GraphProto) -> None:
    reshape = next(node for node in graph.node if node.op_type == "Reshape")
    to = next(one for one in graph.initializer if one.name == reshape.input[1])
    to.CopyFrom(onnx.numpy_helper.from_array(np.array([-1, -8193]), to.name))


def no_nodes(graph: onnx.GraphProto) -> None:
    del graph.node[:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: inline(graph, np.nan), "norm.weight.*not finite"),
        (lambda graph: inline(graph, -np.inf), "norm.weight.*not finite"),
        (short, "norm.weight.*cannot be read"),
        (long_entry, "layernorm.weight.*80 bytes by its shape, its entry says 82"),
        (rename_node, "a name in it cannot be used"),
        (repeat_input, "made 2 times"),
        (strange_attribute, r"Split \('.*'\) has an attribute 'body', unknown to opset 23"),
        (list_as_axis, r"Softmax \('.*'\) has 'axis' as INTS, not INT"),
        (no_data, r"tensor '.*gate_proj.weight' has no data, \d+ bytes are needed"),
        (strange_domain, "no opset for its"),
        (integer_cache, "do not fit .*Concat.* type"),
        (two_of_one_name, "2 nodes have the name 'twin'"),
        (one_input_too_many, r"Sigmoid \('.*'\) has 2 inputs, it takes 1"),
        (below_the_rest, r"Reshape \('.*'\) has a dimension -8193"),
        (no_nodes, "holds no graph"),
    ],
)
def test_each_damage_is_named_in_one_line(
    tiny_export: Path, tmp_path: Path, change: Callable[[onnx.GraphProto], None], message: str
) -> None:
    model = changed(tiny_export, tmp_path, change)
    with pytest.raises(ModelFileError, match=message) as caught:
        check_model(model, tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)


def wide_bias(graph: onnx.GraphProto) -> None:
    gemm = next(node for node in graph.node if node.op_type == "Gemm" and "k_proj" in node.name)
    gemm.input.append(gemm.input[0])


def other_rank(graph: onnx.GraphProto) -> None:
    cache = next(value for value in graph.input if value.name == "past_key_0_in")
    cache.type.tensor_type.shape.dim.add().dim_value = 1


def other_heads(graph: onnx.GraphProto) -> None:
    cache = next(value for value in graph.output if value.name == "past_value_1_out")
    cache.type.tensor_type.shape.dim[0].dim_value = 1


def two_batches(graph: onnx.GraphProto) -> None:
    sines = next(value for value in graph.input if value.name == "position_ids_sin")
    sines.type.tensor_type.shape.dim[0].dim_value = 2


def untyped_output(graph: onnx.GraphProto) -> None:
    graph.output[1].type.tensor_type.elem_type = onnx.TensorProto.UNDEFINED


def other_mask(graph: onnx.GraphProto) -> None:
    mask = next(value for value in graph.input if value.name == "attention_mask")
    mask.type.tensor_type.shape.dim[3].dim_value = 1 << 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wide_bias, r"Gemm '.*k_proj.*' adds .*, \[16, 40\], to \[16, 24\]"),
        (other_rank, r"past_key_0_in is .*, the mask says AR 16 and CL 96"),
        (other_heads, r"past_value_1_out is .* by its inputs, not \(1, 1, 16, 12\)"),
        (two_batches, r"position_ids_sin is .*, it must begin with \[1, 1, 16\]"),
        (untyped_output, "past_key_0_out has no type"),
        (other_mask, "CL can be 1048576 at most"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    tiny_export: Path, tmp_path: Path, change: Callable[[onnx.GraphProto], None], message: str
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


def test_a_configuration_of_another_model_is_refused(tiny_export: Path) -> None:
    path = tiny_export / "config.json"
    config, model = load_config(path), load_model(tiny_export / "model.onnx")
    check_sizes(model, config, path)
    for key, value, has in (
        ("num_hidden_layers", 3, 2),
        ("num_key_value_heads", 3, 2),
        ("head_dim", 14, 12),
        ("vocab_size", 301, 300),
    ):
        other = config.model_copy(update={key: value})
        with pytest.raises(ModelFileError, match=f"{key} is {value}, the ONNX model has {has}"):
            check_sizes(model, other, path)
    partial = config.model_copy(update={"partial_rotary_factor": 0.5})
    with pytest.raises(ModelFileError, match="rotary"):
        check_sizes(model, partial, path)


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
