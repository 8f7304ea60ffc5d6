"""Checkpoints with random weights, so that building is tested without a trained model."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from buildlib.checkpoint.checkpoint import expected_tensors
from buildlib.checkpoint.config import CheckpointConfig
from tests.buildlib.model_folders import write_tokenizer

MakeCheckpoint = Callable[..., Path]

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="session")
def make_checkpoint() -> MakeCheckpoint:
    """`make_checkpoint(folder, dtype=np.float16, **changes to the configuration)`."""

    def make(folder: Path, dtype: npt.DTypeLike = np.float16, **changes: object) -> Path:
        data = TINY | changes
        config = CheckpointConfig.model_validate(data)
        rng = np.random.default_rng(7)
        tensors = {}
        for name, shape in expected_tensors(config).items():
            values = rng.normal(size=shape)
            if len(shape) == 1:
                values = 1.0 + 0.1 * values
            else:
                values *= 0.5 if "embed" in name else 1.2 / np.sqrt(shape[1])
            tensors[name] = values.astype(dtype)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(data))
        write_tokenizer(folder, config.vocab_size, config.bos_token_id)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny fp16 checkpoint for all tests that do not change it."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_text() -> str:
    """Text of 400 tokens in the tiny checkpoint's vocabulary."""
    rng = np.random.default_rng(3)
    return "".join(chr(0x100 + int(i)) for i in rng.integers(2, 300, 400))


@pytest.fixture(scope="session")
def tiny_export(tiny: Path, tiny_text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint as the builder takes it, at AR 16 and CL 96."""
    return _export(tiny, tiny_text, tmp_path_factory.mktemp("export"))


def _export(checkpoint: Path, text: str, folder: Path) -> Path:
    from buildlib.graph.shape import GraphShape
    from tests.buildlib.model_folders import export_checkpoint

    return export_checkpoint(checkpoint, text, folder, GraphShape(16, 96), n_windows=3)


@pytest.fixture(scope="session")
def one_layer(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The least checkpoint: a build of it takes two thirds of the time of one of `tiny`.

    For tests of what happens to a build, whatever is computed. With one key/value head a row of the
    cache would have 12 bytes, and Genie 1.21 shifts rows of a size that 8 does not divide.
    """
    least = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return make_checkpoint(tmp_path_factory.mktemp("one-layer"), **least)


@pytest.fixture(scope="session")
def one_layer_export(
    one_layer: Path, tiny_text: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """That checkpoint as the builder takes it, at AR 16 and CL 96."""
    return _export(one_layer, tiny_text, tmp_path_factory.mktemp("one-layer-export"))


@pytest.fixture(scope="session")
def trained() -> Path:
    """The trained reference model."""
    folder = Path(__file__).parents[2] / "suites" / "models" / "tiny_llama"
    assert os.access(folder / "model.safetensors", os.R_OK)
    return folder


@pytest.fixture(scope="session")
def make_adapter() -> Callable[..., Path]:
    """`make_adapter(folder, {"self_attn.q_proj": (n_in, n_out)}, layers=2, rank=4, seed=0)`."""

    def make(
        folder: Path,
        modules: dict[str, tuple[int, int]],
        *,
        layers: int = 2,
        rank: int = 4,
        seed: int = 0,
        strength: float = 0.25,
        **changes: object,
    ) -> Path:
        rng = np.random.default_rng(seed)
        tensors = {}
        for layer in range(layers):
            for module, (n_in, n_out) in modules.items():
                stem = f"base_model.model.model.layers.{layer}.{module}"
                a = rng.normal(size=(rank, n_in)) / np.sqrt(n_in)
                b = rng.normal(size=(n_out, rank)) * strength * rank / 16
                tensors[f"{stem}.lora_A.weight"] = a.astype(np.float32)
                tensors[f"{stem}.lora_B.weight"] = b.astype(np.float32)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        targets = [module.rpartition(".")[2] for module in modules]
        data = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": targets}
        (folder / "adapter_config.json").write_text(json.dumps(data | changes))
        return folder

    return make
