"""A `.mllm` file as a checkpoint and encodings: quantized again, it is the file."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.encodings.grid import weight_grid
from buildlib.encodings.model import Encoding
from plugins.mllm.canonical import restore_encodings, write_checkpoint
from plugins.mllm.config import ModelConfig
from plugins.mllm.contents import linears
from plugins.mllm.parameter_file import read_parameters
from plugins.mllm.tensors import Tensor
from tests.buildlib.conftest import MakeCheckpoint
from tests.plugins.mllm.mllm_files import write_files


def restore(
    make_checkpoint: MakeCheckpoint, folder: Path, **changes: int
) -> tuple[ModelConfig, Mapping[str, Tensor], Mapping[str, Encoding], Checkpoint]:
    files = write_files(make_checkpoint, folder / "m", cl=64, **changes)
    tensors = read_parameters(files.parameters).tensors
    (folder / "checkpoint").mkdir()
    write_checkpoint(tensors, files.config, files.aot, folder / "checkpoint")
    encodings = restore_encodings(tensors, files.config, files.aot).by_name()
    return files.config, tensors, encodings, Checkpoint.load(folder / "checkpoint")


@pytest.mark.parametrize(("head_bits", "width"), [(4, 64), (8, 64), (16, 64), (4, 48)])
def test_weights_have_the_integers_of_the_file(
    head_bits: int, width: int, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Blocks of inputs that 32 does not divide become 8 bits for each channel."""
    changes = {"head_bits": head_bits, "hidden_size": width}
    config, tensors, encodings, restored = restore(make_checkpoint, tmp_path, **changes)
    for one in linears(config):
        stored = tensors[f"{one.name}.weight"].load().reshape(one.inputs, one.outputs).T
        encoding = encodings[f"{one.name}.weight"]
        integers = weight_grid(encoding).quantize(restored.tensors[encoding.name].numpy())
        if f"{one.name}.scale1" in tensors:
            stored = np.where(stored > 7, stored - 16, stored)
            in_blocks = one.inputs % 32 == 0
            assert (encoding.enc_type == "LPBQ") == in_blocks
            if not in_blocks:
                factors = tensors[f"{one.name}.scale1"].load().reshape(one.outputs, -1)
                stored = stored * np.repeat(factors.astype(int), 16, axis=1)
        np.testing.assert_array_equal(integers.astype(int), stored)


def test_tables_and_activations_lie_on_the_grids_of_the_file(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    _, tensors, encodings, restored = restore(make_checkpoint, tmp_path)
    for name in ("model.embed_tokens", "model.layers.1.self_attn.k_norm", "model.norm"):
        encoding = encodings[f"{name}.weight"]
        steps = restored.tensors[encoding.name].numpy() / np.float32(encoding.scale[0])
        integers = np.rint(steps) - encoding.offset[0]
        np.testing.assert_array_equal(integers, tensors[f"{name}.weight"].load())
    scale = "model.layers.0.self_attn.q_rope_add_0_output_qdq.fake_quant.scale"
    ours = encodings["layer_0_q_first_rotated"].scale[0]
    assert ours == pytest.approx(float(tensors[scale].load()[0]) * 32**-0.5)
    cache = encodings["past_key_1_out"]
    assert (cache.bw, cache.offset) == (8, (-128,))
