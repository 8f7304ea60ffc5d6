"""What is wrong with a user's files is said in one line that names the file and the cause."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from buildlib.errors import BuildError, EncodingsError, ModelFileError
from tests.builders import builder_for
from tests.buildlib.model_folders import copy_of_export

Change = Callable[[Path], object]


def refused(folder: Path, cache: Path, kind: type[BuildError], message: str) -> str:
    """The error of a build that leaves nothing unfinished in the cache."""
    with pytest.raises(kind, match=message) as caught:
        builder_for(folder, cache, (1, 8), [24]).build()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    left = [path for path in cache.glob(f"{folder.name}/.*") if path.is_dir()]
    assert left == []
    return str(caught.value)


def cut(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


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
        change({entry["name"]: entry for group in _GROUPS for entry in data[group]} | data)
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


_GROUPS = ("activation_encodings", "param_encodings")


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


def own_opset(model: onnx.ModelProto, version: int) -> None:
    model.opset_import[0].version = version


def cycle(model: onnx.ModelProto) -> None:
    node_of(model, "Softmax").input[0] = model.graph.node[-1].output[0]


def integer_mask(model: onnx.ModelProto) -> None:
    mask = next(value for value in model.graph.input if "mask" in value.name)
    mask.type.tensor_type.elem_type = onnx.TensorProto.INT64


def turned_weight(model: onnx.ModelProto) -> None:
    next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2).dims.reverse()


def text_weight(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    tensor.data_type = onnx.TensorProto.STRING


def nameless_file(model: onnx.ModelProto) -> bytes:
    """The bytes of a model whose weights file has a name that is no UTF-8."""
    data: bytes = model.SerializeToString()
    return data.replace(b"model.data", b"m\xffdel.data")


def scaled(name: str, factor: float) -> Callable[[dict[str, Any]], object]:
    def change(entries: dict[str, Any]) -> None:
        entries[name]["scale"] = [factor * scale for scale in entries[name]["scale"]]

    return change


Q_PROJ = "model.model.layers.0.self_attn.q_proj_sha.0.weight"


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize(
    ("file", "change", "kind", "message"),
    [
        ("model.onnx", cut("model.data", 30_000), ModelFileError, "outside 'model.data'.*trunc"),
        ("model.onnx", without("model.data"), ModelFileError, "'model.data' is missing"),
        ("model.onnx", cut("model.onnx", 0), ModelFileError, "holds no graph"),
        ("model.onnx", cut("model.onnx", 20_001), ModelFileError, "not a readable ONNX model"),
        (
            "model.onnx",
            in_graph(other_operator),
            ModelFileError,
            r"Atanh '.*' \(2 of this operator\) is not supported",
        ),
        ("model.onnx", in_graph(own_operator), ModelFileError, "operator of my.ops"),
        ("model.onnx", in_graph(lambda m: own_opset(m, 99)), ModelFileError, "opset 99; known"),
        ("model.onnx", in_graph(lambda m: own_opset(m, 1)), ModelFileError, "opset 1"),
        ("model.onnx", in_graph(cycle), ModelFileError, "before it is made"),
        ("model.onnx", in_graph(integer_mask), ModelFileError, r"do not fit.*tensor\(int64\)"),
        ("model.onnx", in_graph(turned_weight), ModelFileError, "does not fit its inputs"),
        ("model.onnx", in_graph(text_weight), ModelFileError, "of type STRING"),
        (
            "model.onnx",
            lambda folder: (folder / "model.onnx").write_bytes(
                nameless_file(onnx.load(folder / "model.onnx", load_external_data=False))
            ),
            ModelFileError,
            "not a readable|no readable name",
        ),
        (
            "model.encodings",
            in_encodings(lambda e: e[_GROUPS[0]].append(e["past_key_0_in"] | {"name": "nothing"})),
            EncodingsError,
            "nothing: the model has no such tensor",
        ),
        (
            "model.encodings",
            in_encodings(scaled("past_key_0_in", 2.0)),
            EncodingsError,
            "past_key_0_in: .* another grid than past_key_0_out",
        ),
        (
            "model.encodings",
            in_encodings(scaled("past_value_1_out", 1.01)),
            EncodingsError,
            "past_value_1_in: .* another grid than past_value_1_out",
        ),
        (
            "config.json",
            in_config(num_key_value_heads=3),
            ModelFileError,
            "not a multiple of num_key",
        ),
        ("config.json", in_config(num_hidden_layers=3), ModelFileError, "3, the ONNX model has 2"),
        (
            "config.json",
            in_config(hidden_size="x"),
            ModelFileError,
            "hidden_size: must be a whole number",
        ),
        ("tokenizer.json", cut("tokenizer.json", 100), ModelFileError, "no tokenizer"),
        (
            "model.encodings",
            without_text(lambda e: e[_GROUPS[1]].clear()),
            EncodingsError,
            "values of the model need one and have",
        ),
        (
            "model.encodings",
            without_text(scaled(Q_PROJ, 1e-6)),
            EncodingsError,
            f"{Q_PROJ}.*the values to",
        ),
        (
            "model.encodings",
            without_text(scaled(Q_PROJ, 1e6)),
            EncodingsError,
            f"{Q_PROJ}.*its steps are",
        ),
    ],
)
def test_a_bad_file_is_named_with_its_cause(
    tmp_path: Path, file: str, change: Change, kind: type[BuildError], message: str
) -> None:
    folder = copy_of_export("aihub-llama", tmp_path / "model")
    change(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    said = refused(folder, tmp_path / "cache", kind, message)
    assert str(folder / file) in said
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
