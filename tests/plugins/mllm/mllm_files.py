"""Small models as files of mllm's ahead-of-time flow."""

from collections.abc import Callable
from pathlib import Path

from buildlib.checkpoint.config import load_checkpoint_config
from buildlib.targets import find_soc
from plugins.mllm.config import make_configs, write_config
from plugins.mllm.context import MllmFiles
from plugins.mllm.parameter_file import write_parameters
from plugins.mllm.quantization import quantize_checkpoint
from plugins.mllm.tensors import read_safetensors

QWEN = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def write_files(
    make_checkpoint: Callable[..., Path],
    folder: Path,
    *,
    cl: int,
    head_bits: int = 4,
    **changes: object,
) -> MllmFiles:
    """Quantize a random Qwen 3 without any technique, and write all that `aot compile` takes."""
    checkpoint = make_checkpoint(folder, **QWEN | changes)
    config = load_checkpoint_config(checkpoint / "config.json")
    model, aot = make_configs(config, find_soc("SM8750"), cl=cl, block_size=16, head_bits=head_bits)
    text = "".join(chr(0x100 + number) for number in range(2, config.vocab_size)) * 8
    weights = folder / "quantized.safetensors"
    quantize_checkpoint(checkpoint, model, aot, text, weights, n_samples=1, technique="none")
    write_parameters(folder / "m.mllm", list(read_safetensors(weights).values()))
    files = folder / "config_m.json", folder / "qnn_aot_cfg_m.json"
    write_config(files[0], model)
    write_config(files[1], aot)
    return MllmFiles(
        folder / "m.mllm", files[0], model, files[1], aot, checkpoint / "tokenizer.json"
    )
