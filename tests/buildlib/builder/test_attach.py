"""Exports of their own for single ARs: `attach_model_for_arn`."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.encodings.model import Encodings, symmetric_encoding
from buildlib.errors import EncodingsError, InvalidOptionError, ModelFileError
from buildlib.genai import GenAIBuilderFactory, GenAIBuilderHTP
from buildlib.graph.interface import is_kv
from buildlib.graph.shape import GraphShape
from buildlib.passes.arcl import convert_arcl
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from tests.builders import builder_for

ARS, LENGTHS = "arn_cl_options.auto_regression_number", "arn_cl_options.context_length"
PARTS, SHARING = "split_model.num_splits", "context.weight_sharing_enabled"
VTCM, STARTS = "graphs.vtcm_size_in_mb", "mha2sha.m2s_additional_start_points"


@pytest.fixture(scope="session")
def decode_export(one_layer_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export's model at AR 1, as an export of its own: no file is shared."""
    folder = tmp_path_factory.mktemp("decode")
    shutil.copytree(one_layer_export, folder / "source")
    model = convert_arcl(folder / "source" / "model.onnx", GraphShape(1, 96), folder / "model.onnx")
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    return model


@pytest.fixture
def builder(one_layer_export: Path, build_cache: Path) -> GenAIBuilderHTP:
    return builder_for(one_layer_export, build_cache, [1, 16], [96], target="SM8750")


@pytest.mark.needs("libatomic1")
def test_an_attached_model_shares_its_weights_with_its_parent(
    builder: GenAIBuilderHTP, decode_export: Path
) -> None:
    (without,) = builder.build().path.glob("*.bin")
    builder.attach_model_for_arn(1, decode_export)
    (binary,) = builder.build().path.glob("*.bin")
    graphs = OrtQnnToolchain().inspect(binary).graphs
    assert [graph.name for graph in graphs] == ["ar1_cl96_1_of_1", "ar16_cl96_1_of_1"]
    assert binary.stat().st_size == without.stat().st_size


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_an_attached_builder_calibrates_activations_its_own_way(
    builder: GenAIBuilderHTP, decode_export: Path, tmp_path: Path, tiny_text: str
) -> None:
    (without,) = builder.build().path.glob("*.bin")
    shutil.copytree(decode_export.parent, tmp_path / "own")
    (tmp_path / "own" / "model.encodings").unlink()
    (tmp_path / "own" / "text").mkdir()
    (tmp_path / "own" / "text" / "calibration.txt").write_text(tiny_text)
    child = builder.attach_model_for_arn(1, tmp_path / "own" / "model.onnx")
    child.set_conversion_options({"quantization.act_bitwidth": 8})
    container = builder.build()
    assert container.metadata.options["ar1.quantization.act_bitwidth"] == 8
    (binary,) = container.path.glob("*.bin")
    types = {
        graph.name: next(each.dtype for each in graph.outputs if each.name == "logits")
        for graph in OrtQnnToolchain().inspect(binary).graphs
    }
    assert types == {"ar1_cl96_1_of_1": "uint8", "ar16_cl96_1_of_1": "uint16"}
    assert binary.stat().st_size < 1.1 * without.stat().st_size  # of the weights there is one copy


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({VTCM: 4}, None),
        ({"quantization.activation_ranges": "mse"}, None),
        ({"quantization.param_bitwidth": 4}, r"quantization\.param_bitwidth.*decode differs"),
        ({PARTS: 1}, None),  # as its parent
        ({SHARING: True}, None),  # as its parent by default
        ({VTCM: 16}, r"vtcm_size_in_mb.*SM8750 has 8"),
        ({VTCM: "much"}, r"graphs\.vtcm_size_in_mb"),
        ({PARTS: 2}, r"split_model\.num_splits.*decode"),
        ({SHARING: False}, r"context\.weight_sharing_enabled.*decode"),
        ({STARTS: ["nowhere"]}, "no operator 'nowhere'"),
    ],
)
def test_an_attached_builder_sets_options_of_its_graphs_alone(
    builder: GenAIBuilderHTP, decode_export: Path, own: Mapping[str, object], reason: str | None
) -> None:
    child = builder.attach_model_for_arn(1, decode_export, name="decode").set_options(own)
    if reason is None:
        graph_options = builder.plan().plan.graph_options[1]
        assert graph_options == {key: own[key] for key in own if key == VTCM}
    else:
        with pytest.raises(InvalidOptionError, match=reason):
            builder.plan()
    assert child.graph_options.keys() == own.keys() & {VTCM}


def test_an_attached_builder_has_the_target_of_its_parent(
    builder: GenAIBuilderHTP, decode_export: Path
) -> None:
    child = builder.attach_model_for_arn(1, decode_export, name="decode").set_targets(["SM8650"])
    with pytest.raises(InvalidOptionError, match="decode has SM8650; its parent has SM8750"):
        builder.sync_attached_builder_options()
    child.set_targets(["SM8750:emulator"]).set_options({SHARING: True})
    builder.set_targets(["SM8750:emulator"])
    with pytest.raises(InvalidOptionError, match=r"weight_sharing_enabled.*decode"):
        builder.sync_attached_builder_options()


