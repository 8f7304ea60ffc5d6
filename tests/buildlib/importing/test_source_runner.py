"""Exports with any names run under canonical names, and the import changes nothing."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

from buildlib.checkpoint.config import load_config
from buildlib.errors import ModelFileError
from buildlib.graph.files import load_model
from buildlib.graph.interface import model_shape
from buildlib.graph.shape import GraphShape
from buildlib.importing.importer import ImportModel
from buildlib.importing.precision import SINGLE, precision_of
from buildlib.importing.source_runner import SourceRunner
from buildlib.numerics.verifier import (
    SAME_FLOAT,
    SAME_HALF,
    StageModels,
    VerifyOptions,
    Version,
    verify_outputs,
)
from buildlib.passes.arcl import convert_arcl

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"
FEW = VerifyOptions(max_positions=11, continuation=3, n_threads=1)
ASKED = GraphShape(4, 16)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in EXPORTS.glob("*/model.onnx")))
def test_an_import_computes_what_the_export_does(name: str, tmp_path: Path) -> None:
    export = EXPORTS / name / "model.onnx"
    config = load_config(EXPORTS / name / "config.json")
    is_fixed = model_shape(load_model(export)) is not None or name.endswith("fixed")
    imported = ImportModel(None if is_fixed else ASKED).run(export, tmp_path / "model.onnx")
    shape = model_shape(load_model(imported))
    assert shape is not None
    one = GraphShape(1, shape.cl)
    models = StageModels(
        config=config,
        imported={one: imported},
        arcl={one: convert_arcl(imported, one, tmp_path / "one.onnx")},
        earlier={
            imported: [Version("import", SAME_FLOAT, partial(SourceRunner, export, config, shape))]
        },
    )
    report = verify_outputs(models, options=FEW)
    assert report.passed, report.failures
    assert [one.stage for one in report.comparisons] == ["import", "arcl"]
    assert report.comparisons[0].positions == 11
    assert 0 < report.comparisons[0].max_rel_diff < 1e-5  # run, not copied


def test_a_wrong_head_order_is_found(tmp_path: Path) -> None:
    """The adapter checks the import and not itself: exchanged heads must show."""
    export = EXPORTS / "torchscript-llama" / "model.onnx"
    config = load_config(export.with_name("config.json"))
    imported = ImportModel(ASKED).run(export, tmp_path / "model.onnx")
    source = SourceRunner(export, config, ASKED)

    class Exchanged(SourceRunner):
        def run(self, feeds: object) -> dict[str, np.ndarray]:
            outputs = dict(source.run(feeds))  # type: ignore[arg-type]
            outputs["past_key_1_out"] = outputs["past_key_1_out"][::-1]
            return outputs

    models = StageModels(
        config=config,
        imported={ASKED: imported},
        arcl={ASKED: imported},
        earlier={
            imported: [Version("import", SAME_FLOAT, partial(Exchanged, export, config, ASKED))]
        },
    )
    report = verify_outputs(models, options=FEW)
    assert [one.stage for one in report.failures] == ["import"]


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
        SourceRunner(path, config, ASKED)


@pytest.mark.parametrize("keep_io", [True, False])
@pytest.mark.parametrize("name", ["dynamo-qwen2", "notebook-llama-mha"])
def test_a_float16_export_is_verified_as_closely_as_it_computes(
    name: str, keep_io: bool, tmp_path: Path
) -> None:
    model = _copied(name, tmp_path)
    made = convert_float_to_float16(model, keep_io_types=keep_io, min_positive_val=1e-7)
    onnx.save(made, tmp_path / "model.onnx")
    report = verify_outputs(_imported(tmp_path), options=FEW)
    assert report.passed, report.failures
    assert report.comparisons[0].bound == "SQNR >= 40 dB"
    assert report.comparisons[0].max_rel_diff > 1e-5  # float16 shows


def test_a_wrong_import_of_a_float16_export_is_found(tmp_path: Path) -> None:
    made = convert_float_to_float16(_copied("dynamo-qwen2", tmp_path), min_positive_val=1e-7)
    onnx.save(made, tmp_path / "model.onnx")
    models = _imported(tmp_path)
    gain = next(t for t in made.graph.initializer if t.name.endswith("norm.weight"))
    larger = numpy_helper.to_array(gain) * np.float16(1.05)
    gain.CopyFrom(numpy_helper.from_array(larger, gain.name))
    onnx.save(made, tmp_path / "model.onnx")
    assert [one.stage for one in verify_outputs(models, options=FEW).failures] == ["import"]


def test_logits_of_the_last_token_alone_verify_nothing(tmp_path: Path) -> None:
    """The import gives those of all tokens; one row of them could be of any."""
    model = _copied("dynamo-qwen2", tmp_path)
    maker = next(node for node in model.graph.node if "logits" in node.output)
    maker.output[0] = "all"
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last"))
    model.graph.node.append(helper.make_node("Gather", ["all", "last"], ["logits"], axis=1))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelFileError, match=r"logits is \[1, 1, 64\].*nothing to verify"):
        verify_outputs(_imported(tmp_path), options=FEW)


def _copied(name: str, folder: Path) -> onnx.ModelProto:
    shutil.copytree(EXPORTS / name, folder, dirs_exist_ok=True)
    (folder / "model.encodings").unlink(missing_ok=True)
    return onnx.load(folder / "model.onnx")


def _imported(folder: Path) -> StageModels:
    """The export in `folder`, imported, at its own shape or at the one that is asked for."""
    export, config = folder / "model.onnx", load_config(folder / "config.json")
    is_fixed = model_shape(load_model(export)) is not None
    path = ImportModel(None if is_fixed else ASKED).run(export, folder / "out" / "model.onnx")
    shape = model_shape(load_model(path))
    assert shape is not None
    bound = SAME_FLOAT if precision_of(load_model(export)) == SINGLE else SAME_HALF
    earlier = {path: [Version("import", bound, partial(SourceRunner, export, config, shape))]}
    return StageModels(config=config, imported={shape: path}, arcl={shape: path}, earlier=earlier)
