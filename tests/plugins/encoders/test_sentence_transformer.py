"""A folder of sentence-transformers as it is: exported, and built to the vectors that it has."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from buildlib.builder.sources import OnnxSource
from buildlib.errors import BuildError, InvalidOptionError
from buildlib.genai import GenAIBuilderFactory, GenAIBuilderHTP
from buildlib.numerics.runners import OnnxRunner
from buildlib.numerics.transformers import PYTHON_VARIABLE
from plugins.encoders.builder import EncoderBuild
from plugins.encoders.export import float_model
from plugins.encoders.inputs import TextTokens, embed_in_float, padded_inputs
from plugins.encoders.interface import Pooling, prompt_template, read_pooling
from tests.optional import needs_transformers

FOLDER = Path(__file__).parents[2] / "fixtures" / "encoders" / "sentence-bert"
LENGTH = 32
TEXT = "A ferry leaves the harbour. Bees? Snow fell all night, and nobody came.\n" * 8


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The folder as people get it, without ONNX."""
    folder = tmp_path / "sentence-bert"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.onnx"))
    return folder


@pytest.fixture
def python_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(path))
    return path


def builder(folder: Path, cache: Path, **options: object) -> GenAIBuilderHTP:
    made = GenAIBuilderFactory.create(folder, cache_root=cache, calibration_text=TEXT)
    return made.set_targets(["SM8750:emulator"]).set_options(options)


def wanted() -> tuple[list[str], np.ndarray]:
    sample = np.load(FOLDER / "sample.npz")
    return sample["texts"].tolist(), sample["vectors"]


def tokens(texts: list[str]) -> list[list[int]]:
    tokenizer = FOLDER / "tokenizer.json"
    return TextTokens(tokenizer, prompt_template(tokenizer), LENGTH).of(texts)


@needs_transformers
def test_its_export_has_the_vectors_of_torch(checkpoint: Path, tmp_path: Path) -> None:
    model = float_model(checkpoint, tmp_path)
    texts, vectors = wanted()
    for ours, theirs in zip(
        embed_in_float(model, tokens(texts), read_pooling(checkpoint)), vectors, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_what_is_built_has_the_vectors_of_torch(tmp_path: Path) -> None:
    build = builder(FOLDER, tmp_path).plan()
    assert isinstance(build, EncoderBuild)
    assert build.length == LENGTH  # of sentence_bert_config.json
    assert isinstance(build.sources.main, OnnxSource)
    stages = {node.stage.operation: node for node in build.stages()}
    assert list(stages) == ["import", "quantize", "compile", "package"]
    files = []
    for name, file in (("import", "model.onnx"), ("quantize", "encoder.qdq.onnx")):
        entry = stages[name].entry.folder
        entry.mkdir(parents=True, exist_ok=True)
        stages[name].stage.run(entry)
        files.append(entry / file)
    texts, vectors = wanted()
    for path, least in zip(files, (0.999999, 0.99), strict=True):  # of random weights, 16 wide
        runner = OnnxRunner(path)
        port = runner.ports.outputs["pooled_output"]
        for ids, theirs in zip(tokens(texts), vectors, strict=True):
            (ours,) = port.dequantize(runner.run(padded_inputs(ids, LENGTH, 0))[port.name])
            assert np.linalg.norm(ours) == pytest.approx(1, abs=1e-3)
            assert ours @ theirs > least


def test_without_torch_one_line_says_what_to_install(
    checkpoint: Path, tmp_path: Path, python_without_torch: Path
) -> None:
    reason = f"torch is not installed: {python_without_torch} -m pip install torch transformers"
    with pytest.raises(BuildError, match="has no ONNX, and cannot be exported") as caught:
        builder(checkpoint, tmp_path).plan()
    assert reason in str(caught.value)
    with pytest.raises(BuildError, match="torch is not installed"):
        float_model(checkpoint, tmp_path)  # as a reference
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [("spinquant",), ("gptq", "gptaq")])
def test_techniques_of_decoders_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidOptionError, match="an encoder takes one"):
        builder(FOLDER, tmp_path, **{"quantization.techniques": names}).plan()


def test_the_modules_decide_the_build(tmp_path: Path) -> None:
    """Another pooling is another import, and a change of its file is seen."""
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    one = builder(folder, tmp_path).plan()
    assert {path.name for path in one.files()} >= {"modules.json", "sentence_bert_config.json"}
    before = one.stages()[0].entry.hash
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert read_pooling(folder) == Pooling("cls", normalized=True)
    assert builder(folder, tmp_path).plan().stages()[0].entry.hash != before
