"""A `config.json` of any decoder gives sizes that fit together, or one line that says why not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.builder.stages.package import genie_config, genie_rope_scaling
from buildlib.checkpoint import family_keys
from buildlib.checkpoint.architectures import SupportedLLMs
from buildlib.checkpoint.config import (
    CheckpointConfig,
    DecoderConfig,
    load_checkpoint_config,
    load_config,
    other_reading,
    unread_keys,
)
from buildlib.checkpoint.rotary import LinearRopeScaling, LongRopeScaling
from buildlib.errors import BuildError, ModelFileError
from buildlib.graph.rope import rope_tables, rotation_length
from buildlib.graph.shape import GraphShape, check_context
from buildlib.targets import parse_target
from tests.buildlib.model_folders import LLAMA3_SCALING

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"

PLAIN: dict[str, Any] = {
    "model_type": "unheard of",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "eos_token_id": [7, 3],
}

LOCAL_SCALING = {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}
ORIGINAL = "original_max_position_embeddings"
V4, V5 = {"transformers_version": "4.57.6"}, {"transformers_version": "5.23.0"}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(PLAIN | changes))
    return path


def load(folder: Path, **changes: object) -> DecoderConfig:
    return load_config(write(folder, **changes))


def test_an_unknown_architecture_with_the_usual_keys_is_read(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.architecture is None
    assert (config.num_key_value_heads, config.head_dim, config.rotary_dim) == (4, 16, 16)
    assert config.bos_token_id is None
    assert not config.attention_bias
    assert config.qk_norm is None


@pytest.mark.parametrize(
    ("fixture", "architecture", "rotary_dim"),
    [
        ("dynamo-phi3", SupportedLLMs.PHI3, 12),
        ("torchscript-qwen3", SupportedLLMs.QWEN3, 12),
        ("dynamo-mistral", SupportedLLMs.MISTRAL, 8),
    ],
)
def test_what_transformers_wrote_is_read(
    fixture: str, architecture: SupportedLLMs, rotary_dim: int
) -> None:
    config = load_config(EXPORTS / fixture / "config.json")
    assert config.architecture is architecture
    assert config.rotary_dim == rotary_dim
    assert config.rope_scaling is None
    assert config.qk_norm == ("head" if architecture is SupportedLLMs.QWEN3 else None)


def test_both_spellings_of_rotary_parameters_mean_the_same(tmp_path: Path) -> None:
    old = load(
        tmp_path,
        rope_theta=500000.0,
        partial_rotary_factor=0.5,
        rope_scaling=LLAMA3_SCALING | {"type": LLAMA3_SCALING["rope_type"]},
    )
    more = {"rope_theta": 500000.0, "partial_rotary_factor": 0.5}
    assert load(tmp_path, rope_parameters=LLAMA3_SCALING | more) == old
    assert (old.rope_theta, old.rotary_dim) == (500000.0, 8)


def test_linear_scaling_divides_the_angles(tmp_path: Path) -> None:
    config = load(tmp_path, rope_scaling={"type": "linear", "factor": 4.0})
    assert isinstance(config.rope_scaling, LinearRopeScaling)
    sines = rope_tables(config, 9)[1]
    assert sines[8] == pytest.approx(rope_tables(load(tmp_path), 9)[1][2], abs=1e-6)


def test_what_a_scaling_leaves_out_follows_from_other_keys(tmp_path: Path) -> None:
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for kind in ("su", "yarn", "longrope"):
        scaling = load(
            tmp_path,
            rope_scaling={"type": kind, **lists},
            max_position_embeddings=4096,
            original_max_position_embeddings=1024,
        ).rope_scaling
        assert isinstance(scaling, LongRopeScaling)
        assert (scaling.factor, scaling.original_max_position_embeddings) == (4.0, 1024)


def test_genie_is_told_any_scaling_as_factors_of_each_frequency(tmp_path: Path) -> None:
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scaling = {"type": "longrope", "original_max_position_embeddings": 64, **lists}
    config = load(tmp_path, rope_scaling=scaling, max_position_embeddings=256)
    for length, factor in ((64, 1.0), (128, 2.0)):
        told = genie_rope_scaling(config, length)
        assert told is not None
        assert (told.rope_type, told.factor) == ("longrope", 1.0)
        assert told.short_factor == told.long_factor == (factor,) * 8
    assert (
        genie_rope_scaling(load(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}), 64)
        is None
    )
    assert rotation_length(config) == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)


def test_dynamic_scaling_bounds_the_context(tmp_path: Path) -> None:
    config = load(
        tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=64
    )
    check_context(GraphShape(16, 64), config.context_limit(windowed=True))
    with pytest.raises(BuildError, match="beyond 64 tokens rotary positions depend on"):
        check_context(GraphShape(16, 128), config.context_limit(windowed=True))


def test_layers_with_a_window_may_have_a_base_of_their_own(tmp_path: Path) -> None:
    both = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    kinds = ["sliding_attention", "full_attention"]
    config = load(tmp_path, rope_parameters=both, layer_types=kinds, sliding_window=64)
    assert (config.rope_theta, config.rope_local_base_freq) == (1e6, 1e4)
    assert [config.has_local_rope(layer) for layer in range(2)] == [True, False]
    told = genie_config(config, 128, ["a.bin"], parse_target("SM8750"))
    positions = told.dialog.target_engine.model.positional_encoding
    assert isinstance(positions, tuple)
    assert [(p.prefix, p.rope_theta) for p in positions] == [(None, 1e6), ("local_", 1e4)]


def test_qwen_has_windows_only_if_it_says_so_and_above_a_layer(tmp_path: Path) -> None:
    qwen = {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 1}
    qwen["num_key_value_heads"] = 4
    assert load(tmp_path, **qwen).sliding_window is None
    config = load(tmp_path, **qwen, use_sliding_window=True)
    assert [config.has_window(layer) for layer in range(2)] == [False, True]
    assert load(tmp_path, sliding_window=32).has_window(1)


KNOWN = "(known are linear, llama3, dynamic, yarn, longrope)"
SHORT = {"type": "su", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0], ORIGINAL: 64}
BY_KIND = {"full_attention": {"rope_theta": 1e6}, **LOCAL_SCALING}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 5}, "hidden_size is not a multiple of num_attention_heads"),
        ({"partial_rotary_factor": 0.2}, "odd number of rotary dimensions"),
        ({"partial_rotary_factor": 0.01}, "odd number of rotary dimensions, or none"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"vocab_size": 5}, "outside the vocabulary"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"model_type": 3}, "model_type"),
        ({"model_type": "a\nb"}, "model_type"),
        ({"model_type": "\0"}, "model_type"),
        ({"bos_token_id": -2}, "bos_token_id"),
        *(
            ({"rope_scaling": {"type": kind, "factor": 4.0}}, f"rope scaling {kind!r} {KNOWN}")
            for kind in ("proportional", "mrope", None, 3, ["linear"])
        ),
        ({"rope_scaling": SHORT}, "a factor for every second rotary dimension"),
        ({"rope_parameters": BY_KIND}, "rope scaling of layers with a sliding window"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        load(tmp_path, **changes)
    assert reason in str(caught.value)


def test_a_checkpoint_of_a_known_family_is_read(tmp_path: Path) -> None:
    for fixture in ("torchscript-qwen3", "dynamo-phi3"):
        path = EXPORTS / fixture / "config.json"
        assert isinstance(load_checkpoint_config(path), CheckpointConfig)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "model_type 'unheard of' is no family that can be exported"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, "'qwen3_moe' is a mixture of experts"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "is a mixture of experts"),
        ({"model_type": "gemma3", "vision_config": {"a": 1}}, "is a model that sees"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "see later ones"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is an encoder-decoder"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantized already"),
        ({"model_type": "llama", "architectures": ["Other"]}, "architectures of other kinds"),
        ({"model_type": "baichuan", "num_hidden_layers": 40}, "Baichuan 13B has ALiBi"),
        ({"model_type": "llama", "bos_token_id": 1, "hidden_act": "relu2"}, "hidden_act 'relu2'"),
    ],
)
def test_a_refused_checkpoint_is_told_what_works(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelFileError, match=reason) as caught:
        load_checkpoint_config(write(tmp_path, **changes))
    works = "silu, gelu, gelu_tanh" if "hidden_act" in changes else "granite, llama, mistral"
    assert works in str(caught.value)


KEYS = [*DecoderConfig.model_fields, "rope_parameters", "use_sliding_window", "architectures"]
ODD = (
    st.none()
    | st.booleans()
    | st.integers(-4, 300)
    | st.sampled_from([1 << 24, 1 << 63, 10**400, -(10**400)])
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["llama", "qwen2", "linear", "llama3", "default", "1e-5", "\ud800", "a\nb"])
)
VALUES = st.recursive(
    ODD,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "x"]),
            inner,
        )
    ),
    max_leaves=5,
)


@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_hostile_values_are_read_soundly_or_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    try:
        config = load(tmp_path, **changes)
    except ModelFileError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "\n" not in refusal
        assert len(refusal) < 500
        return
    assert config.num_key_value_heads * config.group_size == config.num_attention_heads
    assert 2 <= config.rotary_dim <= config.head_dim
    assert config.rotary_dim % 2 == 0
    assert max(*config.begin, *config.eos_token_ids) < config.vocab_size
    if config.head_dim <= 1024:
        cos, sin = rope_tables(config, 3)
        assert cos.shape == sin.shape == (3, config.rotary_dim // 2)
        assert abs(cos**2 + sin**2 - 1).max() < 1e-5


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '"x"', "null", "[" * 5000, "{", '{"hidden_size": 1', "\x00", "9" * 5000]
)
def test_what_is_no_object_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelFileError) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        *(({"model_type": kind}, "bos_token_id", 1) for kind in ("llama", "mistral", "phi3")),
        ({"model_type": "qwen2", "eos_token_id": 9}, "bos_token_id", None),
        ({"model_type": "llama", "bos_token_id": -1}, "bos_token_id", None),
        ({"model_type": "qwen2"}, "attention_bias", True),
        ({"model_type": "qwen2"}, "attention_out_bias", False),
        ({"sliding_window": 32}, "sliding_window", 32),
        ({"sliding_window": 32, "use_sliding_window": False}, "sliding_window", None),
        ({"sliding_window": 32, "layer_types": ["full_attention"] * 2}, "sliding_window", None),
        ({"model_type": "llama", "sliding_window": 8}, "sliding_window", None),
        ({"model_type": "gemma", "sliding_window": 8}, "sliding_window", None),
        ({"model_type": "llama", "logits_scaling": 2.0}, "logits_multiplier", 1.0),
        ({"model_type": "llama", "final_logit_softcapping": 2.0}, "final_logit_softcapping", None),
        ({"model_type": "qwen2", "residual_multiplier": 2.0}, "residual_multiplier", 1.0),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 5.0},
            "attn_logit_softcapping",
            None,
        ),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, "attn_logit_softcapping", None),
        ({"model_type": "gemma2"}, "attn_logit_softcapping", 50.0),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_act", "gelu"),
        ({"model_type": "gemma", "hidden_act": "gelu", **V5}, "hidden_act", "gelu_tanh"),
        ({"model_type": "gemma", "hidden_act": "gelu", **V4}, "hidden_act", "gelu"),
        ({"model_type": "smollm3"}, "rope_theta", 2e6),
        ({"model_type": "phi3"}, "rms_norm_eps", 1e-5),
        ({"model_type": "olmo2"}, "rms_norm_eps", 1e-5),
        ({"model_type": "glm"}, "rms_norm_eps", 1.5625e-07),
        ({"model_type": "stablelm"}, "rms_norm_eps", 1e-5),
        ({"model_type": "llama", "attention_bias": None, **V4}, "attention_bias", False),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 7.0}, **V4}, "rope_theta", 1e4),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 7.0}, **V5}, "rope_theta", 7.0),
    ],
)
def test_absent_null_and_foreign_keys_mean_what_transformers_means(
    tmp_path: Path, changes: dict[str, Any], key: str, value: object
) -> None:
    config = load(tmp_path, num_key_value_heads=4, head_dim=16, **changes)
    assert getattr(config, key) == value


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "llama", "rms_norm_eps": None}, "rms_norm_eps is null"),
        ({"model_type": "llama", "attention_bias": None, **V5}, "attention_bias is null, which"),
        ({"model_type": "gemma", "hidden_act": "gelu"}, "no transformers_version to tell"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
            "sliding_window is null",
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "ministral"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5, **V4}, "LlamaForCausalLM cannot"),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "longrope"),
        ({"model_type": "stablelm", "head_dim": 8}, "head_dim of a stablelm"),
        ({"model_type": "gemma3_text", "rope_parameters": LOCAL_SCALING}, "with a sliding window"),
    ],
)
def test_what_transformers_refuses_or_reads_in_two_ways_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelFileError, match=reason) as caught:
        load_checkpoint_config(write(tmp_path, **{"num_key_value_heads": 4} | changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "major", "said"),
    [
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 7.0}, **V5}, 5, None),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 7.0}, **V5}, 6, None),
        (
            {"model_type": "llama", "rope_parameters": {"rope_theta": 7.0}, **V5},
            4,
            "rope_theta is 10000.0 in transformers 4 and 7.0 in transformers 5",
        ),
        ({"model_type": "llama", "rope_theta": 7.0, **V4}, 5, None),
        ({"model_type": "llama", "attention_bias": None, **V4}, 5, "attention_bias is null, which"),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 7.0}}, 4, None),
        ({"model_type": "another", **V4}, 5, None),
    ],
)
def test_what_another_major_of_transformers_reads_differently_is_told(
    tmp_path: Path, changes: dict[str, Any], major: int, said: str | None
) -> None:
    path = write(tmp_path, **{"num_key_value_heads": 4} | changes)
    assert (other_reading(path, major) or "the same").startswith(said or "the same")


def test_a_family_that_one_release_lacks_is_read_as_the_other_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = family_keys.read_tables()
    older = {name: table for name, table in tables[4].items() if name != "qwen3"}
    monkeypatch.setattr(family_keys, "read_tables", lambda: {**tables, 4: older})
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    plain = {"model_type": "qwen3", "rope_theta": 1e4, "tie_word_embeddings": True, **heads}
    assert load_checkpoint_config(write(tmp_path, **plain)) == load_checkpoint_config(
        write(tmp_path, **plain, **V5)
    )
    assert unread_keys(write(tmp_path, **plain))[0] == "Qwen3ForCausalLM"
    path = write(tmp_path, **plain, **V4)
    with pytest.raises(ModelFileError, match="transformers 4 has no qwen3"):
        load_checkpoint_config(path)
    assert other_reading(path, 5) == "transformers 4 has no qwen3"
    assert unread_keys(path) == ("", [])
