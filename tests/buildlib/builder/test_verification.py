"""Our reading of a model beside another's: two loops of ours here, and transformers where it is."""

import json
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from buildlib.builder.sources import CheckpointSource, OnnxSource, find_source
from buildlib.builder.verification import compare_models, verify_model
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import load_config
from buildlib.errors import BuildError, ModelWarning
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import link_into
from buildlib.graph.shape import GraphShape
from buildlib.numerics.evaluation import evaluate_model, record_float, text_perplexity
from buildlib.numerics.host_loop import HostLoop, open_onnx
from buildlib.numerics.transformers import TransformersModel, require_family
from tests.builders import builder_for
from tests.buildlib import families
from tests.buildlib.model_folders import copy_of_export
from tests.optional import needs_no_transformers, needs_transformers, needs_transformers_5

WINDOWS = [[5, 9, 33, 2, 47, 8, 13], [4, 4, 61, 25, 17]]


@pytest.fixture
def open_loop(tiny_export: Path) -> Callable[..., HostLoop]:
    """Opens the same ONNX by a configuration with other keys."""
    config = load_config(tiny_export / "config.json")

    def open_with(**changes: object) -> HostLoop:
        return open_onnx(tiny_export / "model.onnx", config.model_copy(update=changes))

    return open_with


def test_a_model_is_itself_and_another_reading_of_its_configuration_shows(
    open_loop: Callable[..., HostLoop],
) -> None:
    with open_loop() as ours, open_loop() as same, open_loop(rope_theta=1e6) as other:
        prefill, decode = compare_models(ours, same, [0, *WINDOWS[0]], 5)
        apart = compare_models(ours, other, [0, *WINDOWS[0]], 5)
    assert (prefill.steps, decode.steps) == (8, 5)
    for one in (prefill, decode):
        assert (one.kl, one.top1, one.relative, one.sqnr_db) == (0, 1, 0, math.inf)
    assert decode.loss < prefill.loss  # the continuation is the model's own choice
    assert min(one.relative for one in apart) > 1e-3
    assert apart[0].sqnr_db < 60


def test_models_that_give_no_numbers_are_not_compared(
    open_loop: Callable[..., HostLoop], tiny_export: Path, tmp_path: Path
) -> None:
    model = onnx.load(tiny_export / "model.onnx", load_external_data=False)
    (norm,) = (node for node in model.graph.node if "layer_1_mlp_norm" in node.output)
    (epsilon,) = (one for one in norm.attribute if one.name == "epsilon")
    epsilon.f = math.nan
    onnx.save(model, tmp_path / "model.onnx")
    for weights in tiny_export.glob("*.safetensors"):
        link_into(weights, tmp_path)
    broken = open_onnx(tmp_path / "model.onnx", load_config(tiny_export / "config.json"))
    with broken, open_loop() as fine, pytest.raises(BuildError, match="not finite"):
        compare_models(broken, fine, [0, 5], 1)


@needs_no_transformers
def test_what_is_not_installed_is_named_with_its_extra(
    tiny: Path, tiny_export: Path, tmp_path: Path
) -> None:
    builder = builder_for(tiny_export, tmp_path, [1, 16], [96], target="SM8750")
    made: list[object] = []
    for verify in (
        lambda: verify_model(CheckpointSource(tiny, "")),
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
    found = verify_model(CheckpointSource(folder, ""), prefill=70, decode=6)
    assert found.passed
    assert found.decode.steps == 6
    assert found.prefill.steps in {70, 58}  # 64 positions in all
    assert 0 < found.prefill.relative < 1e-4  # computed, not copied
    assert found.prefill.top1 == found.decode.top1 == 1


@needs_transformers
def test_an_export_is_held_against_the_checkpoint_beside_it(tmp_path: Path) -> None:
    folder = copy_of_export("torchscript-qwen2", tmp_path / "model")
    source = find_source(folder, None, calibrates=False)
    assert isinstance(source, OnnxSource)
    assert verify_model(source).passed
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= np.float32(1.01)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert not verify_model(source).passed


@needs_transformers
def test_transformers_scores_windows_as_the_onnx_does(tmp_path: Path) -> None:
    """In calls of 3 tokens, whose caches go on: not all at once."""
    folder = families.write_checkpoint(tmp_path / "model", families.family_config("olmo2"))
    model = export_onnx(Checkpoint.load(folder), GraphShape(4, 16), tmp_path / "onnx")
    config = load_config(folder / "config.json")
    with TransformersModel(folder) as reference, open_onnx(model, config) as ours:
        reference.largest_ar = 3
        expected = text_perplexity(ours, config, WINDOWS)
        assert text_perplexity(reference, config, WINDOWS) == pytest.approx(expected, rel=1e-5)
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
