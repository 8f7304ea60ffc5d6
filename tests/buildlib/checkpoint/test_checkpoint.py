"""A checkpoint folder is loaded whole or refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from buildlib.checkpoint import tensor_file
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.errors import ModelFileError


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
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, copy / file)
    (copy / "model.safetensors").unlink()
    weight_map = {name: file for file, part in files.items() for name in part}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    sharded = Checkpoint.load(copy).tensors
    for name, ref in Checkpoint.load(tiny).tensors.items():
        np.testing.assert_array_equal(sharded[name].numpy(), ref.numpy())
    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "../a.safetensors"}}))
    with pytest.raises(ModelFileError, match="outside its folder"):
        Checkpoint.load(copy)


@pytest.mark.parametrize(
    ("name", "keep"),
    [("config.json", None), *(("model.safetensors", keep) for keep in (None, 0, 4, 100, 5000))],
)
def test_a_missing_or_truncated_file_is_named(copy: Path, name: str, keep: int | None) -> None:
    content = (copy / name).read_bytes()
    (copy / name).unlink()
    if keep is not None:
        (copy / name).write_bytes(content[:keep])
    with pytest.raises(ModelFileError, match=str(copy / name)):
        Checkpoint.load(copy)


@pytest.mark.parametrize(
    ("changes", "is_sound"),
    [
        ({"model_type": "gemma4"}, True),
        ({"architectures": ["LlamaForSomethingElse"]}, True),
        ({"mlp_bias": True}, False),
        ({"model_type": "phi3"}, False),
        ({"model_type": "qwen2"}, False),  # without the biases that it always has
        ({"model_type": "qwen3"}, False),
        ({"attention_bias": True}, False),
        ({"hidden_act": "relu2"}, True),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, True),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, False),
        ({"hidden_size": 44}, False),
        ({"num_hidden_layers": 3}, False),
        ({"num_key_value_heads": 4}, False),
        ({"tie_word_embeddings": False}, False),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    copy: Path, changes: dict[str, Any], is_sound: bool
) -> None:
    with pytest.raises(ModelFileError) as caught:
        Checkpoint.load(change(copy, **changes))
    assert (": unsupported: " in str(caught.value)) is is_sound
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def rewrite(folder: Path, **changes: npt.NDArray[Any] | None) -> Path:
    """Replace, add or (None) remove tensors; `__` stands for a dot in their names."""
    tensors = load_file(folder / "model.safetensors")
    for key, values in changes.items():
        name = key.replace("__", ".")
        if values is None:
            del tensors[name]
        else:
            tensors[name] = values
    save_file(tensors, folder / "model.safetensors")
    return folder


BIAS = np.zeros(72, np.float16)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("model__norm__weight", None, "'model.norm.weight' is missing"),
        ("model__norm__weight", BIAS, r"'model.norm.weight' is \[72\], config.json says \[40\]"),
        ("model__layers__0__self_attn__q_proj__bias", BIAS, "q_proj.bias' has no place"),
        ("model__layers__2__mlp__up_proj__weight", BIAS, "a llama of 2 layers"),
        ("visual__proj", BIAS, "'visual.proj' has no place"),
        ("lm_head__weight", np.ones((300, 40), np.float16), "differs from the embedding"),
        ("lm_head__weight", np.ones((200, 40), np.float16), "differs from the embedding"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    copy: Path, name: str, values: npt.NDArray[Any] | None, said: str
) -> None:
    rewrite(copy, **{name: values})
    with pytest.raises(ModelFileError, match=said):
        Checkpoint.load(copy).check_content()


def test_what_others_store_beside_the_weights_is_no_fault(copy: Path) -> None:
    embedding = load_file(copy / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(
        copy,
        model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(6, np.float32),
        lm_head__weight=embedding,
    )
    Checkpoint.load(copy).check_content()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, None])
def test_weights_that_are_no_numbers_are_named_with_their_place(
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    dtype: npt.DTypeLike,
    value: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_file, "_CHUNK_BYTES", 1000)
    folder = make_checkpoint(tmp_path / "model", dtype)
    checkpoint = Checkpoint.load(folder)
    ref = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]
    largest = ml_dtypes.finfo(dtype).max  # type: ignore[no-untyped-call]
    values = np.memmap(ref.path, dtype, mode="r+", offset=ref.offset, shape=ref.shape)
    values[7, 5], values[31, 60] = -largest, largest if value is None else value
    values.flush()
    if value is None:
        checkpoint.check_content()
        return
    with pytest.raises(ModelFileError, match=r"down_proj.weight': -?(nan|inf) at \[31, 60\]"):
        checkpoint.check_content()


@pytest.mark.parametrize(
    ("config", "added", "said"),
    [
        ({}, [AddedToken("<a>", special=True)], "'<a>' has the id 300.*embeddings for 300"),
        ({}, [AddedToken("<image_soft_token>", special=True)], None),
        ({"eos_token_id": [1, 298, 299]}, [], "no token 299, the eos_token_id"),
        ({"eos_token_id": [1, 298]}, [], None),
    ],
)
def test_the_tokenizer_of_another_model_is_refused(
    copy: Path, config: dict[str, object], added: list[AddedToken], said: str | None
) -> None:
    change(copy, **config)
    path = copy / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    if not added:
        tokenizer["model"]["vocab"].popitem()
    changed = Tokenizer.from_str(json.dumps(tokenizer))
    changed.add_special_tokens(added)
    changed.save(str(path))
    checkpoint = Checkpoint.load(copy)
    if said is None:
        checkpoint.check_content()
        return
    with pytest.raises(ModelFileError, match=said):
        checkpoint.check_content()
