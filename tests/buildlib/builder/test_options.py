"""Options that contradict each other, or that nothing honours, are refused before any work."""

import shutil
from pathlib import Path

import pytest

from buildlib.builder.options import ARnContextLengthConfig
from buildlib.builder.plan import graph_shapes
from buildlib.builder.scheduler import WORKERS_VARIABLE
from buildlib.errors import InvalidOptionError, ModelFileError
from buildlib.genai import GenAIBuilderFactory, GenAIBuilderHTP
from buildlib.lora.config import LoraBuilderInputConfig
from buildlib.speculative.config import SpdBuilderConfig
from tests.builders import builder_for

ARS = "arn_cl_options.auto_regression_number"


@pytest.fixture
def builder(tiny_export: Path, tmp_path: Path) -> GenAIBuilderHTP:
    return builder_for(tiny_export, tmp_path, [1, 16], [96], None, target="SM8750")


def test_targets_are_a_list(builder: GenAIBuilderHTP) -> None:
    with pytest.raises(InvalidOptionError, match=r"\['chipset:SM8750'\]"):
        builder.set_targets("chipset:SM8750")


def test_one_number_may_stand_without_brackets(builder: GenAIBuilderHTP) -> None:
    builder.set_transformation_options({"arn_cl_options.context_length": 192})
    assert {shape.cl for shape in builder.plan().plan.shapes} == {192}


@pytest.mark.parametrize("apart", [False, True])
def test_parts_are_no_more_than_layers(builder: GenAIBuilderHTP, *, apart: bool) -> None:
    options = {"split_model.split_lm_head": apart, "split_model.num_splits": 2 + apart}
    builder.set_transformation_options(options).plan()
    builder.set_transformation_options({"split_model.num_splits": 3 + apart})
    with pytest.raises(InvalidOptionError, match=rf"{3 + apart} parts cannot be made of 2 layers"):
        builder.plan()


def test_a_name_that_is_no_option_is_not_passed_over(
    builder: GenAIBuilderHTP, tiny_export: Path
) -> None:
    child = builder.attach_model_for_arn(1, tiny_export)
    for one in (builder, child):
        with pytest.raises(AttributeError, match="embeddings"):
            one.embeddings = "table.raw"  # type: ignore[union-attr]


def test_encodings_can_be_named_afterwards(
    builder: GenAIBuilderHTP, tiny_export: Path, tmp_path: Path
) -> None:
    assert builder.encodings_path == tiny_export / "model.encodings"
    other = tmp_path / "other.encodings"
    with pytest.raises(ModelFileError, match=r"other\.encodings is missing"):
        builder.encodings_path = other
    shutil.copy(tiny_export / "model.encodings", other)
    builder.encodings_path = other
    assert builder.plan().sources.main.inputs()["model.encodings"] == other


def test_a_checkpoint_has_no_encodings(tiny: Path, tiny_text: str, tmp_path: Path) -> None:
    builder = GenAIBuilderFactory.create(tiny, cache_root=tmp_path, calibration_text=tiny_text)
    assert builder.encodings_path is None
    with pytest.raises(InvalidOptionError, match="encodings_path"):
        builder.encodings_path = tiny / "config.json"


def test_how_many_parts_are_built_at_once(
    builder: GenAIBuilderHTP, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKERS_VARIABLE, "3")
    assert builder.parallel_build
    assert builder.plan().max_workers == 3
    builder.parallel_build = False
    assert builder.plan().max_workers == 1
    builder.parallel_build = True
    assert builder.max_workers is None
    with pytest.raises(InvalidOptionError, match="max_workers"):
        builder.max_workers = 0
    monkeypatch.setenv(WORKERS_VARIABLE, "many")
    with pytest.raises(InvalidOptionError, match=WORKERS_VARIABLE):
        builder.plan()


def test_an_attached_builders_graph_options_are_judged_as_early_as_its_parents(
    builder: GenAIBuilderHTP, tiny_export: Path
) -> None:
    child = builder.attach_model_for_arn(1, tiny_export)
    child.set_options({"graphs.vtcm_size_in_mb": 16})
    with pytest.raises(InvalidOptionError, match=r"vtcm_size_in_mb.*SM8750 has 8"):
        builder.plan()
    child.set_options({"graphs.vtcm_size_in_mb": "much"})
    with pytest.raises(InvalidOptionError, match=r"graphs\.vtcm_size_in_mb"):
        builder.plan()


def test_an_attached_builder_may_say_what_its_parent_has_by_default(
    builder: GenAIBuilderHTP, tiny_export: Path
) -> None:
    child = builder.attach_model_for_arn(1, tiny_export)
    child.set_options({"context.weight_sharing_enabled": True})
    builder.sync_attached_builder_options()
    builder.set_targets(["SM8750:emulator"])
    with pytest.raises(InvalidOptionError, match=r"weight_sharing_enabled.*ar1"):
        builder.sync_attached_builder_options()


