"""Fixtures: modified exports of `tests/fixtures`, and the results of their imports."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest

from buildlib.encodings.files import save_encodings
from buildlib.encodings.model import Encoding, Encodings
from buildlib.graph.shape import GraphShape
from buildlib.importing.importer import ImportModel

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"

Change = Callable[[onnx.ModelProto], None]
ImportChanged = Callable[..., Path]
Answers = Callable[[Path], list[npt.NDArray[Any]]]


@pytest.fixture
def import_changed(tmp_path: Path) -> ImportChanged:
    """`import_changed("dynamo-llama", change, shape)` imports an export that `change` was put to.

    Encodings that follow are the only ones beside it; weights come from the model file itself.
    """

    def make(name: str, change: Change, shape: GraphShape, *encodings: Encoding) -> Path:
        folder = tmp_path / f"{change.__name__}_{shape}"
        shutil.copytree(EXPORTS / name, folder)  # onnx reads no weights that others link to
        model = onnx.load(folder / "model.onnx")
        change(model)
        onnx.save(model, folder / "model.onnx")
        (folder / "model.encodings").unlink(missing_ok=True)
        if encodings:
            given = Encodings(activation_encodings=(), param_encodings=encodings)
            save_encodings(given, folder / "model.encodings")
        return ImportModel(shape).run(folder / "model.onnx", folder / "out" / "model.onnx")

    return make


@pytest.fixture(scope="session")
def answers() -> Answers:
    """All outputs of a canonical model, for inputs that are the same at every call."""

    def run(path: Path) -> list[npt.NDArray[Any]]:
        session = ort.InferenceSession(path)
        rng = np.random.default_rng(0)
        feeds = {
            value.name: rng.integers(0, 60, value.shape).astype(np.int32)
            if "int" in value.type
            else rng.normal(size=value.shape).astype(np.float32)
            for value in session.get_inputs()
        }
        results: list[npt.NDArray[Any]] = session.run(None, feeds)
        return results

    return run
