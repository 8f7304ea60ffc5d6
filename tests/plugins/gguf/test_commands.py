"""`inspect` and `build` of a GGUF."""

import json
import re
from pathlib import Path

import pytest

from buildlib.builder.build import BuildOutputs
from suites.models import tiny_llama
from tests.harness.cli.conftest import Run
from tools.tiny_llama.gguf_file import write_gguf


def test_a_gguf(qnnfarm: Run, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny_llama.gguf")
    shown = qnnfarm("inspect", path)
    assert shown.returncode == 0, shown.stderr
    facts = dict(line.split(None, 1) for line in shown.stdout.splitlines() if " " in line.strip())
    assert (facts["architecture"], facts["builds"]) == ("llama", "as llama")
    assert facts["weights"] == "1,098,000: 100.0% F32"
    assert facts["blk.{0..3}.attn_q.weight"].split() == ["144x144", "F32"]
    answer = json.loads(qnnfarm("inspect", path, "--json").stdout)["gguf"]
    assert (answer["context_length"], answer["refused"]) == (512, None)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes()[:5000])
    refused = qnnfarm("inspect", broken)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "it is no GGUF file" in refused.stderr


@pytest.mark.variant
def test_a_gguf_of_the_same_weights_and_tokens_gives_the_same_graphs(
    qnnfarm: Run, reference_outputs: BuildOutputs, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny_llama.gguf")
    shape = ("--ar", "1,32", "--cl", "192", "--splits", "2")
    text = ("--calibration", tiny_llama.folder() / "text" / "calibration.txt")
    out = tmp_path / "out"
    built = qnnfarm("build", path, "--target", "SM8750:emulator", "--out", out, *shape, *text)
    assert built.returncode == 0, built.stderr
    assert re.match(r"model: read tiny_llama.gguf \(\d+\.\d s\)\n", built.stderr)
    made, reference = (
        json.loads((folder / "metadata.json").read_text())
        for folder in (out, reference_outputs.container)
    )
    assert [made["files"][name] for name in made["files"] if name.endswith(".bin")] == [
        reference["files"][name] for name in reference["files"] if name.endswith(".bin")
    ]
    assert made["model"]["inputs"]["tiny_llama.gguf"]
