"""What is wrong with a user's files is said in one line that names the file and the cause."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from buildlib.builder.sources import find_source
from buildlib.errors import EncodingsError, ModelFileError
from suites.models import tiny_llama
from tests.builders import builder_for
from tests.buildlib.model_folders import copy_of_export

Change = Callable[[Path], object]


def cut(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def in_graph(change: Callable[[onnx.ModelProto], object]) -> Change:
    def edit(folder: Path) -> None:
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        change(model)
        (folder / "model.onnx").write_bytes(model.SerializeToString())

    return edit


def in_encodings(change: Callable[[dict[str, Any]], object]) -> Change:
    def edit(folder: Path) -> None:
        path = folder / "model.encodings"
        data = json.loads(path.read_text())
        groups = data["activation_encodings"] + data["param_encodings"]
        change({entry["name"]: entry for entry in groups} | data)
        path.write_text(json.dumps(data))

    return edit


def without_text(change: Callable[[dict[str, Any]], object]) -> Change:
    """The change of encodings where no calibration can replace them."""

    def edit(folder: Path) -> None:
        shutil.rmtree(folder / "text")
        in_encodings(change)(folder)

    return edit


def in_config(**changes: object) -> Change:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def node_of(model: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    found: onnx.NodeProto = next(node for node in model.graph.node if node.op_type == kind)
    return found


def other_operator(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "Sigmoid":
            node.op_type = "Atanh"


def own_operator(model: onnx.ModelProto) -> None:
    node_of(model, "Softmax").domain = "my.ops"
    model.opset_import.add(domain="my.ops", version=1)


def later_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 99


def integer_mask(model: onnx.ModelProto) -> None:
    mask = next(value for value in model.graph.input if "mask" in value.name)
    mask.type.tensor_type.elem_type = onnx.TensorProto.INT64


def turned_weight(model: onnx.ModelProto) -> None:
    next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2).dims.reverse()


def stranger(entries: dict[str, Any]) -> None:
    entries["activation_encodings"].append(entries["past_key_0_in"] | {"name": "nothing"})


def scaled(name: str, factor: float) -> Callable[[dict[str, Any]], object]:
    def change(entries: dict[str, Any]) -> None:
        entries[name]["scale"] = [factor * scale for scale in entries[name]["scale"]]

    return change


Q_PROJ = "model.model.layers.0.self_attn.q_proj_sha.0.weight"


BAD: dict[str, list[tuple[Change, str]]] = {
    "model.onnx": [
        (cut("model.data", 30_000), "outside 'model.data'.*trunc"),
        (in_graph(other_operator), r"Atanh '.*' \(2 of this operator\) is not supported"),
        (in_graph(own_operator), "operator of my.ops"),
        (in_graph(later_opset), "opset 99; known"),
        (in_graph(integer_mask), r"do not fit.*tensor\(int64\)"),
        (in_graph(turned_weight), "does not fit its inputs"),
    ],
    "model.encodings": [
        (in_encodings(stranger), "nothing: the model has no such tensor"),
        (in_encodings(scaled("past_key_0_in", 2.0)), "key_0_in: .* another grid than past_key_0_o"),
        (without_text(lambda e: e["param_encodings"].clear()), "values of the model need one and"),
        (without_text(scaled(Q_PROJ, 1e-6)), f"{Q_PROJ}.*the values to"),
    ],
    "config.json": [
        (in_config(num_hidden_layers=3), "3, the ONNX model has 2"),
    ],
    "tokenizer.json": [(cut("tokenizer.json", 100), "no tokenizer")],
}


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize(
    ("file", "change", "message"), [(file, *row) for file, rows in BAD.items() for row in rows]
)
def test_a_bad_file_is_named_with_its_cause(
    tmp_path: Path, file: str, change: Change, message: str
) -> None:
    folder, cache = copy_of_export("aihub-llama", tmp_path / "model"), tmp_path / "cache"
    change(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    kind = EncodingsError if file == "model.encodings" else ModelFileError
    with pytest.raises(kind, match=message) as caught:
        builder_for(folder, cache, (1, 8), [24]).build()
    assert type(caught.value) is kind
    assert str(folder / file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path for path in cache.glob(f"{folder.name}/.*") if path.is_dir()] == []
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_encodings_whose_model_is_missing_make_no_checkpoint(tmp_path: Path) -> None:
    """The data of an ONNX may be all that a checkpoint has, and be built without its encodings."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(tiny_llama.folder() / name, tmp_path)
    assert find_source(tmp_path, "text").name == tmp_path.name
    (tmp_path / "model.encodings").write_text("{}")
    with pytest.raises(ModelFileError, match=r"is of an ONNX model, such as model\.onnx, which is"):
        find_source(tmp_path, "text")
