"""`qnnfarm build` with nothing changed: quick, and what is there is not copied again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli.build import ModelOptions, ToolchainOptions
from suites.models import tiny_llama
from tests.harness.cli.conftest import Run

OPTIONS = ("--target", "SM8750:emulator", "--ar", "1,32", "--cl", "192", "--splits", "2")


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and date of each file."""
    status = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (one.st_ino, one.st_mtime_ns) for name, one in status.items()}


def test_an_unchanged_build_looks_at_files_alone(
    qnnfarm: Run, build_cache: Path, tmp_path: Path, reference_outputs: object
) -> None:
    model, out = tmp_path / tiny_llama.folder().name, tmp_path / "out"
    shutil.copytree(tiny_llama.folder(), model)
    build = ("build", model, *OPTIONS, "--out", out, "--json")
    first = qnnfarm(*build)
    assert first.returncode == 0, first.stderr
    there = state(out)
    (built,) = json.loads(first.stdout)

    again = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "harness.cli", *map(str, build)],
        env=os.environ | {"QNNFARM_CACHE_DIR": str(build_cache)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (told,) = json.loads(again.stdout)
    stages = built["stages_run"] + built["stages_reused"]
    assert told == built | {"stages_run": 0, "stages_reused": stages, "seconds": told["seconds"]}
    assert state(out) == there
    imported = {line.rpartition("|")[2].strip() for line in again.stderr.splitlines()}
    assert "buildlib.cache.finished_builds" in imported
    assert imported.isdisjoint({"onnx", "onnx_ir", "numpy", "onnxruntime", "buildlib.genai"})

    other = qnnfarm(*build, "--recipe", "w4a16-rtn")
    assert other.returncode == 2  # another container than the one that is there
    assert "--overwrite" in other.stderr

    with (out / "tokenizer.json").open("a") as file:
        file.write(" ")
    refused = qnnfarm(*build)
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr
    mended = qnnfarm(*build, "--overwrite")
    assert mended.returncode == 0, mended.stderr
    assert json.loads(mended.stdout)[0]["sha256"] == built["sha256"]


@pytest.mark.parametrize(
    "given",
    [
        {"options_file": Path("options.yaml")},
        {"option": ["lora_config.lora_config_path=red"]},
        {"lora": Path("red")},
    ],
)
def test_equal_options_beside_other_files_are_another_build(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "options.yaml").write_text("lora_config: {lora_config_path: red}")
        monkeypatch.chdir(tmp_path / name)
        model = ModelOptions(tmp_path, ["SM8750"], tmp_path / "out", **given)
        identities.append(model.identity(ToolchainOptions()))
    assert identities[0] != identities[1]


def test_a_dry_run_shows_what_a_change_builds_again(
    qnnfarm: Run, tmp_path: Path, reference_outputs: object
) -> None:
    """The cache has the reference model; parts of a third context length are new."""

    def states(*options: str) -> list[tuple[str, str, str]]:
        done = qnnfarm(
            "build", tiny_llama.folder(), *OPTIONS, *options, "--out", tmp_path / "out",
            "--dry-run", "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [(row["stage"], row["graph"], row["state"]) for row in json.loads(done.stdout)]

    whole = states()
    assert len(whole) == 16
    assert {state for _, _, state in whole} == {"cached"}
    phone = states("--target", "SM8750", "-O", "graphs.vtcm_size_in_mb=2")[len(whole) :]
    cached = {stage for stage, _, state in phone if state == "cached"}
    assert cached.issuperset({"load", "optimize", "arcl", "transform", "quantize"})
    assert ("package", "SM8750", "to run") in phone
    assert states("--recipe", "w8a8")[-1] == ("quantize", "encodings", "to run")
    assert not (tmp_path / "out").exists()