def test_an_attached_model_is_built_or_refused(builder: GenAIBuilderHTP, tiny_export: Path) -> None:
    with pytest.raises(InvalidOptionError, match=ARS):
        builder.attach_model_for_arn(0, tiny_export)
    builder.plan()  # a refusal leaves nothing attached
    builder.attach_model_for_arn(16, tiny_export, name="prefill")
    builder.set_transformation_options({ARS: [1, 32]})
    with pytest.raises(InvalidOptionError, match=r"prefill is attached for AR 16: \[1, 32\]"):
        builder.plan()


@pytest.mark.needs("libatomic1")
def test_an_attached_model_that_keeps_another_shape(
    builder: GenAIBuilderHTP, tiny_export: Path
) -> None:
    builder.attach_model_for_arn(1, tiny_export)
    builder.set_options({"arn_cl_options.skip_ar_cl_conversion": True})
    with pytest.raises(InvalidOptionError, match="attached for AR 1 is at ar16_cl96"):
        builder.build()


def test_configurations_are_judged_before_any_work(
    builder: GenAIBuilderHTP, tmp_path: Path
) -> None:
    with pytest.raises(InvalidOptionError, match=r"speculative_config.*LadeBuilderConfig"):
        builder.speculative_config = "lade"  # type: ignore[assignment]
    builder.speculative_config = SpdBuilderConfig(draft_container=tmp_path / "none")
    with pytest.raises(InvalidOptionError, match=r"draft_container.*is not a folder"):
        builder.plan()
    builder.speculative_config = None
    builder.lora_config = LoraBuilderInputConfig(lora_config_path=tmp_path / "none")
    with pytest.raises(ModelFileError, match="none"):
        builder.plan()
    builder.lora_config = LoraBuilderInputConfig(lora_config_path=tmp_path, lora_version=2)
    with pytest.raises(InvalidOptionError, match=r"lora_version.*QAIRT SDK"):
        builder.plan()


def test_a_table_on_the_host_leaves_no_embedding_to_split_off(builder: GenAIBuilderHTP) -> None:
    builder.prepare_embedding_lut = True
    builder.plan()
    builder.set_transformation_options({"split_model.split_embedding": True})
    with pytest.raises(InvalidOptionError, match=r"split_embedding.*prepare_embedding_lut"):
        builder.plan()
    with pytest.raises(InvalidOptionError, match=r"embedding_datatype.*uint16.*float99"):
        builder.embedding_datatype = "float99"  # type: ignore[assignment]


def test_biases_that_the_compiler_does_not_take(builder: GenAIBuilderHTP) -> None:
    with pytest.raises(InvalidOptionError, match=r"quantization\.bias_bitwidth.*QAIRT SDK"):
        builder.set_conversion_options({"quantization.bias_bitwidth": 8})


@pytest.mark.needs("libatomic1")
def test_messages_name_the_configuration_that_was_given(tiny_export: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    with pytest.raises(ModelFileError, match=r"other\.json.*no JSON object"):
        GenAIBuilderFactory.create(tiny_export, config_path=other)
    with pytest.raises(InvalidOptionError, match=r"config_dict.*object"):
        GenAIBuilderFactory.create(tiny_export, config_dict={"torch_dtype": object()})
    builder = GenAIBuilderFactory.create(tiny_export, config_dict={"model_type": "llama"})
    with pytest.raises(ModelFileError, match="config_dict: num_hidden_layers is 32, the ONNX"):
        builder.set_targets(["SM8750"]).build()


@pytest.mark.parametrize(
    ("ars", "cls"), [((1, 16), (32,)), ((1, 8, 16), (16, 64)), ((1, 32), (64,))]
)
def test_a_context_of_twice_an_ar_is_refused(ars: tuple[int, ...], cls: tuple[int, ...]) -> None:
    """Genie takes the two parts of its cache for one another: the text is wrong."""
    shapes = ARnContextLengthConfig(auto_regression_number=ars, context_length=cls)
    with pytest.raises(InvalidOptionError, match=r"is twice the AR"):
        graph_shapes(shapes)
    fits = ARnContextLengthConfig(auto_regression_number=(1, 8, 16), context_length=(48, 64))
    assert len(graph_shapes(fits)) == 6


def test_a_reference_is_computed_by_what_is_known(builder: GenAIBuilderHTP) -> None:
    with pytest.raises(InvalidOptionError, match="'jax' computes none"):
        builder.verify(reference_with="jax")  # type: ignore[arg-type]
