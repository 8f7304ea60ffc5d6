"""Exports with any names run under canonical names, and the import changes nothing."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

from buildlib.builder.canonical import ImportModel
from buildlib.checkpoint.config import load_config
from buildlib.errors import ModelFileError
from buildlib.graph.files import load_model
from buildlib.graph.interface import model_shape
from buildlib.graph.shape import GraphShape
from buildlib.numerics.comparison import SAME_FLOAT, SAME_HALF
from buildlib.numerics.runners import Arrays
from buildlib.numerics.verifier import (
    StageModels,
    VerifyOptions,
    Version,
    verify_outputs,
)
from buildlib.passes.arcl import convert_arcl
from plugins.onnx_exports.precision import SINGLE, precision_of
from plugins.onnx_exports.source_runner import SourceRunner

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"
FEW = VerifyOptions(max_positions=6, continuation=1, n_threads=1)
SHAPE = GraphShape(4, 16)
EVERYDAY = ("aihub-llama-mha-fixed", "dynamo-qwen2", "torchscript-llama")
"""An exporter each; what all import is held against their sources in `test_exports.py`."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.variant)
        for name in sorted(path.parent.name for path in EXPORTS.glob("*/model.onnx"))
    ],
)
def test_an_import_computes_what_the_export_does(name: str, tmp_path: Path) -> None:
    report = verify_outputs(imported_models(EXPORTS / name, tmp_path), options=FEW)
    assert report.passed, report.failures
    assert [one.side for one in report.rows] == ["import", "arcl"]
    assert report.rows[0].found.steps == 6
    assert 0 < report.rows[0].found.relative < 1e-5  # run, not copied


def test_a_wrong_head_order_is_found(tmp_path: Path) -> None:
    """The adapter checks the import and not itself: exchanged heads must show."""

    class Exchanged(SourceRunner):
        def run(self, feeds: Arrays) -> Arrays:
            outputs = dict(super().run(feeds))
            outputs["past_key_1_out"] = outputs["past_key_1_out"][::-1]
            return outputs

    models = imported_models(EXPORTS / "torchscript-llama", tmp_path, Exchanged)
    assert [one.side for one in verify_outputs(models, options=FEW).failures] == ["import"]


@pytest.mark.parametrize("change", ["role", "cache"])
def test_unknown_inputs_are_refused(change: str, tmp_path: Path) -> None:
    export = EXPORTS / "aihub-llama-mha-fixed" / "model.onnx"
    model = onnx.load(export)
    names = {value.name: value for value in model.graph.input}
    if change == "role":
        names["input_ids"].name = "whatever"
        names["input_ids"].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    else:
        names["past_key_0_in"].type.tensor_type.shape.dim[2].dim_value = 9
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    config = load_config(export.with_name("config.json"))
    with pytest.raises(ModelFileError, match=r"whatever|past_key_0_in"):
        SourceRunner(path, config, SHAPE)


@pytest.mark.parametrize(
    ("name", "keep_io"), [("dynamo-qwen2", True), ("notebook-llama-mha", False)]
)
def test_a_float16_export_is_verified_as_closely_as_it_computes(
    name: str, keep_io: bool, tmp_path: Path
) -> None:
    model = _copied(name, tmp_path)
    half = convert_float_to_float16(model, keep_io_types=keep_io, min_positive_val=1e-7)
    onnx.save(half, tmp_path / "model.onnx")
    report = verify_outputs(imported_models(tmp_path, tmp_path / "out"), options=FEW)
    assert report.passed, report.failures
    assert report.rows[0].bound == "SQNR >= 40 dB"
    assert report.rows[0].found.relative > 1e-5  # float16 shows


def test_a_wrong_import_of_a_float16_export_is_found(tmp_path: Path) -> None:
    half = convert_float_to_float16(_copied("dynamo-qwen2", tmp_path), min_positive_val=1e-7)
    onnx.save(half, tmp_path / "model.onnx")
    models = imported_models(tmp_path, tmp_path / "out")
    gain = next(t for t in half.graph.initializer if t.name.endswith("norm.weight"))
    larger = numpy_helper.to_array(gain) * np.float16(1.05)
    gain.CopyFrom(numpy_helper.from_array(larger, gain.name))
    onnx.save(half, tmp_path / "model.onnx")
    assert [one.side for one in verify_outputs(models, options=FEW).failures] == ["import"]


def test_logits_of_the_last_token_alone_verify_nothing(tmp_path: Path) -> None:
    """The import gives those of all tokens; one row of them could be of any."""
    model = _copied("dynamo-qwen2", tmp_path)
    maker = next(node for node in model.graph.node if "logits" in node.output)
    maker.output[0] = "all"
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last"))
    model.graph.node.append(helper.make_node("Gather", ["all", "last"], ["logits"], axis=1))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelFileError, match=r"logits is \[1, 1, 64\].*nothing to verify"):
        verify_outputs(imported_models(tmp_path, tmp_path / "out"), options=FEW)


def _copied(name: str, folder: Path) -> onnx.ModelProto:
    shutil.copytree(EXPORTS / name, folder, dirs_exist_ok=True)
    (folder / "model.encodings").unlink(missing_ok=True)
    return onnx.load(folder / "model.onnx")


def imported_models(
    folder: Path, out: Path, runner: type[SourceRunner] = SourceRunner
) -> StageModels:
    """The export in `folder`, imported, at its own shape or else at `SHAPE`, and at one token."""
    export, config = folder / "model.onnx", load_config(folder / "config.json")
    is_fixed = model_shape(load_model(export)) is not None or folder.name.endswith("fixed")
    path = ImportModel(SHAPE, fixed_keep_theirs=is_fixed).run(export, out / "model.onnx")
    shape = model_shape(load_model(path))
    assert shape is not None
    one = GraphShape(1, shape.cl)
    bound = SAME_FLOAT if precision_of(load_model(export)) == SINGLE else SAME_HALF
    earlier = {path: [Version("import", bound, partial(runner, export, config, shape))]}
    arcl = {one: convert_arcl(path, one, out / "one.onnx")}
    return StageModels(config=config, imported={one: path}, arcl=arcl, earlier=earlier)
