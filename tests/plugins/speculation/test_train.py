"""`qnnfarm train`: what is refused in one line, and a training as users run it."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.buildlib.families import family_config, write_checkpoint
from tests.harness.cli.conftest import Run

TRAINS = all(find_spec(name) is not None for name in ("torch", "transformers"))
NEEDED = "training needs torch and transformers: pip install -e '.[train]'"


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, Path]:
    """A random checkpoint, and a text for it."""
    folder = write_checkpoint(tmp_path / "model", family_config("qwen3-yarn"))
    characters = np.random.default_rng(1).integers(3, 64, 1200) + 0x100
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, characters)))
    return folder, text


@pytest.mark.skipif(TRAINS, reason="torch and transformers are installed")
@pytest.mark.parametrize("kind", ["forecast", "draft"])
def test_the_missing_extra_is_named(qnnfarm: Run, model: tuple[Path, Path], kind: str) -> None:
    folder, text = model
    done = qnnfarm("train", kind, folder, "--text", text)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'qnnfarm[train]'" in done.stderr


@pytest.mark.skipif(not TRAINS, reason=NEEDED)
def test_a_training_says_how_to_build(
    qnnfarm: Run, model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, text = model
    out = tmp_path / "out" / "ssd.safetensors"
    words = ("train", "forecast", folder, "--text", text, "--out", out, "--prefix", 4)
    done = qnnfarm(*words, "--steps", 2, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert f"-O speculative_config.ssd_tensor_file={out}" in done.stdout
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    done = qnnfarm(*words, "--minutes", 0.1, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens_per_call"] >= 1.0
    done = qnnfarm(*words, "--device", "cuda:77")
    assert done.returncode == 2
    assert done.stderr.endswith("--device cpu always works\n")
