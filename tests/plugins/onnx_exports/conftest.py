"""Fixture: imports of modified exports of `tests/fixtures`."""

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from buildlib.builder.canonical import ImportModel
from buildlib.encodings.files import save_encodings
from buildlib.encodings.model import Encoding, Encodings
from buildlib.graph.shape import GraphShape

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"

Change = Callable[[onnx.ModelProto], None]
ImportChanged = Callable[..., Path]


@pytest.fixture
def import_changed(tmp_path: Path) -> ImportChanged:
    """`import_changed("dynamo-llama", shape, *changes, encoding=None)` imports a changed export.

    The encoding is the only one beside it; weights come from the model file itself.
    """

    def make(
        name: str, shape: GraphShape, *changes: Change, encoding: Encoding | None = None
    ) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(EXPORTS / name, folder)  # onnx reads no weights that others link to
        model = onnx.load(folder / "model.onnx")
        for change in changes:
            change(model)
        onnx.save(model, folder / "model.onnx")
        (folder / "model.encodings").unlink(missing_ok=True)
        if encoding is not None:
            encodings = Encodings(activation_encodings=(), param_encodings=(encoding,))
            save_encodings(encodings, folder / "model.encodings")
        return ImportModel(shape).run(folder / "model.onnx", folder / "out" / "model.onnx")

    return make
