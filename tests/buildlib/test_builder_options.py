"""Every option of a builder, and every attribute, can be set from one mapping of dotted keys."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from buildlib.builder.additions import HostTable
from buildlib.builder.build_options import BuildOptions, known_options
from buildlib.builder.speculative_config import (
    EagletBuilderConfig,
    LadeBuilderConfig,
    SpdBuilderConfig,
    SpeculativeConfig,
    SsdBuilderConfig,
)
from buildlib.builder_options import apply_options, flatten_options
from buildlib.errors import InvalidOptionError
from buildlib.genai import GenAIBuilderFactory, GenAIBuilderHTP
from buildlib.targets import parse_target

HERE = Path("/models")


@pytest.fixture
def builder(tiny_export: Path, tmp_path: Path) -> GenAIBuilderHTP:
    return GenAIBuilderFactory.create(tiny_export, cache_root=tmp_path).set_targets(["SM8750"])


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"type": "lade", "ngram": 3}, LadeBuilderConfig(ngram=3)),
        ({"draft_container": "d"}, SpdBuilderConfig(draft_container=HERE / "d")),
        (
            {"ssd_tensor_file": "/s.pt", "branches": [4]},
            SsdBuilderConfig(ssd_tensor_file=Path("/s.pt"), branches=(4,)),
        ),
        (
            {"type": "eaglet", "draft_model_path": "d.onnx", "draft_token_map": "m.json"},
            EagletBuilderConfig(draft_model_path=HERE / "d.onnx", draft_token_map=HERE / "m.json"),
        ),
    ],
    ids=["lade", "spd", "ssd-q1", "eaglet"],
)
def test_each_speculation_from_its_keys(
    builder: GenAIBuilderHTP, given: Mapping[str, object], made: SpeculativeConfig
) -> None:
    apply_options(builder, flatten_options({"speculative_config": given}, HERE))
    assert builder.speculative_config == made


def test_attributes_stages_and_attached_builders(
    builder: GenAIBuilderHTP, tiny_export: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_export, tmp_path / "decode")
    options = {
        "arn_cl_options": {"auto_regression_number": [1, 16], "context_length": [96]},
        "prepare_embedding_lut": True,
        "embedding_datatype": "uint8",
        "max_workers": 2,
        "attached_builders": [
            {"arn": 1, "model_path": "decode", "name": "fast", "options": {"graphs": {"dlbc": 1}}}
        ],
    }
    apply_options(builder, flatten_options(options, tmp_path))
    plan = builder.plan()
    assert plan.plan.ars == (1, 16)
    assert plan.plan.additions == (HostTable("uint8"),)
    assert plan.plan.graph_options == {1: {"graphs.dlbc": 1}}
    assert plan.sources.names == {1: "fast"}
    assert builder.max_workers == 2


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("speculative_config.draft_len", 6, "type.*known are lade, spd, ssd-q1, eaglet"),
        ("speculative_config.type", "eagle", "eagle.*known are lade, spd, ssd-q1, eaglet"),
        ("speculative_config.type", "eaglet", "draft_model_path.*missing"),
        ("speculative_config.draft_modelpath", "x", "did you mean .*draft_model_path"),
        ("prepare_embeding_lut", True, "did you mean prepare_embedding_lut"),
        ("attached_builders", [{"arn": 1}], "attached_builders.model_path.*missing"),
        ("attached_builders", 1, "attached_builders.*list"),
        ("lora_config.lora_version", 2, "lora_config_path"),
        ("lora_config", {}, "lora_config_path.*missing"),
        ("speculative_config", {}, "type.*missing"),
        ("native_kv", True, "native_kv"),
    ],
)
def test_a_wrong_option_is_named(
    builder: GenAIBuilderHTP, key: str, value: object, said: str
) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        apply_options(builder, flatten_options({key: value}, HERE))


def test_every_section_and_attribute_can_be_set_to_what_it_is(builder: GenAIBuilderHTP) -> None:
    for key, value in builder.options.as_options().items():
        before = builder.options.as_options()
        assert builder.set_options({key: value}).options.as_options() == before
    for key in set(BuildOptions.model_fields) & set(known_options()):
        value = getattr(builder, key)  # a builder has them all
        setattr(builder, key, value)
        assert getattr(builder, key) == value


def test_a_set_of_options_takes_its_own_keys_alone(builder: GenAIBuilderHTP) -> None:
    with pytest.raises(InvalidOptionError, match="arn_cl_options"):
        builder.set_conversion_options({"arn_cl_options.context_length": 96})
    with pytest.raises(InvalidOptionError, match="max_workers"):
        builder.set_transformation_options({"max_workers": 1})
    builder.set_options({"graphs": {"dlbc": 1}, "max_workers": 1})
    assert builder.options.compilation == {"graphs.dlbc": 1}
    assert not builder.parallel_build


def test_options_of_cores_are_given_as_those_of_the_device() -> None:
    options = BuildOptions().with_options({"devices.perf_profile": "llm_decode_burst"})
    (device,) = options.compile_config(parse_target("SM8750")).devices
    assert device.cores is not None
    assert [core.perf_profile for core in device.cores] == ["llm_decode_burst"]
