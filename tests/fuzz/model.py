"""The sound model that all mutations start from, small enough for thousands of builds."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from buildlib.checkpoint.checkpoint import expected_tensors
from buildlib.checkpoint.config import CheckpointConfig
from buildlib.graph.shape import GraphShape
from tests.buildlib.model_folders import export_checkpoint, write_tokenizer

SHAPE = GraphShape(8, 32)
OPTIONS: dict[str, object] = {
    "arn_cl_options.auto_regression_number": (1, 8),
    "arn_cl_options.context_length": (32,),
    "split_model.num_splits": 2,
}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_model(folder: Path) -> Path:
    """Fill `folder` with ONNX, external float weights, encodings, configuration and tokenizer."""
    checkpoint = folder.with_name(f"{folder.name}.checkpoint")
    checkpoint.mkdir(parents=True)
    config = CheckpointConfig.model_validate(CONFIG)
    rng = np.random.default_rng(11)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        values = rng.normal(size=shape)
        values = 1 + 0.1 * values if len(shape) == 1 else values * 1.2 / np.sqrt(shape[1])
        tensors[name] = values.astype(np.float32)
    save_file(tensors, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(checkpoint, config.vocab_size, config.bos_token_id)
    text = "".join(chr(0x100 + int(i)) for i in rng.integers(2, config.vocab_size, 200))
    return export_checkpoint(checkpoint, text, folder, SHAPE, n_windows=4)
