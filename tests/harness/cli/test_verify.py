"""`qnnfarm verify`: exit codes, and what is said where torch and transformers are not installed."""

import json
from pathlib import Path

import pytest

from suites.models import tiny_llama
from tests.buildlib.model_folders import copy_of_export
from tests.harness.cli.conftest import Run
from tests.optional import needs_no_transformers, needs_transformers

MODEL = tiny_llama.folder()
HELD_OUT = MODEL / "text" / "heldout.txt"


@needs_no_transformers
@pytest.mark.parametrize(
    "command",
    [
        ("verify", MODEL),
        ("build", MODEL, "--target", "SM8750", "--verify", "--reference-with", "transformers"),
    ],
)
def test_the_extra_is_named_before_any_work(
    qnnfarm: Run, command: tuple[object, ...], tmp_path: Path
) -> None:
    out = ("--out", tmp_path / "out") if command[0] == "build" else ()
    done = qnnfarm(*command, *out)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'qnnfarm[reference]'" in done.stderr
    assert not (tmp_path / "out").exists()


@needs_transformers
def test_the_exit_code_says_whether_it_is_the_same_model(qnnfarm: Run, tmp_path: Path) -> None:
    same = qnnfarm(
        "verify", MODEL, "--text", HELD_OUT, "--decode", "4", "--prefill", "40", "--json"
    )
    assert same.returncode == 0, same.stderr
    found = json.loads(same.stdout)
    assert (found["prefill"]["tokens"], found["decode"]["tokens"]) == (40, 4)
    assert found["prefill"]["perplexity"] == pytest.approx(found["prefill"]["perplexity_float"])
    export = copy_of_export("torchscript-qwen2", tmp_path / "model")
    weights = bytearray((export / "model.safetensors").read_bytes())
    weights[-4:] = b"\x00\x00\x80\x3f"  # another last weight, which is 1
    (export / "model.safetensors").write_bytes(weights)
    other = qnnfarm("verify", export)
    assert other.returncode == 1, other.stderr
    assert "NOT the same model" in other.stdout
