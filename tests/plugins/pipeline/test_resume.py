"""`qnnfarm pipeline run`: what an interrupted run leaves is gone on from, to the same bytes."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from plugins.pipeline.llm import LLMPipeline
from plugins.pipeline.stage import ModelFolder
from tests.command_line import qnnfarm, start

STAGES = ("model_loader", "quantization", "genai_builder")


def write_recipe(folder: Path, recipe: Mapping[str, Any]) -> Path:
    """A recipe's file with a cache beside it, and nothing to evaluate."""
    folder.mkdir()
    kept = {key: value for key, value in recipe.items() if key != "evaluator_config"}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**kept, "cache_dir": "cache"}, sort_keys=False))
    return path


def begin(recipe: Path, out: IO[bytes], err: IO[bytes]) -> BaseProcess:
    words = ["pipeline", "run", str(recipe), "--out", str(recipe.parent / "container")]
    return start(words, cwd=recipe.parent, env=dict(os.environ), streams=(out, err))


def finish(recipe: Path) -> dict[str, bool]:
    done = qnnfarm("pipeline", "run", recipe, "--out", recipe.parent / "container", "--json")
    assert done.returncode == 0, done.stderr
    return {one["stage"]: one["reused"] for one in json.loads(done.stdout)["stages"]}


def content(recipe: Path) -> dict[str, str]:
    """SHA-256 of everything that a run has made: the container, and the quantized model."""
    manifest = json.loads((recipe.parent / "cache/tiny_llama/pipeline_manifest.json").read_text())
    assert [stage["name"] for stage in manifest["stages"]] == list(STAGES)
    quantized = Path(manifest["stages"][1]["output"]["model"]["path"])
    return digests(recipe.parent / "container", quantized)


def digests(container: Path, quantized: Path) -> dict[str, str]:
    files = [path for path in container.rglob("*") if path.is_file() and path.name[0] != "."]
    files += [quantized / "model.onnx", quantized / "model.encodings"]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    metadata = json.loads((container / "metadata.json").read_text())
    found["metadata.json"] = metadata["container_sha256"]  # the rest has the time of the build
    return found


def wait_for(text: str, errors: Path, process: BaseProcess) -> None:
    deadline = time.monotonic() + 240
    while text not in errors.read_text():
        assert process.is_alive(), errors.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_and_an_interrupted_run_go_on_to_the_same_bytes(
    built: LLMPipeline, tmp_path: Path
) -> None:
    model = built.outputs("quantization")["model"]
    assert isinstance(model, ModelFolder)
    undisturbed = digests(built.export(tmp_path / "undisturbed"), model.path)
    cut = write_recipe(tmp_path / "cut", built.manifest.recipe)
    for after, pause, number, code in (
        ("1/3 model_loader", 0.2, signal.SIGKILL, -signal.SIGKILL),
        ("2/3 quantization", 1.0, signal.SIGINT, 130),
    ):
        errors = tmp_path / f"{number}.txt"
        with (tmp_path / "out").open("wb") as out, errors.open("wb") as err:
            process = begin(cut, out, err)
            wait_for(after, errors, process)
            time.sleep(pause)
            os.kill(process.pid or 0, number)
            process.join(200)
        assert process.exitcode == code, errors.read_text()
    assert "finished stages are kept" in errors.read_text()
    assert "Traceback" not in errors.read_text()
    reused = finish(cut)
    assert reused["model_loader"]
    assert reused["quantization"]
    assert content(cut) == undisturbed
