"""A checkpoint folder is loaded whole or refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import Llama3RopeScaling
from buildlib.errors import CheckpointError, UnsupportedModelError


def change(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.fixture
def copy(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


def test_it_loads(tiny: Path) -> None:
    checkpoint = Checkpoint.load(tiny)
    assert checkpoint.config.group_size == 3
    assert checkpoint.lm_head.name == "model.embed_tokens.weight"
    assert checkpoint.lm_head.numpy().dtype == np.float16


def test_a_sharded_checkpoint_is_the_same(tiny: Path, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, copy / file)
    (copy / "model.safetensors").unlink()
    weight_map = {name: file for file, held in files.items() for name in held}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = Checkpoint.load(copy).tensors
    for name, ref in Checkpoint.load(tiny).tensors.items():
        np.testing.assert_array_equal(found[name].numpy(), ref.numpy())
    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        Checkpoint.load(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        Checkpoint.load(copy)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_a_truncated_file_is_refused(copy: Path, keep: int) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=str(path)):
        Checkpoint.load(copy)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"model_type": "gemma4"}, UnsupportedModelError),
        ({"architectures": ["LlamaForSomethingElse"]}, UnsupportedModelError),
        ({"mlp_bias": True}, CheckpointError),
        ({"model_type": "phi3"}, CheckpointError),
        ({"model_type": "qwen2"}, CheckpointError),  # without the biases that it always has
        ({"model_type": "qwen3"}, CheckpointError),
        ({"attention_bias": True}, CheckpointError),
        ({"hidden_act": "relu2"}, UnsupportedModelError),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, UnsupportedModelError),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, CheckpointError),
        ({"hidden_size": 44}, CheckpointError),
        ({"hidden_size": -1}, CheckpointError),
        ({"hidden_size": "40"}, CheckpointError),
        ({"num_hidden_layers": 3}, CheckpointError),
        ({"num_hidden_layers": 10**9}, CheckpointError),
        ({"num_attention_heads": 0}, CheckpointError),
        ({"num_key_value_heads": 4}, CheckpointError),
        ({"head_dim": 13}, CheckpointError),
        ({"bos_token_id": None}, CheckpointError),
        ({"bos_token_id": 300}, CheckpointError),
        ({"eos_token_id": [1, -1]}, CheckpointError),
        ({"rope_theta": float("nan")}, CheckpointError),
        ({"tie_word_embeddings": False}, CheckpointError),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    copy: Path, changes: dict[str, Any], kind: type[CheckpointError]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.load(change(copy, **changes))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_several_eos_ids_and_llama3_scaling_are_read(copy: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = Checkpoint.load(change(copy, eos_token_id=[1, 5], rope_scaling=scaling)).config
    assert config.eos_token_ids == (1, 5)
    assert isinstance(config.rope_scaling, Llama3RopeScaling)
    assert config.rope_scaling.factor == 8.0
