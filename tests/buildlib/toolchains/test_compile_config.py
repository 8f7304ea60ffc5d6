"""Options in the vendor's vocabulary, as objects, as dotted keys and as JSON."""

import copy
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.errors import BuildError, InvalidOptionError, UnknownOptionError
from buildlib.targets import parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.htp_extensions import (
    HtpConfigHelper,
    HtpContextConfig,
    HtpGraphConfig,
)
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from tests.fuzz.mutations import change_json

PHONE = parse_target("SM8750")
EMULATOR = parse_target("SM8750:emulator")

DOCUMENTED: dict[str, Any] = {
    "context": [{"weight_sharing_enabled": True, "lora_weight_sharing": True}],
    "graphs": [
        {"graph_names": ["graphA", "graphB"], "O": 3, "vtcm_mb": 8},
        {"graph_names": ["graphC"], "dlbc": 1},
    ],
    "devices": [
        {
            "device_id": 0,
            "soc_model": 69,
            "dsp_arch": "v79",
            "cores": [{"core_id": 0, "perf_profile": "burst"}],
        }
    ],
    "memory": {"mem_type": "shared_buffer"},
    "groupContext": {"share_resources": True},
}


def test_documented_example_goes_both_ways() -> None:
    read = HtpConfigHelper.from_backend_extension_dict(DOCUMENTED)
    contexts, graphs, devices, memory, group, extras = read
    assert contexts == [HtpContextConfig(weight_sharing_enabled=True, lora_weight_sharing=True)]
    assert [graph.name for graph in graphs] == ["graphA", "graphB", "graphC"]
    assert graphs[1] == HtpGraphConfig(name="graphB", vtcm_size_in_mb=8, optimization_type=3)
    assert devices[0].cores is not None
    assert devices[0].cores[0].perf_profile == "burst"
    assert memory is not None
    assert group is not None
    assert extras == {}
    assert HtpConfigHelper.to_backend_extension_dict(*read) == DOCUMENTED
    old = {"context": {"weight_sharing_enabled": True}, "graphs": {"graph_names": ["a"], "O": 2}}
    read = HtpConfigHelper.from_backend_extension_dict(old)
    arrays = {section: [value] for section, value in old.items()}
    assert HtpConfigHelper.to_backend_extension_dict(*read) == arrays


def test_unknown_options_are_kept() -> None:
    odd = {"graphs": [{"O": 1, "new_thing": {"a": None}}], "surprise": [1, None]}
    _, (graph,), _, _, _, extras = HtpConfigHelper.from_backend_extension_dict(odd)
    assert graph._extras == {"new_thing": {"a": None}}
    assert extras == {"surprise": [1, None]}
    config = CompileConfig.from_backend_extensions(odd, PHONE)
    again = CompileConfig.model_validate_json(config.model_dump_json())
    assert again.to_backend_extensions()["surprise"] == [1, None]
    assert again.graphs[0].extras == {"new_thing": {"a": None}}


@given(seed=st.integers(0, 1 << 32))
def test_foreign_json_is_one_typed_line(seed: int) -> None:
    values, said = copy.deepcopy(DOCUMENTED), ""
    change_json(np.random.default_rng(seed), values)
    try:
        CompileConfig.from_backend_extensions(values, PHONE)
    except InvalidOptionError as error:
        said = str(error)
    assert "\n" not in said


def test_a_configuration_survives_json() -> None:
    config = CompileConfig.from_backend_extensions(DOCUMENTED, PHONE)
    sidecar = json.loads(json.dumps(config.model_dump(mode="json")))
    assert CompileConfig.model_validate(sidecar) == config


@pytest.mark.parametrize(("key", "said"), [("vtcm", "known are"), ("graph", "mean graphs")])
def test_an_unknown_keyword_is_refused(
    key: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"backend": "HTP", "soc_details": "chipset:SM8850", key: 3}
    with pytest.raises(UnknownOptionError, match=f"{key}.*{said}"):
        CompileConfig(**given)
    monkeypatch.setitem(CompileConfig.model_config, "extra", "allow")  # as documented
    assert CompileConfig.model_validate(given).target.soc.name == "SM8850"


def test_a_target_sets_defaults() -> None:
    phone, emulator = CompileConfig.for_target(PHONE), CompileConfig.for_target(EMULATOR)
    assert (phone.weight_sharing, phone.vtcm_mb, phone.optimization_level) == (True, 8, 3)
    assert not emulator.weight_sharing
    assert phone.as_options() | {} == {
        "target": "SM8750",
        "soc_model": 69,
        "dsp_arch": "v79",
        "context.weight_sharing_enabled": True,
        "graphs.vtcm_size_in_mb": 8,
        "graphs.optimization_type": 3,
        "devices.soc_model": 69,
        "devices.dsp_arch": "v79",
        "devices.cores.core_id": 0,
        "devices.cores.perf_profile": "burst",
        "devices.cores.rpc_control_latency": 100,
        "memory.mem_type": "shared_buffer",
    }


