"""Every option of a build changes what is built, is refused, or is said to have no effect.

A case sets an option to another value than its default. Keys of stages, configurations and what a
build is run with tell whether it is read; the slow test builds both, and compares their files.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from buildlib.builder.build import Build
from buildlib.builder.build_options import known_options, no_effects
from buildlib.builder.speculative_config import EagletBuilderConfig
from buildlib.builder.stages.package import Package
from buildlib.builder_options import PROPERTIES, apply_options
from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import METADATA, TOKENIZER
from buildlib.errors import BuildError, LossTooLargeError
from buildlib.targets import parse_target
from buildlib.toolchains.htp_extensions import HTP_KINDS
from suites.models import tiny_llama
from tests.builders import EMULATOR, builder_for
from tests.system import needs

PHONE = "SM8750"
Given = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """An option at another value, beside options that it needs."""

    value: object
    beside: Given = field(default_factory=dict)
    target: str = EMULATOR


_KWARGS = "quantization.technique_kwargs"
_W4 = {"quantization.param_bitwidth": 4}
_ELSEWHERE = {
    "arn_cl_options.auto_regression_number": [1, 64],
    "speculative_config.for_other_genie": True,
}
_LADE = {"speculative_config.type": "lade", **_ELSEWHERE}
_TRAINED = tiny_llama.folder()
_SSD_FILE = {"speculative_config.ssd_tensor_file": str(_TRAINED / "ssd" / "ssd_tensor.safetensors")}
_DRAFT = {"speculative_config.draft_model_path": str(_TRAINED / "eaglet" / "draft_model.onnx")}
_APART = {"split_model.num_splits": None}
_LORA = {"lora_config.lora_config_path": "ADAPTER", **_APART}


def _technique(name: str, **values: object) -> dict[str, Case]:
    few = {"quantization.techniques": [name], "quantization.param_bitwidth": 4}
    prefix = f"{_KWARGS}.{name}"
    return {f"{prefix}.{key}": Case(value, few) for key, value in values.items()}


def _settings() -> Iterator[tuple[str, Case]]:
    """Yield all HTP settings, most of which are numbers and flags."""
    for kind in HTP_KINDS:
        for key in kind.known_options():
            annotation = repr(kind.model_fields[key.rpartition(".")[2]].annotation)
            value: object = True if "bool" in annotation else 1 if "int" in annotation else "basic"
            yield key, Case([value] if "tuple" in annotation else value)


CASES: dict[str, Case] = {
    **dict(_settings()),
    "arn_cl_options.auto_regression_number": Case([1, 16]),
    "arn_cl_options.context_length": Case([96]),
    "arn_cl_options.skip_ar_cl_conversion": Case(True),
    "split_model.num_splits": Case(2),
    "split_model.split_embedding": Case(True, {"split_model.num_splits": 2}),
    "split_model.split_lm_head": Case(True, {"split_model.num_splits": 2}),
    "mha2sha.enabled": Case(False),
    "mha2sha.m2s_additional_start_points": Case(["layer_0_scores"]),
    "quantization.recipe": Case("w8a8"),
    "quantization.act_bitwidth": Case(8),
    "quantization.bias_bitwidth": Case(8),
    "quantization.param_bitwidth": Case(4),
    "quantization.kv_bitwidth": Case(16),
    "quantization.lpbq_block_size": Case(None, _W4),
    "quantization.mixed_precision": Case(["*.down_proj.weight=4"]),
    "quantization.activation_precision": Case(["layer_*_output=8"]),
    "quantization.techniques": Case(["gptq"]),
    **_technique("spinquant", seed=1),
    **_technique("seqmse", num_batches=1, num_candidates=3),
    **_technique("gptq", num_batches=1, damping=0.5, block_size=8, act_order=False),
    **_technique(
        "gptaq", num_batches=1, damping=0.5, block_size=8, act_order=False, float_text=False
    ),
    **_technique("adascale", num_batches=1, num_iterations=2, learning_rate=0.1, seed=1),
    "quantization.technique_kwargs.lpbq.block_size": Case(8, _W4),
    "quantization.activation_ranges": Case("mse"),
    "quantization.calibration_tokens": Case(192),
    "quantization.scaling": Case(False),
    "quantization.spreading": Case(False),
    "context.weight_sharing_enabled": Case(False, target=PHONE),
    "context.lora_weight_sharing": Case(True, target=PHONE),
    "context.extended_udma": Case(True, target="SM8850"),
    "graphs.vtcm_size_in_mb": Case(2),
    "graphs.optimization_type": Case(1),
    "graphs.hvx_threads": Case(2),
    "graphs.fp16_relaxed_precision": Case(True),
    "graphs.dlbc": Case(True),
    "graphs.dlbc_weights": Case(True),
    "devices.pd_session": Case("signed"),
    "devices.soc_model": Case(1),
    "devices.dsp_arch": Case("v73"),
    "devices.cores": Case([{"core_id": 1}]),
    "devices.cores.perf_profile": Case("balanced"),
    "devices.cores.rpc_control_latency": Case(50),
    "memory.mem_type": Case("file"),
    "lora_config": Case({"lora_config_path": "ADAPTER"}, _APART),
    "lora_config.lora_config_path": Case("ADAPTER", _APART),
    "lora_config.create_lora_graph": Case(False, _LORA),
    "lora_config.quant_updatable_mode": Case("adapter_only", _LORA),
    "lora_config.alpha_tensor_name": Case("lora_scale", _LORA),
    "lora_config.lora_version": Case(2, _LORA),
    "speculative_config": Case(_SSD_FILE | {"type": "ssd-q1"}),
    "speculative_config.type": Case("lade", _ELSEWHERE, PHONE),
    "speculative_config.window": Case(4, _LADE, PHONE),
    "speculative_config.ngram": Case(3, _LADE, PHONE),
    "speculative_config.gcap": Case(4, _LADE, PHONE),
    "speculative_config.draft_container": Case("/no/such", target=PHONE),
    "speculative_config.draft_len": Case(2, _DRAFT),
    "speculative_config.n_branches": Case(2, _DRAFT),
    "speculative_config.draft_model_path": Case(_DRAFT["speculative_config.draft_model_path"]),
    "speculative_config.draft_token_map": Case("/no/such", _DRAFT),
    "speculative_config.eaglet_version": Case(1, _DRAFT),
    "speculative_config.max_tokens_target_can_evaluate": Case(16, _DRAFT),
    "speculative_config.draft_kv_cache": Case(False, _DRAFT),
    "speculative_config.forecast_token_count": Case(2, _SSD_FILE),
    "speculative_config.forecast_prefix": Case(8, _SSD_FILE),
    "speculative_config.branches": Case([2], _SSD_FILE),
    "speculative_config.ssd_tensor_file": Case(_SSD_FILE["speculative_config.ssd_tensor_file"]),
    "prepare_embedding_lut": Case(True),
    "embedding_datatype": Case("uint8", {"prepare_embedding_lut": True}),
    "skip_ar_conversion": Case(True),
    "op_packages": Case(
        [{"name": "A", "interface_provider": "B", "targets": {"x86_64": "/no/such.so"}}]
    ),
    "max_kl": Case(1e-9),
    "max_workers": Case(1),
    "multi_graph": Case(True),
    "weight_sharing": Case(False, target=PHONE),
    "native_kv": Case(True),
    "parallel_build": Case(False),
    "attached_builders": Case([{"arn": 1, "model_path": "/no/such"}]),
}
_ELSEWHERE_TESTED = {"speculative_config.for_other_genie"}
"""It lets a build pass that `test_genie_check` has Genie refuse, which takes a while."""
_OTHERWISE = ("max_workers", "parallel_build", "quantization.spreading")
"""They decide about time, or about models with massive channels."""


@pytest.fixture(scope="module")
def adapter(make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return make_adapter(folder, {"self_attn.q_proj": (40, 32)}, layers=1)


Plan = Callable[[Given, str], Build]


@pytest.fixture(scope="module")
def plan(small_bundle: Path, small_model: Path, build_cache: Path, adapter: Path) -> Plan:
    """Plans a build of the small model, whose build without further options is in the cache."""

    def make(options: Given, target: str) -> Build:
        text = json.dumps(options).replace("ADAPTER", str(adapter))
        builder = builder_for(small_model, build_cache, target=target)
        apply_options(builder, json.loads(text))
        return builder.plan()

    with pytest.raises(LossTooLargeError):  # the model that all additions are made to
        make({"quantization.spreading": False, "max_kl": 1e-9}, EMULATOR).run()
    return make


def outcome(plan: Plan, given: Given, target: str, small_bundle: Path) -> dict[str, object] | str:
    """Return what a build with some options would make, or why it is refused."""
    try:
        build = plan(given, target)
        nodes = build.stages()
        speculation = None
        how = build.plan.options.speculative_config
        if how is not None:
            from plugins.speculation.dialog import PlainDialog, speculate

            container = GenAIContainer.load(small_bundle)
            tokenizer, on = container.files[TOKENIZER], parse_target(EMULATOR)
            plain = PlainDialog(container.genie_config, on, tokenizer)
            drafts = ("draft.bin",) if isinstance(how, EagletBuilderConfig) else ()
            speculation = speculate(plain, how, build.plan.ars, drafts).genie_config.to_json()
    except BuildError as error:
        return str(error)
    made: dict[str, object] = {
        f"{node.stage.operation} {node.stage.subject}": node.entry.hash
        for node in nodes
        if not isinstance(node.stage, Package)
    }
    for node in nodes:
        if isinstance(node.stage, Package):  # whose key has all options, for its manifest
            made["container"] = {**node.stage.options, "options": None}
    return made | {"workers": build.max_workers, "speculation": speculation}


def test_every_option_of_a_build_has_a_case() -> None:
    assert {*CASES, *_ELSEWHERE_TESTED} == {*known_options(), *PROPERTIES}
    assert set(no_effects()) <= set(CASES)


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize("key", CASES)
def test_an_option_of_a_build_acts_is_refused_or_is_said_to_have_no_effect(
    key: str, plan: Plan, small_bundle: Path
) -> None:
    case = CASES[key]
    if "ADAPTER" in str((case.value, case.beside)):
        needs("plugins.lora")
    if "speculative_config" in (key, *case.beside) or key.startswith("speculative_config."):
        needs("plugins.speculation")
    if key.startswith((f"{_KWARGS}.seqmse", f"{_KWARGS}.adascale")):
        needs("plugins.techniques")
    having = outcome(plan, {**case.beside, key: case.value}, case.target, small_bundle)
    if isinstance(having, str):
        named = (key, key.rpartition(".")[2], "/no/such", "KL ")
        assert any(name in having for name in named), having
        assert key not in no_effects() or key.startswith("mha2sha")  # of an ONNX alone
    elif key not in no_effects():
        assert having != outcome(plan, case.beside, case.target, small_bundle)


def _content(folder: Path) -> dict[str, bytes]:
    """Return the files of a container but for its manifest, which names every option."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != METADATA)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize(
    "key", [key for key in CASES if not key.startswith(("speculative_config", *_OTHERWISE))]
)
def test_an_option_that_acts_changes_a_file_of_the_container(key: str, plan: Plan) -> None:
    case = CASES[key]
    try:
        having = plan({**case.beside, key: case.value}, case.target)
        made = _content(having.run().path)
        plain = _content(plan(case.beside, case.target).run().path)
    except BuildError:
        return
    assert (made == plain) == (key in no_effects())
