"""Our reading of a model beside that of transformers, where it is."""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from buildlib.builder.sources import CheckpointSource, OnnxSource, find_source
from buildlib.builder.verification import verify_model
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import load_config
from buildlib.errors import BuildError, ModelWarning
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.numerics.evaluation import evaluate_model, record_float, text_perplexity, text_samples
from buildlib.numerics.host_loop import open_onnx
from buildlib.numerics.transformers import TransformersModel, require_family
from tests.builders import builder_for
from tests.buildlib import families
from tests.buildlib.model_folders import copy_of_export
from tests.optional import needs_no_transformers, needs_transformers, needs_transformers_5

WINDOWS = [[5, 9, 33, 2, 47, 8, 13], [4, 4, 61, 25, 17]]


@needs_no_transformers
def test_what_is_not_installed_is_named_with_its_extra(
    tiny: Path, tiny_export: Path, tmp_path: Path
) -> None:
    builder = builder_for(tiny_export, tmp_path, [1, 16], [96], target="SM8750")
    made: list[object] = []
    for verify in (
        lambda: list(verify_model(CheckpointSource(tiny, ""))),
        lambda: builder.verify(reference_with="transformers", on_stage=made.append),
    ):
        with pytest.raises(BuildError, match=r"pip install 'qnnfarm\[reference\]'"):
            verify()
    assert not made  # refused before the first stage


@needs_transformers_5
@pytest.mark.parametrize("name", ["gemma2", "phi3-longrope", "llama-dynamic"])
def test_a_family_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    """With windows and bounded logits, with two lists of frequencies, at the longest context."""
    folder = families.write_checkpoint(tmp_path / "model", families.family_config(name))
    reference, steps, prefill, decode = verify_model(CheckpointSource(folder, ""))
    assert [row.calls for row in (reference, steps)] == ["prefill", "decode"]
    for row in (prefill, decode):
        assert row.passed
        assert row.divergence is not None
        assert 0 < row.divergence.relative < 1e-4  # computed, not copied
        assert row.divergence.top1 == 1
    assert prefill.divergence is not None
    assert prefill.divergence.steps in {95, 63}  # 64 positions in all


@needs_transformers
def test_an_export_is_held_against_the_checkpoint_beside_it(tmp_path: Path) -> None:
    folder = copy_of_export("torchscript-qwen2", tmp_path / "model")
    source = find_source(folder, None, calibrates=False)
    assert isinstance(source, OnnxSource)
    assert all(row.passed for row in verify_model(source))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= np.float32(1.01)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert not all(row.passed for row in verify_model(source))


@needs_transformers
def test_transformers_scores_windows_as_the_onnx_does(tmp_path: Path) -> None:
    """In calls of 3 tokens, whose caches go on: not all at once."""
    folder = families.write_checkpoint(tmp_path / "model", families.family_config("olmo2"))
    model = export_onnx(Checkpoint.load(folder), GraphShape(4, 16), tmp_path / "onnx")
    config = load_config(folder / "config.json")
    with TransformersModel(folder) as reference, open_onnx(model, config) as ours:
        reference.largest_ar = 3
        samples = text_samples(WINDOWS, config.begin)
        expected = text_perplexity(ours, samples)
        assert text_perplexity(reference, samples) == pytest.approx(expected, rel=1e-5)
        with record_float(model, config, WINDOWS) as logits:
            assert evaluate_model(reference, logits).kl < 1e-9


@needs_transformers
def test_a_file_that_the_other_major_wrote_is_warned_of(tmp_path: Path) -> None:
    folder = families.write_checkpoint(tmp_path / "model", families.family_config("olmo2"))
    config = json.loads((folder / "config.json").read_text())
    other = "4.57.6" if version("transformers").startswith("5") else "5.23.0"
    config |= {"transformers_version": other, "rope_parameters": {"rope_theta": 7.0}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(ModelWarning, match=r"json.*rope_theta is .* in transformers 5"):
        require_family(folder)


@needs_transformers
def test_what_transformers_cannot_read_is_said_in_a_line(tmp_path: Path) -> None:
    remote = families.write_checkpoint(tmp_path / "remote", families.family_config("baichuan"))
    config = json.loads((remote / "config.json").read_text())
    names = {"AutoConfig": "remote.Config", "AutoModelForCausalLM": "remote.Model"}
    (remote / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    (remote / "remote.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    torn = families.write_checkpoint(tmp_path / "torn", families.family_config("olmo2"))
    tensors = load_file(torn / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, torn / "model.safetensors", {"format": "pt"})
    for refused, folder, reason in (
        (TransformersModel, remote, "no family 'baichuan'.*never run"),
        (require_family, remote, "no family 'baichuan'.*never run"),
        (TransformersModel, torn, "no weights for.*1.mlp"),
    ):
        with pytest.raises(BuildError, match=reason) as caught:
            refused(folder)
        assert "\n" not in str(caught.value)
    require_family(torn)  # which looks at no weights
    assert not (tmp_path / "ran").exists()
