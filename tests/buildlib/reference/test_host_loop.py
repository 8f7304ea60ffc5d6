"""The host loop: how it chunks, what it refuses, what its perplexity is over."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from buildlib.checkpoint.config import load_config
from buildlib.errors import CalibrationError, PromptTooLongError
from buildlib.graph.shape import GraphShape
from buildlib.passes.arcl import convert_arcl
from buildlib.reference.host_loop import HostLoop, token_losses
from buildlib.reference.runners import OnnxRunner

CL = 96


@pytest.fixture(scope="module")
def loop(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostLoop]:
    folder = tmp_path_factory.mktemp("loop")
    model = tiny_export / "model.onnx"
    one = convert_arcl(model, GraphShape(1, CL), folder / "ar1.onnx")
    chains = {1: [OnnxRunner(one, n_threads=1)], 16: [OnnxRunner(model, n_threads=1)]}
    with HostLoop(chains, load_config(tiny_export / "config.json")) as made:
        yield made


def test_chunking_does_not_show(loop: HostLoop) -> None:
    tokens = np.random.default_rng(0).integers(0, 300, CL).tolist()
    loop.reset()
    at_once = loop.feed(tokens)
    loop.reset()
    cuts = [0, 1, 2, 20, 36, 37, 60, 95, 96]
    pieces = [loop.feed(tokens[a:b]) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_allclose(np.concatenate(pieces), at_once, rtol=0, atol=1e-4)


def test_the_context_can_be_filled_to_the_last_token(loop: HostLoop) -> None:
    prompt = [5] * 90
    assert len(loop.greedy(prompt, 5)) == 5
    with pytest.raises(PromptTooLongError, match="97 tokens do not fit into a context of 96"):
        loop.greedy(prompt, 6)


def test_greedy_is_argmax_after_bos(loop: HostLoop) -> None:
    chosen = loop.greedy([7, 8], 4)
    tokens = [0, 7, 8]
    for token in chosen:
        loop.reset()
        assert int(loop.feed(tokens)[-1].argmax()) == token
        tokens.append(token)
    assert loop.greedy([7, 8], 4, stop=frozenset({chosen[2]})) == chosen[: chosen.index(chosen[2])]


def test_what_a_perplexity_is_over(loop: HostLoop) -> None:
    tokens = np.random.default_rng(2).integers(0, 300, 2 * (CL - 1) + 30).tolist()
    losses = []
    for index in range(2):
        window = [0, *tokens[index * (CL - 1) : (index + 1) * (CL - 1)]]
        loop.reset()
        losses.append(token_losses(loop.feed(window), window))
    for positions, counted in (
        ("all", slice(None)), ("first_cl_minus_ar", slice(0, 80))
    ):  # fmt: skip
        flat = np.concatenate([loss[counted] for loss in losses])
        found = loop.perplexity(tokens, positions)  # type: ignore[arg-type]
        assert found.value == pytest.approx(np.exp(flat.mean()))
        assert (found.n_windows, found.n_tokens) == (2, flat.size)
    with pytest.raises(CalibrationError, match="needs 95 tokens"):
        loop.perplexity(tokens[:94], "all")


def test_losses_are_log_likelihoods() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1, 1, 1]], np.float32))
    np.testing.assert_allclose(token_losses(logits, [0, 1, 2]), -np.log([0.25, 0.8]), rtol=1e-6)
