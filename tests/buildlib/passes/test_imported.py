"""Passes on imported exports keep the computed values."""

from pathlib import Path

import numpy as np
import pytest

from buildlib.graph.shape import GraphShape
from buildlib.importing.importer import ImportModel
from buildlib.passes.arcl import convert_arcl
from buildlib.passes.mha2sha import convert_mha2sha
from tests.buildlib.passes.decoders import run_once

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"


@pytest.mark.parametrize(
    "name", ["aihub-llama", "dynamo-phi3", "dynamo-qwen2", "torchscript-qwen3"]
)
def test_heads_of_an_import_are_separated(name: str, tmp_path: Path) -> None:
    source = EXPORTS / name / "model.onnx"
    model = ImportModel(GraphShape(4, 32)).run(source, tmp_path / "m.onnx")
    other = convert_arcl(model, GraphShape(2, 16), tmp_path / "other.onnx")
    expected, found = (
        run_once(other),
        run_once(convert_mha2sha(other, tmp_path / "apart" / "m.onnx")),
    )
    for output, values in expected.items():
        scale = np.abs(values).max()
        np.testing.assert_allclose(found[output], values, rtol=0, atol=1e-5 * scale)
