"""`qnnfarm build` with builder options: what comes out runs as it was asked for."""

import json
import re
from pathlib import Path

import pytest

from harness.devices.device import Device
from suites.models import tiny_llama
from tests.harness.cli.conftest import Run

MODEL = tiny_llama.folder()
TARGET = ("--target", "SM8750:emulator")
SHAPE = ("--ar", "1,16", "--cl", "64", "--splits", "1")
EAGLET = """\
speculative_config:
  draft_model_path: head.onnx      # beside this file
  draft_len: 3
  n_branches: 2
arn_cl_options: {auto_regression_number: [1, 8], context_length: 64}
"""
SSD = (
    "-O", f"speculative_config.ssd_tensor_file={MODEL / 'ssd' / 'ssd_tensor.safetensors'}",
    "-O", "speculative_config.branches=[2]",
)  # fmt: skip


@pytest.fixture
def eaglet_options(tmp_path: Path) -> Path:
    """A file of options, and beside it the draft that it names."""
    for name in ("draft_model.onnx", "model.safetensors"):
        linked = "head.onnx" if name.endswith(".onnx") else name
        (tmp_path / linked).symlink_to(MODEL / "eaglet" / name)
    file = tmp_path / "eaglet.yaml"
    file.write_text(EAGLET)
    return file


@pytest.mark.slow
@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize("kind", ["ssd-q1", "eaglet"])
def test_a_container_that_speculates_is_built_and_speculates(
    qnnfarm: Run, kind: str, eaglet_options: Path, tmp_path: Path, virtual_device: Device
) -> None:
    options = SSD if kind == "ssd-q1" else ("--options", eaglet_options)
    built = qnnfarm("build", MODEL, *TARGET, *SHAPE, *options, "--out", tmp_path / "out")
    assert built.returncode == 0, built.stderr
    dialog = json.loads((tmp_path / "out" / "genie_config.json").read_text())["dialog"]
    assert dialog["type"] == kind
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert metadata["graphs"]["auto_regression_numbers"] == [1, 16]  # --ar comes before the file
    assert metadata["speculation"]["differing"] == 0
    prompt = ("--prompt", "In the beginning God created", "--max-tokens", "5", "--json")
    asked = qnnfarm("generate", tmp_path / "out", "--device", virtual_device.serial, *prompt)
    assert asked.returncode == 0, asked.stderr
    answer = json.loads(asked.stdout)
    assert answer["text"]
    assert answer["metrics"]["token_acceptance_rate"] > 1


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
