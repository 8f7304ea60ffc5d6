"""Both configurations of mllm's flow: what is read, and what is refused with its cause."""

import json
from pathlib import Path
from typing import Any

import pytest

from buildlib.checkpoint.config import load_checkpoint_config
from buildlib.errors import InputFileError, InvalidOptionError
from buildlib.targets import find_soc
from plugins.mllm.config import (
    AotConfig,
    ModelConfig,
    check_pair,
    fixed_by_mllm,
    make_configs,
    read_aot_config,
    read_model_config,
    write_config,
)
from suites.models import tiny_llama

_MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 1,
    "eos_token_id": 2, "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728,
    "max_cache_length": 2048, "max_position_embeddings": 262144, "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 5000000, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 151936,
    "linear_impl_type": "QNN_LPBQ_w4a16o16_G32",
}  # fmt: skip
_LPBQ = {"method": "LPBQ", "sym": True, "precision": "w4a16", "block_size": 32}
_CACHE = {"method": "per-tensor", "sym": True, "precision": "w8a8"}
_AOT: dict[str, Any] = {
    "target_machine": {
        "htp_arch": "V79",
        "htp_chipset": "SM8750",
        "htp_try_best_performance": "HtpBurst",
        "htp_security_pd_session": "HtpSignedPd",
        "htp_vtcm_capability_in_mb": 8,
    },
    "graph_on_qnn": ["model"],
    "op_on_qnn": ["lm_head"],
    "split_graph": 1,
    "quant_recipe": {
        "llm_recipe": True,
        "layers": 36,
        "builtin_llm_pass": {
            "model": "qwen3",
            "lm_head": {"fallback": {"method": "per-channel", "sym": True, "precision": "w8a16"}},
            "linear": {"fallback": _LPBQ, r".*\.down_proj": _LPBQ},
            "kv_cache": {"key": _CACHE, "value": _CACHE},
        },
    },
}


def _changed(data: dict[str, Any], pointer: str, value: object) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(data))
    *way, last = pointer.strip("/").split("/")
    place = copy
    for step in way:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return copy


