"""The training script, where torch is installed (extra `train`)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install torch")

from suites.models import tiny_llama  # noqa: E402
from tools.tiny_llama import numpy_model, torch_model, train  # noqa: E402
from tools.tiny_llama.architecture import Architecture  # noqa: E402


def test_torch_and_numpy_agree(architecture: Architecture) -> None:
    weights = numpy_model.load_weights(tiny_llama.folder())
    ids = np.arange(2, 200, dtype=np.int64)
    parameters = {name: torch.from_numpy(array) for name, array in weights.items()}
    found = torch_model.logits(architecture, parameters, torch.from_numpy(ids)[None])[0].numpy()
    np.testing.assert_allclose(found, numpy_model.logits(architecture, weights, ids), atol=2e-3)


RECIPE = train.Recipe(steps=3, warmup_steps=1, batch_tokens=64, lengths=(32,))


@pytest.fixture(scope="module")
def architecture() -> Architecture:
    return Architecture.load(tiny_llama.folder())


def test_same_seed_gives_same_weights(architecture: Architecture, tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        recipe = dataclasses.replace(RECIPE, seed=seed)
        parameters = train.train(recipe, architecture, torch.arange(2, 1000))
        train.save_checkpoint(parameters, tmp_path / name)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert files[0] != files[2]
    assert Architecture.load(tmp_path / "a") == architecture
    assert not list(tmp_path.rglob("*.part"))


def test_loss_falls(architecture: Architecture, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = train.Recipe(steps=8, warmup_steps=1, batch_tokens=256, lengths=(64,))
    train.train(recipe, architecture, torch.arange(2, 400).repeat(3), log_every=1)
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] - 0.3


def test_some_windows_begin_a_text(architecture: Architecture) -> None:
    firsts = []
    for step in range(60):
        windows = train.batch(train.Recipe(), architecture, torch.arange(2, 5000), step)
        assert windows.shape == ((4, 513) if step % 3 == 2 else (8, 257))
        firsts.append(windows[:, 0])
    begins = torch.cat(firsts) == architecture.bos_token_id
    assert 0.15 < begins.double().mean().item() < 0.35
