"""`qnnfarm debug tensor`: inner values of a step on a device beside those of the float model."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from buildlib.container.container import GenAIContainer
from buildlib.errors import CacheError, InvalidOptionError
from buildlib.graph.shape import GraphShape
from harness.devices.device import Device
from harness.errors import RunnerError, RuntimeOutputError, WrongUseError
from harness.runtimes.base import GenerationRequest, RuntimeOptions
from plugins.diagnosis.debug import FloatReference
from plugins.diagnosis.graph_runtime import GraphRuntime
from plugins.diagnosis.graph_tensors import parse_dump
from plugins.diagnosis.inner_tensors import optimized_model
from suites.models import tiny_llama

SHAPE = GraphShape(32, 192)
PROMPT = "In the beginning God created the heaven and the earth. And God said,"


@pytest.fixture(scope="module")
def graph(virtual_device: Device, tiny_bundle: Path) -> Iterator[GraphRuntime]:
    container = GenAIContainer.load(tiny_bundle)
    options = RuntimeOptions(runner_timeout_s=250)
    runtime = GraphRuntime(virtual_device, virtual_device.properties(), container, options)
    yield runtime
    runtime.clean()


@pytest.fixture
def altered_checkpoint(tmp_path: Path) -> Path:
    """The reference model with other values in layer 2: what a fault there looks like."""
    folder = tmp_path / "altered"
    shutil.copytree(tiny_llama.folder(), folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.self_attn.v_proj.weight"
    save_file({**tensors, name: -tensors[name]}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def changed(tiny_bundle: Path, build_cache: Path) -> Path | None:
    return optimized_model(GenAIContainer.load(tiny_bundle), build_cache)


def test_tensors_of_a_step_are_compared_layer_by_layer(
    graph: GraphRuntime, altered_checkpoint: Path, changed: Path
) -> None:
    """Of a prefill call of 32 tokens and of a decode step, in both parts and on their border."""
    model, altered = (
        FloatReference(one, SHAPE, changed) for one in (tiny_llama.folder(), altered_checkpoint)
    )
    for step, first, count in ((0, 0, 21), (2, 22, 1)):
        result, tensors = graph.dump(GenerationRequest(3, prompt=PROMPT), step)
        assert (tensors.first, len(tensors.tokens)) == (first, first + count)
        assert tensors.tokens[21:] == (result.token_ids or ())[:step]
        deviations = model.compare(tensors)
        assert all(one.holds for one in deviations)
        assert [one.name for one in deviations][-2:] == ["past_value_3_out", "logits"]
        assert len(deviations) == 10  # keys and values of four layers, border, logits
        first_wrong = next(one for one in altered.compare(tensors) if not one.holds)
        assert (first_wrong.name, first_wrong.layer) == ("past_value_2_out", 2)


@pytest.mark.variant
def test_every_inner_tensor_of_a_step_is_compared(
    graph: GraphRuntime, build_cache: Path, altered_checkpoint: Path, changed: Path
) -> None:
    """The graphs with 615 more outputs give all others bit by bit as the container's."""
    model, altered = (
        FloatReference(one, SHAPE, changed) for one in (tiny_llama.folder(), altered_checkpoint)
    )
    names = model.select(["*"])
    request = GenerationRequest(3, prompt=PROMPT)
    _, tensors = graph.dump(request, 2, names, cache_root=build_cache)
    assert tensors.changed == ()
    deviations = model.compare(tensors)
    assert len(deviations) == 197  # all but what a graph of one head each has not
    assert min(one.sqnr_db for one in deviations) > 25
    in_columns_of_context = ("layer_1_scores", "layer_1_attention_weights", "layer_1_keys")
    assert {one.name for one in deviations} >= set(in_columns_of_context)
    first_wrong = next(one for one in altered.compare(tensors) if not one.holds)
    assert (first_wrong.name, first_wrong.layer) == ("layer_2_v_proj", 2)


def test_tensors_that_cannot_be_had_are_told(
    graph: GraphRuntime, build_cache: Path, tmp_path: Path
) -> None:
    request = GenerationRequest(1, prompt=PROMPT)
    with pytest.raises(InvalidOptionError, match="the compiled graphs have no x inside"):
        graph.dump(request, 0, ["x"], cache_root=build_cache)
    with pytest.raises(CacheError, match="build the container again"):
        graph.dump(request, 0, ["layer_0_scores"], cache_root=tmp_path)
    with pytest.raises(RunnerError, match="the answer ends before step 4"):
        graph.dump(request, 4)
    model = FloatReference(tiny_llama.folder(), SHAPE)
    with pytest.raises(WrongUseError, match="did you mean layer_0_scores"):
        model.select(["layer_0_*", "layer_0_scors"])


@pytest.mark.needs("transformers")
def test_inner_values_of_the_float_model_are_those_of_transformers(graph: GraphRuntime) -> None:
    """Rows and columns of attention included, whose order is the context's."""
    import torch
    import transformers

    _, tensors = graph.dump(GenerationRequest(3, prompt=PROMPT), 2)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(tiny_llama.folder(), attn_implementation="eager").eval()
    with torch.inference_mode():
        theirs = model(
            torch.tensor([tensors.tokens]), output_hidden_states=True, output_attentions=True
        )
    names = [
        f"layer_{layer}_{what}" for layer in range(3) for what in ("output", "attention_weights")
    ]
    ours = FloatReference(tiny_llama.folder(), SHAPE).rows(tensors.tokens, names)
    for layer in range(3):
        hidden = theirs.hidden_states[layer + 1][0].numpy()
        np.testing.assert_allclose(ours[f"layer_{layer}_output"][:, 0], hidden, atol=1e-4)
        weights = theirs.attentions[layer][0].transpose(0, 1).numpy()
        rows = ours[f"layer_{layer}_attention_weights"].reshape(weights.shape)
        np.testing.assert_allclose(rows, weights, atol=1e-5)


@pytest.mark.parametrize(
    "data", [b"", b"{}\n", b'{"format": 1, "first": 0, "tokens": 1, "slots": 1, "tensors": []}\nxx']
)
def test_other_dumps_are_refused(data: bytes) -> None:
    with pytest.raises(RuntimeOutputError):
        parse_dump(data, [1], "device")