def test_invalid_attachments_are_refused(
    builder: GenAIBuilderHTP, decode_export: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidOptionError, match=ARS):
        builder.attach_model_for_arn(0, decode_export)
    builder.plan()  # a refusal leaves nothing attached
    builder.attach_model_for_arn(1, decode_export)
    with pytest.raises(InvalidOptionError, match="attached already"):
        builder.attach_model_for_arn(1, decode_export)
    with pytest.raises(ModelFileError, match="no such file or folder"):
        builder.attach_model_for_arn(8, tmp_path / "nothing.onnx")
    builder.attach_model_for_arn(16, decode_export, name="prefill")
    builder.set_transformation_options({ARS: [1, 32]})
    with pytest.raises(InvalidOptionError, match=r"prefill is attached for AR 16: \[1, 32\]"):
        builder.plan()


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_models_can_keep_the_shapes_that_they_have(
    one_layer_export: Path, decode_export: Path, build_cache: Path
) -> None:
    builder = GenAIBuilderFactory.create(one_layer_export, cache_root=build_cache)
    builder.set_targets(["SM8750:emulator"])
    builder.set_options({"arn_cl_options.skip_ar_cl_conversion": True})
    with pytest.raises(InvalidOptionError, match="ar16_cl96 and none of it decodes"):
        builder.build()
    builder.attach_model_for_arn(1, decode_export)
    graphs = builder.build().metadata.graphs
    assert (graphs.auto_regression_numbers, graphs.context_lengths) == ((1, 16), (96,))


@pytest.mark.needs("libatomic1")
def test_shapes_that_a_model_does_not_have_cannot_be_kept(
    builder: GenAIBuilderHTP,
    one_layer: Path,
    one_layer_export: Path,
    tiny_text: str,
    build_cache: Path,
) -> None:
    of_checkpoint = builder_for(one_layer, build_cache, text=tiny_text)
    of_checkpoint.skip_ar_conversion = True
    with pytest.raises(InvalidOptionError, match="a checkpoint has no AR"):
        of_checkpoint.build()
    builder.attach_model_for_arn(1, one_layer_export)
    builder.set_options({"arn_cl_options.skip_ar_cl_conversion": True})
    with pytest.raises(InvalidOptionError, match="attached for AR 1 is at ar16_cl96"):
        builder.build()


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_models_can_keep_their_ar_at_another_context_length(
    decode_export: Path, one_layer_export: Path, build_cache: Path, tmp_path: Path
) -> None:
    shutil.copy(one_layer_export / "tokenizer.json", tmp_path)
    shutil.copy(one_layer_export / "config.json", tmp_path)
    builder = GenAIBuilderFactory.create(
        decode_export,
        cache_root=build_cache,
        tokenizer_path=tmp_path / "tokenizer.json",
        config_path=tmp_path / "config.json",
    )
    builder.set_targets(["SM8750:emulator"]).skip_ar_conversion = True
    made = builder.set_options({LENGTHS: [48]}).build().metadata
    assert made.graphs.auto_regression_numbers == (1,)
    assert made.graphs.context_lengths == (48,)
    assert made.options["skip_ar_conversion"] is True


def without_encodings(export: Path, folder: Path) -> Path:
    """A copy of an export's model."""
    shutil.copytree(export.parent, folder, ignore=shutil.ignore_patterns("source", "*.encodings"))
    return folder / export.name


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_an_attached_model_without_encodings_has_the_caches_of_the_main_one(
    one_layer_export: Path, decode_export: Path, tiny_text: str, build_cache: Path, tmp_path: Path
) -> None:
    """Their bits and grids are chosen once, and so is whether they are rescaled."""
    main = tmp_path / "main"
    shutil.copytree(one_layer_export, main)
    given = load_encodings(main / "model.encodings")
    wide = [
        symmetric_encoding(one.name, 3.0, 16)
        for one in given.activation_encodings
        if is_kv(one.name)
    ]
    save_encodings(Encodings(activation_encodings=tuple(wide)), main / "model.encodings")
    builder = builder_for(main, build_cache, [1, 16], [96], target="SM8750", text=tiny_text)
    builder.attach_model_for_arn(1, without_encodings(decode_export, tmp_path / "decode"))
    outputs = builder.plan().outputs()
    folders = [versions[-1].folder for versions in outputs.versions.values()]
    assert len(set(folders)) == 2
    for folder in folders:
        found = load_encodings(folder / "model.encodings").by_name()
        assert {found[one.name].scale for one in wide} == {wide[0].scale}
    assert GenAIContainer.load(outputs.container).precision == "W8A16KV16"


def test_caches_that_are_rescaled_apart_are_refused(
    one_layer: Path, decode_export: Path, tiny_text: str, build_cache: Path
) -> None:
    builder = builder_for(one_layer, build_cache, [1, 16], [96], text=tiny_text)
    builder.attach_model_for_arn(1, decode_export)
    with pytest.raises(EncodingsError, match=r"past_key_0_out: .* other factors.*scaling=false"):
        builder.build()


@pytest.mark.needs("libatomic1")
def test_graphs_that_share_a_cache_must_mean_the_same_by_it(
    builder: GenAIBuilderHTP, decode_export: Path, tmp_path: Path
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
    builder.attach_model_for_arn(1, tmp_path / "other" / "model.onnx")
    with pytest.raises(EncodingsError, match=r"past_key_0_.*attached for AR 1 has it on another"):
        builder.build()
