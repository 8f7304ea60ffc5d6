"""Every family's checkpoint gives the logits that transformers computes from it.

They are kept as files. Where torch and transformers are installed, the last test asks transformers
itself, in a minute; both may lie in folders apart:

    PYTHONPATH=TORCH:TRANSFORMERS .venv/bin/python -m pytest tests/buildlib/graph/test_families.py
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import external_tensors, load_model
from buildlib.graph.shape import GraphShape
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.passes.arcl import convert_arcl
from tests.buildlib import families

CL, AR = 32, 8


def prefill_and_decode(
    folder: Path, out: Path, tokens: list[int], n_prefill: int
) -> npt.NDArray[np.float32]:
    checkpoint = Checkpoint.load(folder)
    model = export_onnx(checkpoint, GraphShape(AR, CL), out)
    decode = convert_arcl(model, GraphShape(1, CL), out / "decode.onnx")
    chains = {ar: [OnnxRunner(path, n_threads=1)] for ar, path in ((AR, model), (1, decode))}
    with HostLoop(chains, checkpoint.config) as loop:
        steps = [loop.feed(tokens[:n_prefill])]
        steps += [loop.feed([token]) for token in tokens[n_prefill:]]
    return np.concatenate(steps)


@pytest.mark.parametrize("name", families.RECIPES)
def test_prefill_and_ten_decode_steps_equal_transformers(name: str, tmp_path: Path) -> None:
    config, tokens, expected = families.load_family(name)
    folder = families.write_checkpoint(tmp_path / "model", config)
    logits = prefill_and_decode(folder, tmp_path / "out", tokens, families.N_PREFILL)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_prefill_and_ten_decode_steps_of_baichuan_equal_its_formulas(tmp_path: Path) -> None:
    tokens = families.load_family("llama-biases")[1]
    folder = families.write_checkpoint(tmp_path / "model", families.BAICHUAN)
    logits = prefill_and_decode(folder, tmp_path / "out", tokens, families.N_PREFILL)
    expected = families.baichuan_logits(tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_fused_projections_stay_in_their_file(tmp_path: Path) -> None:
    config, _, _ = families.load_family("phi3")
    folder = families.write_checkpoint(tmp_path / "model", config)
    out = export_onnx(Checkpoint.load(folder), GraphShape(AR, CL), tmp_path / "out")
    stored = {Path(tensor.path).name for tensor in external_tensors(load_model(out))}
    names = {str(tensor.name) for tensor in external_tensors(load_model(out))}
    assert stored == {"model.safetensors"}
    assert {"model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"} <= names
    assert out.stat().st_size < 40_000


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", families.RECIPES)
def test_the_files_are_what_transformers_computes(name: str) -> None:
    config, tokens, expected = families.load_family(name)
    again, tokens_again, logits = families.compute(name)
    volatile = {"transformers_version"}
    assert {k: v for k, v in again.items() if k not in volatile} == {
        k: v for k, v in config.items() if k not in volatile
    }
    assert tokens_again == tokens
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