def test_dotted_keys_in_either_spelling() -> None:
    config = CompileConfig.for_target(PHONE)
    one = config.with_options({"graphs.vtcm_mb": 4, "graphs.O": "2"})
    other = config.with_options({"graphs.optimization_type": 2, "graphs.vtcm_size_in_mb": 4})
    assert one == other
    assert (one.vtcm_mb, one.optimization_level) == (4, 2)
    twice = config.with_options({"graphs.vtcm_mb": 2}).with_options({"graphs.vtcm_mb": 4})
    assert twice == config.with_options({"graphs.vtcm_mb": 4})


def test_a_graph_has_options_of_its_own_over_those_of_all() -> None:
    config = (
        CompileConfig.for_target(PHONE)
        .with_graph_options(["ar1"], {"graphs.hvx_threads": 2, "graphs.vtcm_mb": 0})
        .with_options({"graphs.optimization_type": 1})
    )
    one, other = config.graph("ar1"), config.graph("ar128")
    assert (one.hvx_threads, one.optimization_type, one.vtcm_size_in_mb) == (2, 1, 8)
    assert (other.hvx_threads, other.optimization_type) == (None, 1)
    assert config.as_options()["graphs[ar1].hvx_threads"] == 2


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("graphs.zzzzzzzzzzzzzzzzzzzzzzzz", 1, "known are graphs.vtcm_size_in_mb"),
        ("graphs.name", "a", "no such option"),
        ("graphs.vtcm_size_in_bm", 1, "no such option: did you mean graphs.vtcm_size_in_mb?"),
        ("surprise", 1, "no such option"),
        ("", 1, "no such option"),
        ("graphs.optimization_type", 4, "must be at most 3, not 4"),
        ("graphs.vtcm_size_in_mb", "much", "must be a whole number"),
        ("devices.cores.perf_profile", "warp", "burst"),
        ("devices.soc_model", 57, "set the target instead"),
        ("memory.mem_type", "file", "shared_buffer"),
        ("devices.pd_session", "adaptive", "must be 'signed' or 'unsigned'"),
        ("context.weight_sharing_enabled", [], "true or false"),
    ],
)
def test_wrong_options_are_named(key: str, value: object, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said) as caught:
        CompileConfig.for_target(PHONE).with_options({key: value})
    assert key in str(caught.value)


def test_a_binary_has_one_context_one_device_and_a_target_that_is_known() -> None:
    for section in ("context", "devices"):
        with pytest.raises(InvalidOptionError, match=section):
            CompileConfig.from_backend_extensions({section: [{}, {}]}, PHONE)
    with pytest.raises(BuildError, match="unknown SoC"):
        CompileConfig.model_validate({"soc_details": "SM9999"})


def test_a_soc_model_of_0_leaves_it_to_the_target() -> None:
    config = CompileConfig.from_backend_extensions({"devices": [{"soc_model": 0}]}, PHONE)
    assert config.target.soc.soc_model == 69


def test_only_what_the_compiler_reads_decides_the_binary() -> None:
    OrtQnnToolchain().check(CompileConfig.from_backend_extensions(DOCUMENTED, PHONE))
    config = CompileConfig.for_target(PHONE)
    options = {"devices.perf_profile": "balanced", "context.init_acceleration": True}
    run = config.with_options({**options, "devices.pd_session": "unsigned"})
    assert run != config
    assert run.compiled_part() == config.compiled_part()
    compiled = config.with_options({"graphs.dlbc": True})
    assert compiled.compiled_part() != config.compiled_part()
    assert CompileConfig.model_validate(config.compiled_part().model_dump(mode="json")).vtcm_mb == 8


LLM_DECODE = {"devices": [{"cores": [{"perf_profile": "llm_decode_burst"}]}]}
FLOAT16, SHARING, UDMA = "fp16_relaxed_precision", "weight_sharing_enabled", "extended_udma"


@pytest.mark.parametrize(
    ("target", "extension", "key", "said"),
    [
        ("SM8750", {"num_cores": 2}, "graphs.num_cores", "--toolchain qairt"),
        ("SM8750", {"devices": [{"cores": [{"a": 1}]}]}, "devices.cores.a", "--toolchain qairt"),
        ("SM8750", {"surprise": {}}, "surprise", "--toolchain qairt"),
        ("SM8650", LLM_DECODE, "devices.cores.perf_profile", "needs Hexagon v79, and this is v75"),
        ("SM8750", {"vtcm_mb": 16}, "graphs.vtcm_size_in_mb", "SM8750 has 8"),
        ("SM8750", {FLOAT16: 0}, f"graphs.{FLOAT16}", "--toolchain qairt"),
        ("SM8750", {"dlbc_weights": 1}, "graphs.dlbc_weights", f"set context.{SHARING} to false"),
        ("SM8750", {"context": {UDMA: 1}}, f"context.{UDMA}", "needs Hexagon v81, and SM8750 has"),
        ("SM8750:emulator", {"context": {SHARING: 1}}, f"context.{SHARING}", "build for SM8750"),
    ],
)
def test_unsupported_options_are_refused_early_by_name(
    target: str, extension: dict[str, Any], key: str, said: str
) -> None:
    if key.startswith("graphs."):
        extension = {"graphs": [extension]}
    config = CompileConfig.from_backend_extensions(extension, parse_target(target))
    with pytest.raises(InvalidOptionError, match=said) as caught:
        OrtQnnToolchain().check(config)
    assert caught.value.key == key
