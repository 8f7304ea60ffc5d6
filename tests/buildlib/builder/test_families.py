"""A build of every family computes on the emulator what its checkpoint does in float."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import load_config
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.numerics.divergence import token_losses
from buildlib.numerics.emulator import emulator_chains
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.targets import parse_target
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from tests.builders import builder_for
from tests.buildlib import families

pytestmark = pytest.mark.needs("libatomic1")

AR, CL = 8, 32


def build(folder: Path, cache: Path) -> Path:
    text = np.random.default_rng(3).integers(3, 64, 600)
    (folder / "text").mkdir()
    calibration = "".join(chr(0x100 + int(token)) for token in text)
    (folder / "text" / "calibration.txt").write_text(calibration, encoding="utf-8")
    return next(builder_for(folder, cache, [AR, 1], [CL], None).build().path.glob("*.bin"))


def sampled(loop: HostLoop, seed: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Return a text that a model makes by itself, and the logits after each token."""
    rng, tokens, rows = np.random.default_rng(seed), [1], []
    loop.reset()
    while len(tokens) < CL - 4:
        rows.append(loop.feed(tokens[-1:])[-1])
        weights = np.exp(rows[-1].astype(np.float64) - rows[-1].max())
        tokens.append(int(rng.choice(len(weights), p=weights / weights.sum())))
    return tokens, np.stack(rows)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in (*families.RECIPES, "baichuan")],
)
def test_the_perplexity_on_the_emulator_is_that_in_float(name: str, tmp_path: Path) -> None:
    folder = families.write_checkpoint(tmp_path / "model", families.family_config(name))
    binary = build(folder, tmp_path / "cache")
    config, soc = load_config(folder / "config.json"), parse_target("SM8750:emulator").soc
    chains = emulator_chains([binary], OrtQnnToolchain(), soc_model=soc.soc_model)
    decode = export_onnx(Checkpoint.load(folder), GraphShape(1, CL), tmp_path / "float")
    losses: list[tuple[float, float]] = []
    with (
        HostLoop({1: [OnnxRunner(decode, n_threads=1)]}, config) as exact,
        HostLoop(chains, config) as emulated,
    ):
        for seed in range(12):
            tokens, expected = sampled(exact, seed)
            emulated.reset()
            found = emulated.feed(tokens)[:-1]
            pair = (token_losses(logits, tokens[1:]).mean() for logits in (expected, found))
            losses.append((next(pair), next(pair)))
    exact_loss, emulated_loss = np.mean(losses, axis=0)
    assert abs(np.exp(emulated_loss - exact_loss) - 1.0) < 0.01
