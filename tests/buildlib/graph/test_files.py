"""External weights are checked, linked, and never confused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from buildlib.builder.canonical import ImportModel
from buildlib.errors import ModelFileError
from buildlib.graph.files import external_tensors, load_model, save_model
from buildlib.graph.shape import GraphShape

EXPORT = Path(__file__).parents[2] / "fixtures" / "exports" / "torchscript-llama" / "model.onnx"
SHAPE = GraphShape(4, 16)


@pytest.fixture
def export_with_constant_in(tmp_path: Path) -> Callable[[str], Path]:
    """`make(location)`: an export whose first Constant node has its numbers in another file."""

    def make(location: str) -> Path:
        model = onnx.load(EXPORT)
        node = next(node for node in model.graph.node if node.op_type == "Constant")
        tensor = node.attribute[0].t
        (tmp_path / "inside.bin").write_bytes(tensor.raw_data)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", location), ("length", str(len(tensor.raw_data)))):
            tensor.external_data.add(key=key, value=value)
        tensor.ClearField("raw_data")
        path = tmp_path / "model.onnx"
        path.write_bytes(model.SerializeToString())
        return path

    return make


@pytest.mark.needs("plugins.onnx_exports")
def test_constants_beside_the_model_are_part_of_it(
    export_with_constant_in: Callable[[str], Path], tmp_path: Path
) -> None:
    path = export_with_constant_in("inside.bin")
    assert [tensor.location for tensor in external_tensors(load_model(path))] == ["inside.bin"]
    (tmp_path / "link").hardlink_to(tmp_path / "inside.bin")
    ours = ImportModel(SHAPE).run(path, tmp_path / "ours" / "model.onnx")
    original = ImportModel(SHAPE).run(EXPORT, tmp_path / "original" / "model.onnx")
    assert ours.read_bytes() == original.read_bytes()


@pytest.mark.parametrize(
    ("location", "said"), [("../inside.bin", "outside the model's folder"), ("none", "is missing")]
)
def test_constants_elsewhere_are_refused(
    location: str, said: str, export_with_constant_in: Callable[[str], Path]
) -> None:
    with pytest.raises(ModelFileError, match=said):
        load_model(export_with_constant_in(location))


def test_model_files_are_not_trusted(tiny_export: Path, tmp_path: Path) -> None:
    path, weights = tmp_path / "model.onnx", tmp_path / "model.safetensors"
    with pytest.raises(ModelFileError, match="no such file"):
        load_model(path)
    path.write_bytes(b"\x00junk" * 100)
    with pytest.raises(ModelFileError, match="not a readable ONNX model"):
        load_model(path)
    path.write_bytes((tiny_export / "model.onnx").read_bytes())
    with pytest.raises(ModelFileError, match=r"model\.safetensors' is missing"):
        load_model(path)
    weights.write_bytes(bytes(100))
    with pytest.raises(ModelFileError, match="truncated"):
        load_model(path)


def test_weights_that_no_file_holds_are_refused(tiny_export: Path, tmp_path: Path) -> None:
    path, data = tmp_path / "model.onnx", (tiny_export / "model.onnx").read_bytes()
    (tmp_path / "model.safetensors").hardlink_to(tiny_export / "model.safetensors")
    model = onnx.ModelProto.FromString(data)
    next(one for one in model.graph.initializer if one.external_data).data_type = 8
    for text, said in (
        (model.SerializeToString(), "of type STRING"),
        (data.replace(b"model.safe", b"m\xffdel.safe"), "not a readable|no readable name"),
    ):
        path.write_bytes(text)
        with pytest.raises(ModelFileError, match=said):
            load_model(path)


def test_two_files_of_one_name_are_not_taken_for_each_other(tmp_path: Path) -> None:
    values = []
    for number, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        np.full(4, number, np.float32).tofile(folder / "w.bin")
        tensor = ir.ExternalTensor(
            "w.bin", 0, 16, ir.DataType.FLOAT, shape=ir.Shape((4,)), name=folder.name,
            base_dir=folder,
        )  # fmt: skip
        values.append(ir.Value(name=folder.name, shape=tensor.shape, const_value=tensor))
    total = ir.node("Add", values, name="total")
    graph = ir.Graph(
        [], total.outputs, nodes=[total], initializers=values, opset_imports={"": 23}, name="sum"
    )
    with pytest.raises(ModelFileError, match=r"two files called 'w\.bin'"):
        save_model(ir.Model(graph, ir_version=10), tmp_path / "c" / "model.onnx")
    assert not (tmp_path / "c" / "model.onnx").exists()
