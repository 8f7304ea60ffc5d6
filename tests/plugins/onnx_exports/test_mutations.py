"""Modified exports, refused by name; `tests/fuzz` changes them at random."""

from collections.abc import Callable
from pathlib import Path

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


def fused(model: ir.Model) -> None:
    node = _of(model, "Sigmoid")
    node.domain, node.op_type = "com.microsoft", "QuickGelu"
    model.opset_imports["com.microsoft"] = 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (renamed("Sigmoid", "Floor"), r": Floor '.*' \(2 of this operator\)"),
        (fused, r"com\.microsoft"),
        (renamed("LessOrEqual", "GreaterOrEqual"), "causal"),
        (renamed("Neg", "Identity"), "angles"),
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (reshaped_to_weights, "Reshape"),
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