def _file(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_the_block_size_follows_from_the_implementation(tmp_path: Path) -> None:
    model = read_model_config(_file(tmp_path / "config_4B.json", _MODEL))
    assert (model.linear_block_size, model.family) == (32, "qwen3")


@pytest.mark.parametrize(
    ("pointer", "value", "reason"),
    [
        ("linear_block_size", 16, "linear_impl_type is 'QNN_LPBQ_w4a16o16_G32'"),
        ("linear_block_size", 48, "must be 16, 32 or 64"),
        ("linear_impl_type", "GGUF", "another backend"),
        ("intermediate_size", 9720, "does not divide intermediate_size 9720"),
        ("max_cache_length", 1 << 20, "262144 positions"),
        ("eos_token_id", [1, 2], "must be a whole number"),
        ("num_key_value_heads", 5, "not a multiple"),
        ("head_dim", None, "it is missing"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(
    tmp_path: Path, pointer: str, value: object, reason: str
) -> None:
    path = _file(tmp_path / "config.json", _changed(_MODEL, pointer, value))
    with pytest.raises(InputFileError, match=reason):
        read_model_config(path)


@pytest.mark.parametrize("present", [None, 1024])
def test_a_misspelt_key_of_a_model_names_the_nearest(tmp_path: Path, present: int | None) -> None:
    data = _changed(_MODEL, "max_cache_length", present) | {"max_cache_lenght": 2048}
    with pytest.raises(InputFileError, match="did you mean max_cache_length"):
        read_model_config(_file(tmp_path / "config.json", data))


@pytest.mark.parametrize(
    ("pointer", "value", "reason"),
    [
        ("target_machine/htp_arch", "V75", "SM8750 is V79, not V75"),
        ("target_machine/htp_chipset", "SM9999", "/target_machine/htp_chipset: must be"),
        ("target_machine/htp_security_pd_session", "Signed", "must be 'HtpSignedPd' or"),
        ("target_machine/htp_vtcm_capability", 8, "did you mean htp_vtcm_capability_in_mb"),
        ("split_graph", 2, "must be 1"),
        ("quant_recipe/llm_recipe", False, "must be true|must be True"),
        ("quant_recipe/builtin_llm_pass/linear/fallback", None, "linear has no fallback"),
        ("quant_recipe/builtin_llm_pass/linear/(", _LPBQ, "no regular expression"),
        ("quant_recipe/builtin_llm_pass/linear/fallback/block_size", None, "needs a block_size"),
        ("quant_recipe/builtin_llm_pass/linear/fallback/precision", "w8a16", "LPBQ is w4a16"),
        ("quant_recipe/builtin_llm_pass/kv_cache/key/precision", "w4a8", "must be 'w8a8'"),
        ("graphs_on_qnn", ["model"], "did you mean graph_on_qnn"),
    ],
)
def test_a_compilation_that_mllm_would_trip_over_is_refused(
    tmp_path: Path, pointer: str, value: object, reason: str
) -> None:
    path = _file(tmp_path / "qnn_aot_cfg.json", _changed(_AOT, pointer, value))
    with pytest.raises(InputFileError, match=reason):
        read_aot_config(path)


@pytest.mark.parametrize(
    ("pointer", "value", "key"),
    [
        ("quant_recipe/layers", 28, "num_hidden_layers 36"),
        ("quant_recipe/builtin_llm_pass/model", "qwen2", "model_type qwen3"),
        (
            r"quant_recipe/builtin_llm_pass/linear/.*\.down_proj/block_size",
            64,
            "linear_block_size 32",
        ),
    ],
)
def test_files_of_two_models_are_refused(
    tmp_path: Path, pointer: str, value: object, key: str
) -> None:
    model = ModelConfig.model_validate(_MODEL)
    check_pair(model, AotConfig.model_validate(_AOT), tmp_path)
    other = AotConfig.model_validate(_changed(_AOT, pointer, value))
    with pytest.raises(InputFileError, match=key):
        check_pair(model, other, tmp_path)


def test_what_mllm_has_compiled_in_is_told() -> None:
    remarks = fixed_by_mllm(ModelConfig.model_validate(_MODEL), AotConfig.model_validate(_AOT))
    assert [remark.partition(":")[0] for remark in remarks] == ["CL", "block size", "head"]
    like_mllm = _changed(_MODEL, "max_cache_length", 1024) | {
        "linear_impl_type": "QNN_LPBQ_w4a16o16_G16"
    }
    lpbq = _changed(_AOT, "quant_recipe/builtin_llm_pass/lm_head/fallback", _LPBQ)
    assert not fixed_by_mllm(ModelConfig.model_validate(like_mllm), AotConfig.model_validate(lpbq))


def test_written_configurations_are_read_back_and_fit(tmp_path: Path) -> None:
    config = load_checkpoint_config(tiny_llama.folder() / "config.json")
    model, aot = make_configs(config, find_soc("SM8650"), cl=256, head_bits=8)
    for name, made in (("config.json", model), ("aot.json", aot)):
        write_config(tmp_path / name, made)
    assert read_model_config(tmp_path / "config.json") == model
    assert read_aot_config(tmp_path / "aot.json") == aot
    check_pair(model, aot, tmp_path)
    assert (model.max_cache_length, aot.target_machine.htp_arch) == (256, "V75")


@pytest.mark.parametrize(
    ("soc", "cl", "block_size"), [("SC8380XP", 256, 16), ("SM8650", 4096, 16), ("SM8650", 256, 32)]
)
def test_what_no_configuration_can_say_is_refused(soc: str, cl: int, block_size: int) -> None:
    config = load_checkpoint_config(tiny_llama.folder() / "config.json")
    with pytest.raises(InvalidOptionError):
        make_configs(config, find_soc(soc), cl=cl, block_size=block_size)
