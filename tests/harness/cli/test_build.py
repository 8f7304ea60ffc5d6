"""`qnnfarm build` with builder options: what comes out runs as it was asked for."""

import json
import re
from pathlib import Path

import pytest

from suites.models import tiny_llama
from tests.harness.cli.conftest import Run

MODEL = tiny_llama.folder()
TARGET = ("--target", "SM8750:emulator")


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_a_recipe_gives_its_bits(qnnfarm: Run, small_model: Path, tmp_path: Path) -> None:
    where = (*TARGET, "--ar", "1", "--cl", "48", "--splits", "1", "--out", tmp_path / "out")
    command = ("build", small_model, *where, "--recipe", "W4A16_RTN")
    built = qnnfarm(*command, "--max-kl", "5", "--json")
    assert built.returncode == 0, built.stderr
    (summary,) = json.loads(built.stdout)
    assert summary["precision"] == "W4A16"
    assert summary["size_bytes"] < 158_000  # of W8A16 162 kB
    lossy = qnnfarm(*command, "--overwrite", "--max-kl", "1e-6")  # nothing is made anew
    assert (lossy.returncode, lossy.stdout) == (1, "")
    assert "loses more than max_kl=1e-06" in lossy.stderr
    assert qnnfarm(*command, "--max-kl", "0").returncode == 2


def test_a_loss_above_the_bound_ends_a_build_before_it_compiles(
    qnnfarm: Run, outlier_model: Path, tmp_path: Path
) -> None:
    lossy = ("-O", "quantization.scaling=false", "-O", "quantization.kv_bitwidth=8")
    where = (*TARGET, "--ar", "1,32", "--cl", "192", "--out", tmp_path / "out")
    done = qnnfarm("build", outlier_model, *where, *lossy, "--recipe", "w8a16", "--max-kl", "0.1")
    assert (done.returncode, done.stdout) == (1, "")
    line = done.stderr.splitlines()[-1]
    assert re.match(r"qnnfarm: outlier_llama loses more than max_kl=0\.1: KL 0\.2", line), line
    assert "keys reach 155" in line
    assert line.endswith("quantization.kv_bitwidth=16")
    assert not (tmp_path / "out").exists()
    assert "convert" not in done.stderr
