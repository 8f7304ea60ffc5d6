"""Options that contradict each other, or that nothing honours, are refused before any work."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from buildlib.builder import additions
from buildlib.builder.lora_config import LoraBuilderInputConfig
from buildlib.builder.options import ARnContextLengthConfig
from buildlib.builder.plan import graph_shapes
from buildlib.builder.scheduler import WORKERS_VARIABLE
from buildlib.builder.speculative_config import (
    EagletBuilderConfig,
    SpdBuilderConfig,
    SsdBuilderConfig,
)
from buildlib.errors import BuildError, InvalidOptionError, ModelFileError
from buildlib.genai import GenAIBuilderFactory, GenAIBuilderHTP
from tests.builders import builder_for

ARS, LENGTHS = "arn_cl_options.auto_regression_number", "arn_cl_options.context_length"
PARTS, HEAD = "split_model.num_splits", "split_model.split_lm_head"
SPECULATION = pytest.mark.needs("plugins.speculation")
NOWHERE = Path("/no/such")


@pytest.fixture
def builder(tiny_export: Path, tmp_path: Path) -> GenAIBuilderHTP:
    return builder_for(tiny_export, tmp_path / "cache", [1, 16], [96], None, target="SM8750")


@pytest.mark.parametrize(
    "options",
    [
        {LENGTHS: 192},  # without brackets
        {ARS: (1, 8, 16), LENGTHS: (48, 64)},
        {PARTS: 2},
        {HEAD: True, PARTS: 3},
        {"prepare_embedding_lut": True},
    ],
)
def test_options_that_fit(builder: GenAIBuilderHTP, options: Mapping[str, object]) -> None:
    shapes = builder.set_options(options).plan().plan.shapes
    assert {shape.cl for shape in shapes} == {*builder.options.arn_cl_options.context_length}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({ARS: [1, 50], LENGTHS: [192]}, "AR must divide CL"),
        ({ARS: [1, 7], LENGTHS: [24]}, "AR must divide CL; divisors near 7: 6, 8"),
        ({ARS: [1, 192], LENGTHS: [192]}, "CL must be larger than AR"),
        ({ARS: [1, 8], LENGTHS: [1 << 40]}, "CL can be 1048576 at most"),
        ({ARS: [32], LENGTHS: [192]}, "auto_regression_number"),  # nothing decodes
        ({ARS: [1, 32, 32], LENGTHS: [192]}, "a number stands twice"),
        ({PARTS: 3}, "3 parts cannot be made of 2 layers"),
        ({HEAD: True, PARTS: 4}, "4 parts cannot be made of 2 layers"),
        ({PARTS: 0}, r"split_model\.num_splits"),
        ({"split_model.nothing": 1}, r"split_model\.nothing"),
        ({"split_model": 1}, "split_model"),
        ({"adapt_moe": True}, "adapt_moe.*QAIRT SDK"),
        ({"graphs.fp16_relaxed_precision": 0}, "fp16_relaxed_precision.*--toolchain qairt"),
        ({"quantization.bias_bitwidth": 8}, r"quantization\.bias_bitwidth.*QAIRT SDK"),
        ({"quantization.lpbq_block_size": 32}, r"lpbq_block_size.*param_bitwidth is 8"),
        ({"max_workers": 0}, "max_workers"),
        ({"embedding_datatype": "float99"}, "embedding_datatype.*uint16.*float99"),
        (
            {"prepare_embedding_lut": True, "split_model.split_embedding": True},
            "split_embedding.*prepare_embedding_lut",
        ),
        ({"speculative_config": "lade"}, "speculative_config.*LadeBuilderConfig"),
        pytest.param(
            {"speculative_config": SpdBuilderConfig(draft_container=NOWHERE)},
            "draft_container.*is not a folder",
            marks=SPECULATION,
        ),
        pytest.param(
            {
                "speculative_config": SsdBuilderConfig(ssd_tensor_file=NOWHERE, branches=(1,)),
                "quantization.techniques": ["spinquant"],
            },
            "forecast tokens were trained on hidden states",
            marks=SPECULATION,
        ),
        pytest.param(
            {
                "speculative_config": EagletBuilderConfig(draft_model_path=NOWHERE),
                "quantization.techniques": ["spinquant"],
            },
            "draft heads were trained on hidden states",
            marks=SPECULATION,
        ),
        pytest.param(
            {"lora_config": LoraBuilderInputConfig(lora_config_path=NOWHERE)},
            "/no/such",
            marks=pytest.mark.needs("plugins.lora"),
        ),
        pytest.param(
            {"lora_config": LoraBuilderInputConfig(lora_config_path=NOWHERE, lora_version=2)},
            "lora_version.*QAIRT SDK",
            marks=pytest.mark.needs("plugins.lora"),
        ),
    ],
)
def test_options_that_cannot_be_built_are_refused_before_any_work(
    builder: GenAIBuilderHTP, tmp_path: Path, options: Mapping[str, object], reason: str
) -> None:
    with pytest.raises(BuildError, match=reason) as caught:
        builder.set_options(options).plan()
    assert caught.value.exit_code == 2
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"lora_config": LoraBuilderInputConfig(lora_config_path=NOWHERE)},
        {"speculative_config": SsdBuilderConfig(ssd_tensor_file=NOWHERE)},
    ],
)
def test_an_addition_without_its_plugin_is_refused(
    builder: GenAIBuilderHTP, monkeypatch: pytest.MonkeyPatch, options: Mapping[str, object]
) -> None:
    monkeypatch.setattr(additions, "load_entry", lambda *_: None)
    with pytest.raises(InvalidOptionError, match="_config': it needs the plugin `"):
        builder.set_options(options).plan()


@pytest.mark.parametrize(
    ("ars", "cls"), [((1, 16), (32,)), ((1, 8, 16), (16, 64)), ((1, 32), (64,))]
)
def test_a_context_of_twice_an_ar_is_refused(ars: tuple[int, ...], cls: tuple[int, ...]) -> None:
    """Genie takes the two parts of its cache for one another: the text is wrong."""
    shapes = ARnContextLengthConfig(auto_regression_number=ars, context_length=cls)
    with pytest.raises(InvalidOptionError, match=r"is twice the AR"):
        graph_shapes(shapes)


def test_a_target_is_one_of_the_catalog(builder: GenAIBuilderHTP, tiny_export: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"\['chipset:SM8750'\]"):
        builder.set_targets("chipset:SM8750")
    with pytest.raises(BuildError, match="SM8750"):
        builder.set_targets(["SM8751"])
    with pytest.raises(InvalidOptionError, match="set_targets"):
        GenAIBuilderFactory.create(tiny_export).build()


def test_attributes_that_are_no_options_or_cannot_be_had(
    builder: GenAIBuilderHTP, tiny_export: Path
) -> None:
    child = builder.attach_model_for_arn(1, tiny_export)
    for one in (builder, child):
        with pytest.raises(AttributeError, match="embeddings"):
            one.embeddings = "table.raw"  # type: ignore[union-attr]
    with pytest.raises(InvalidOptionError, match=r"native_kv.*QAIRT SDK"):
        builder.native_kv = True
    with pytest.raises(InvalidOptionError, match="'jax' computes none"):
        builder.verify(reference_with="jax")  # type: ignore[arg-type]


def test_encodings_can_be_named_afterwards(
    builder: GenAIBuilderHTP, tiny_export: Path, tiny: Path, tmp_path: Path
) -> None:
    assert builder.encodings_path == tiny_export / "model.encodings"
    other = tmp_path / "other.encodings"
    with pytest.raises(ModelFileError, match=r"other\.encodings is missing"):
        builder.encodings_path = other
    shutil.copy(tiny_export / "model.encodings", other)
    builder.encodings_path = other
    assert builder.plan().sources.main.inputs()["model.encodings"] == other
    of_checkpoint = GenAIBuilderFactory.create(tiny, calibration_text="text")
    assert of_checkpoint.encodings_path is None
    with pytest.raises(InvalidOptionError, match="encodings_path"):
        of_checkpoint.encodings_path = other


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
    monkeypatch.setenv(WORKERS_VARIABLE, "many")
    with pytest.raises(InvalidOptionError, match=WORKERS_VARIABLE):
        builder.plan()


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
