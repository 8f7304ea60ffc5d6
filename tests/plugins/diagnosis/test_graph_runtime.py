"""The graph runtime on a virtual device beside the real Genie: same text, logits and scores."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buildlib.container.container import GenAIContainer
from buildlib.errors import ContainerError
from harness.devices.device import Device
from harness.errors import (
    PromptTooLongError,
    RuntimeChoiceError,
    WrongUseError,
)
from harness.runtimes.base import (
    Converses,
    Generates,
    GenerationRequest,
    RuntimeOptions,
    StepWindow,
)
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.genie.runtime import GenieRuntime
from harness.workloads.perplexity import float_perplexity
from plugins.diagnosis.graph_runtime import GraphRuntime, open_model
from suites.models import tiny_llama
from tests.builders import builder_for
from tests.repackaged import repackage

PROMPT = "In the beginning God created the heaven and the earth. And God said,"
Pair = tuple[GenieRuntime, GraphRuntime]


@contextmanager
def both(device: Device, container: GenAIContainer) -> Iterator[Pair]:
    options = RuntimeOptions(runner_timeout_s=250, trace=True)
    with ExitStack() as stack:
        genie = GenieRuntime(device, device.properties(), container, options)
        stack.callback(genie.clean)
        graph = GraphRuntime(device, device.properties(), container, options)
        stack.callback(graph.clean)
        yield genie, graph


@pytest.fixture(scope="module")
def pair(virtual_device: Device, tiny_bundle: Path) -> Iterator[Pair]:
    with both(virtual_device, GenAIContainer.load(tiny_bundle)) as made:
        yield made


def test_a_text_is_answered_as_by_genie_with_all_figures(pair: Pair) -> None:
    theirs, ours = (one.generate(GenerationRequest(3, prompt=PROMPT)) for one in pair)
    assert ours.text == theirs.text
    assert ours.metrics.keys() == theirs.metrics.keys()
    for key in ("prompt_tokens", "generated_tokens"):
        assert ours.metrics[key] == theirs.metrics[key]
    assert all(value > 0 for value in ours.metrics.values())
    assert ours.early_end is None
    graphs = [e for e in json.loads(ours.trace)["traceEvents"] if e["cat"] == "function"]
    assert {e["name"] for e in graphs} == {
        f"ar{ar}_cl192_{n}_of_2" for ar in (1, 32) for n in (1, 2)
    }


def test_step_logits_and_scores_are_those_of_genie(pair: Pair, tiny_bundle: Path) -> None:
    """Bit by bit: both round positions and inputs alike."""
    genie, graph = pair
    window = StepWindow(tuple(range(100, 140)), tuple(range(200, 202)))
    theirs, ours = (one.decode_steps([window]).windows[0] for one in pair)
    np.testing.assert_array_equal(ours, theirs)
    windows = open_model(tiny_bundle).windows(tiny_llama.heldout_text(), 1)
    scored = graph.score(windows)
    assert scored.perplexity == pytest.approx(genie.score(windows).perplexity, rel=1e-5)
    assert scored.positions == genie.positions()
    assert len(scored.traces) == 1


@pytest.mark.variant
def test_a_cache_of_16_bits_is_that_of_genie(
    virtual_device: Device, small_model: Path, build_cache: Path
) -> None:
    builder = builder_for(small_model, build_cache)
    container = builder.set_options({"quantization.kv_bitwidth": 16}).build()
    assert (container.precision, container.kv_cache_bytes) == ("W8A16KV16", 192 * 2 * 16 * 2)
    model = open_model(container.path)
    windows = model.windows((small_model / "text" / "calibration.txt").read_text(), 1)
    with both(virtual_device, container) as pair:
        asked = GenerationRequest(3, token_ids=tuple(range(3, 40)))
        answers = {one.generate(asked).token_ids for one in pair}
        scores = [one.score(windows).perplexity for one in pair]
    assert len(answers) == 1
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    in_float = float_perplexity(small_model, model.info, windows)
    assert scores[0] == pytest.approx(in_float, rel=0.01)


@pytest.mark.variant
def test_without_bos_a_text_is_scored_from_its_second_token_on(
    virtual_device: Device, tiny_bundle: Path, checkpoint_without_bos: Path, tmp_path: Path
) -> None:
    """Host, Genie and graphs over the same positions as the loss of transformers."""
    plain = GenAIContainer.load(tiny_bundle)
    container = repackage(
        plain, plain.genie_config.with_special_tokens(bos_token=-1, eos_token=(1,)), tmp_path / "c"
    )
    model = open_model(container.path)
    windows = model.windows(tiny_llama.heldout_text(), 4)
    in_float = float_perplexity(checkpoint_without_bos, model.info, windows)
    assert in_float == pytest.approx(17.05281, rel=1e-4)  # transformers 5.24, `labels=input_ids`
    with both(virtual_device, container) as (genie, graph):
        scored, other = genie.score(windows[:1]), graph.score(windows[:1])
        assert scored.positions == other.positions == "no_bos_first_cl_minus_ar"
        step = StepWindow(windows[0].tokens[:80], windows[0].tokens[80:82])
        logits = [one.decode_steps([step]).windows[0] for one in (genie, graph)]
    assert scored.perplexity == pytest.approx(other.perplexity, rel=1e-5)
    assert scored.perplexity == pytest.approx(15.61255, rel=0.01)  # of the first window
    np.testing.assert_array_equal(logits[0], logits[1])
    with_bos = open_model(tiny_bundle).windows(tiny_llama.heldout_text(), 1)
    with pytest.raises(WrongUseError, match="build the container again"):
        float_perplexity(checkpoint_without_bos, model.info, with_bos)


@pytest.fixture
def checkpoint_without_bos(tmp_path: Path) -> Path:
    """The reference model with a tokenizer that puts nothing before texts."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(tiny_llama.folder() / name)
    tokenizer = json.loads((tiny_llama.folder() / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    return folder


@pytest.mark.variant
@pytest.mark.parametrize("name", ["graphs_container", "dialog_container"])
def test_context_lengths_host_tables_and_adapters(
    virtual_device: Device, request: pytest.FixtureRequest, name: str
) -> None:
    """Four graphs of which the longer follow the shorter; rows of a table, adapters left at 0."""
    container: GenAIContainer = request.getfixturevalue(name)
    prompts = [tuple(range(3, 3 + length)) for length in (1, 16, 45)]
    with both(virtual_device, container) as (genie, graph):
        for prompt in prompts:
            asked = GenerationRequest(4, token_ids=prompt)
            assert graph.generate(asked).token_ids == genie.generate(asked).token_ids


def test_the_model_says_what_it_does_not_do(tiny_bundle: Path) -> None:
    model = open_model(tiny_bundle)
    asks: Sequence[Mapping[str, Any]] = ({"top_k": 4}, {"stop": ("x",)}, {"lora": {"red": 1.0}})
    for ask in asks:
        with pytest.raises(WrongUseError, match="the runtime graph decodes greedily, without"):
            model.check_dialog(DialogSettings(**ask), 8, 8)
    with pytest.raises(PromptTooLongError):
        model.check_dialog(DialogSettings(), 8, 8, depth_tokens=180)
    assert issubclass(model.runtime, Generates)
    assert not issubclass(model.runtime, Converses)


def test_an_encoder_and_a_device_without_python_are_refused(
    encoder_bundle: Path, tiny_bundle: Path, virtual_device: Device
) -> None:
    with pytest.raises(ContainerError, match="text encoder"):
        open_model(encoder_bundle)
    phone = replace(virtual_device.properties(), abi="arm64-v8a")
    with pytest.raises(RuntimeChoiceError, match="needs Python, which Android has not"):
        open_model(tiny_bundle).check_fit(phone)


def test_drafts_and_embeddings_are_refused(pair: Pair, tmp_path: Path) -> None:
    _, graph = pair
    with pytest.raises(WrongUseError, match="runs no draft models"):
        graph.score([], "draft")
    with pytest.raises(WrongUseError, match="no embeddings"):
        graph.generate(GenerationRequest(2, embeddings=tmp_path / "rows.raw"))
