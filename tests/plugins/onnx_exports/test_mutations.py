"""Modified exports, refused by name; `tests/fuzz` changes them at random."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from buildlib.builder.canonical import ImportModel
from buildlib.errors import ModelFileError
from buildlib.graph.files import external_tensors, load_model, save_model
from buildlib.graph.shape import GraphShape

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"
Change = Callable[[ir.Model], None]


def _of(model: ir.Model, op_type: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == op_type)


def _exchange(node: ir.Node) -> None:
    first, second = node.inputs
    node.replace_input_with(0, second)
    node.replace_input_with(1, first)


def renamed(op_type: str, other: str) -> Change:
    def change(model: ir.Model) -> None:
        for node in model.graph:
            if node.op_type == op_type:
                node.op_type = other

    return change


def divided_by_zero(model: ir.Model) -> None:
    zero = ir.Value(name="zero", const_value=ir.tensor(np.zeros(1, np.float32)))
    model.graph.register_initializer(zero)
    node = _of(model, "Softmax")
    divided = ir.Node("", "Div", [node.inputs[0], zero], name="divided")
    model.graph.insert_before(node, divided)
    node.replace_input_with(0, divided.outputs[0])


def fused(model: ir.Model) -> None:
    node = _of(model, "Sigmoid")
    node.domain, node.op_type = "com.microsoft", "QuickGelu"
    model.opset_imports["com.microsoft"] = 1


def caches_of_two_layers(model: ir.Model) -> None:
    one, two = [v for v in model.graph.inputs if str(v.name).endswith("key")]
    names = one.name, two.name
    one.name = "swapped"
    two.name, one.name = names


def no_caches(model: ir.Model) -> None:
    ids = ir.Value(
        name="input_ids", shape=ir.Shape([1, "n"]), type=ir.TensorType(ir.DataType.INT64)
    )
    node = ir.node("Identity", [ids])
    node.outputs[0].name = "out"
    model.graph = ir.Graph([ids], node.outputs, nodes=[node], opset_imports={"": 18})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (renamed("Sigmoid", "Floor"), r": Floor '.*' \(2 of this operator\)"),
        (divided_by_zero, "Div 'divided' .*divides by zero"),
        (renamed("Sigmoid", "Cast"), ": Cast "),
        (fused, r"com\.microsoft"),
        (renamed("LessOrEqual", "GreaterOrEqual"), "causal"),
        (renamed("Neg", "Identity"), "angles"),
        (caches_of_two_layers, r"past_key_values\.1\.key with past_key_values\.0\.value"),
        (no_caches, "past keys"),
    ],
)
def test_a_change_of_an_export_is_named(change: Change, reason: str, tmp_path: Path) -> None:
    model = load_model(EXPORTS / "dynamo-llama" / "model.onnx")
    change(model)
    source = save_model(model, tmp_path / "source" / "model.onnx")
    with pytest.raises(ModelFileError, match=reason) as caught:
        ImportModel(GraphShape(4, 16)).run(source, tmp_path / "out" / "model.onnx")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def reshaped_to_weights(model: ir.Model) -> None:
    """Weights lie in a file that other models share by hard links."""
    tensors = {id(tensor) for tensor in external_tensors(model)}
    values = model.graph.initializers.values()
    weight = next(value for value in values if id(value.const_value) in tensors)
    _of(model, "Reshape").replace_input_with(1, weight)


def past_behind_the_new(model: ir.Model) -> None:
    past = next(value for value in model.graph.inputs if value.name == "past_value_1_in")
    ((joined, _),) = past.uses()
    _exchange(joined)


def attention_without_a_softmax(model: ir.Model) -> None:
    softmax = _of(model, "Softmax")
    plain = ir.Node("", "Concat", list(softmax.inputs), {"axis": ir.AttrInt64("axis", -1)})
    model.graph.insert_before(softmax, plain)
    softmax.outputs[0].replace_all_uses_with(plain.outputs[0])
    model.graph.remove(softmax)


def norm_over_other_axes(model: ir.Model) -> None:
    _of(model, "RMSNormalization").attributes["axis"] = ir.AttrInt64("axis", 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (reshaped_to_weights, "Reshape"),
        (past_behind_the_new, "keys or values that do not begin with"),
        (attention_without_a_softmax, "joins attention scores"),
        (norm_over_other_axes, "RMSNormalization"),
        (lambda model: _exchange(_of(model, "RMSNormalization")), "RMSNormalization"),
    ],
)
def test_a_change_of_a_canonical_model_is_named(
    change: Change, reason: str, tiny_export: Path, tmp_path: Path
) -> None:
    model = load_model(tiny_export / "model.onnx")
    change(model)
    source = save_model(model, tmp_path / "source" / "model.onnx")
    with pytest.raises(ModelFileError, match=reason):
        ImportModel().run(source, tmp_path / "out" / "model.onnx")


def test_a_huge_input_is_refused_before_it_is_made(tmp_path: Path) -> None:
    model = load_model(EXPORTS / "aihub-llama" / "model.onnx")
    mask = next(value for value in model.graph.inputs if "mask" in str(value.name))
    mask.shape = ir.Shape((1, 1 << 40, *list(mask.shape or ())[2:]))
    source = save_model(model, tmp_path / "source" / "model.onnx")
    with pytest.raises(ModelFileError, match="too large to be computed with"):
        ImportModel(GraphShape(4, 16)).run(source, tmp_path / "out" / "model.onnx")
