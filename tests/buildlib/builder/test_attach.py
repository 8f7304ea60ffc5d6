"""Exports of their own for single ARs: `attach_model_for_arn`."""

import shutil
from pathlib import Path

import pytest

from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.errors import EncodingsError, InvalidOptionError, ModelFileError
from buildlib.genai import GenAIBuilderFactory, GenAIBuilderHTP
from buildlib.graph.shape import GraphShape
from buildlib.passes.arcl import convert_arcl
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from tests.builders import builder_for


@pytest.fixture(scope="session")
def decode_export(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny export's model at AR 1, as an export of its own: no file is shared."""
    folder = tmp_path_factory.mktemp("decode")
    shutil.copytree(tiny_export, folder / "source")
    model = convert_arcl(folder / "source" / "model.onnx", GraphShape(1, 96), folder / "model.onnx")
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    return model


def parent(folder: Path, cache: Path, target: str = "SM8750") -> GenAIBuilderHTP:
    return builder_for(folder, cache, [1, 16], [96], target=target)


@pytest.mark.needs("libatomic1")
def test_an_attached_model_shares_its_weights_with_its_parent(
    tiny_export: Path, decode_export: Path, tmp_path: Path
) -> None:
    alone = parent(tiny_export, tmp_path / "cache").build()
    builder = parent(tiny_export, tmp_path / "cache")
    builder.attach_model_for_arn(1, decode_export)
    both = builder.build()
    (binary,) = both.path.glob("*.bin")
    graphs = OrtQnnToolchain().inspect(binary).graphs
    assert [graph.name for graph in graphs] == ["ar1_cl96_1_of_1", "ar16_cl96_1_of_1"]
    (without,) = alone.path.glob("*.bin")
    assert binary.stat().st_size == without.stat().st_size


def test_an_attached_builder_inherits_everything_and_sets_graph_options_alone(
    tiny_export: Path, decode_export: Path, tmp_path: Path
) -> None:
    builder = parent(tiny_export, tmp_path)
    child = builder.attach_model_for_arn(1, decode_export, name="decode")
    builder.set_compilation_options({"graphs.vtcm_size_in_mb": 8})
    child.set_compilation_options({"graphs.vtcm_size_in_mb": 4})
    child.set_transformation_options({"split_model.num_splits": 2})
    builder.set_transformation_options({"split_model.num_splits": 2})
    builder.sync_attached_builder_options()
    assert child.graph_options == {"graphs.vtcm_size_in_mb": 4}
    child.set_compilation_options({"context.weight_sharing_enabled": False})
    with pytest.raises(InvalidOptionError, match=r"context\.weight_sharing_enabled.*decode"):
        builder.sync_attached_builder_options()


def test_an_attached_builder_may_not_split_otherwise(
    tiny_export: Path, decode_export: Path, tmp_path: Path
) -> None:
    builder = parent(tiny_export, tmp_path)
    child = builder.attach_model_for_arn(1, decode_export)
    child.set_transformation_options({"split_model.num_splits": 2})
    with pytest.raises(InvalidOptionError, match=r"split_model\.num_splits.*attached_ar1"):
        builder.plan()


def test_invalid_attachments_are_refused(
    tiny_export: Path, decode_export: Path, tmp_path: Path
) -> None:
    builder = parent(tiny_export, tmp_path)
    builder.attach_model_for_arn(1, decode_export)
    with pytest.raises(InvalidOptionError, match="attached already"):
        builder.attach_model_for_arn(1, decode_export)
    with pytest.raises(ModelFileError, match="no such folder"):
        builder.attach_model_for_arn(8, tmp_path / "nothing.onnx")


@pytest.mark.needs("libatomic1")
def test_models_can_keep_the_shapes_that_they_have(
    tiny_export: Path, decode_export: Path, tmp_path: Path
) -> None:
    builder = GenAIBuilderFactory.create(tiny_export, cache_root=tmp_path)
    builder.set_targets(["SM8750:emulator"])
    builder.set_options({"arn_cl_options.skip_ar_cl_conversion": True})
    with pytest.raises(InvalidOptionError, match="ar16_cl96 and none of it decodes"):
        builder.build()
    builder.attach_model_for_arn(1, decode_export)
    graphs = builder.build().metadata.graphs
    assert (graphs.auto_regression_numbers, graphs.context_lengths) == ((1, 16), (96,))


@pytest.mark.needs("libatomic1")
def test_a_checkpoint_has_no_shape_to_keep(tiny: Path, tiny_text: str, tmp_path: Path) -> None:
    builder = GenAIBuilderFactory.create(tiny, cache_root=tmp_path, calibration_text=tiny_text)
    builder.set_targets(["SM8750"]).skip_ar_conversion = True
    with pytest.raises(InvalidOptionError, match="a checkpoint has no AR"):
        builder.build()


@pytest.mark.needs("libatomic1")
def test_models_can_keep_their_ar_at_another_context_length(
    decode_export: Path, tiny_export: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_export / "tokenizer.json", tmp_path)
    shutil.copy(tiny_export / "config.json", tmp_path)
    builder = GenAIBuilderFactory.create(
        decode_export,
        cache_root=tmp_path / "cache",
        tokenizer_path=tmp_path / "tokenizer.json",
        config_path=tmp_path / "config.json",
    )
    builder.set_targets(["SM8750:emulator"]).skip_ar_conversion = True
    builder.set_transformation_options({"arn_cl_options.context_length": [48]})
    made = builder.build().metadata
    assert made.graphs.auto_regression_numbers == (1,)
    assert made.graphs.context_lengths == (48,)
    assert made.options["skip_ar_conversion"] is True


@pytest.mark.needs("libatomic1")
def test_graphs_that_share_a_cache_must_mean_the_same_by_it(
    tiny_export: Path, decode_export: Path, tmp_path: Path
) -> None:
    """Genie hands the prefill graph's keys to the decode graph as they are."""
    shutil.copytree(decode_export.parent, tmp_path / "other")
    file = tmp_path / "other" / "model.encodings"
    encodings = load_encodings(file)
    changed = [
        e.model_copy(update={"scale": (3 * e.scale[0],)}) if "past_key_0" in e.name else e
        for e in encodings.activation_encodings
    ]
    save_encodings(encodings.model_copy(update={"activation_encodings": tuple(changed)}), file)
    builder = parent(tiny_export, tmp_path / "cache")
    builder.attach_model_for_arn(1, tmp_path / "other" / "model.onnx")
    with pytest.raises(EncodingsError, match=r"past_key_0_.*attached for AR 1 has it on another"):
        builder.build()
