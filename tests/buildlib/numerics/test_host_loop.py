"""The host loop: chunks, refusals, and perplexity."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from buildlib.checkpoint.config import load_config
from buildlib.embedding.extraction import EmbeddingExtraction
from buildlib.embedding.table import write_table
from buildlib.errors import BuildError
from buildlib.graph.shape import GraphShape
from buildlib.numerics.divergence import token_losses
from buildlib.numerics.evaluation import Sample, sample_losses
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner, part_sizes
from buildlib.passes.arcl import convert_arcl

if TYPE_CHECKING:
    from buildlib.embedding.config import EmbedDatatype

CL = 96


@pytest.fixture(scope="module")
def loop(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostLoop]:
    folder = tmp_path_factory.mktemp("loop")
    model = tiny_export / "model.onnx"
    one = convert_arcl(model, GraphShape(1, CL), folder / "ar1.onnx")
    chains = {1: [OnnxRunner(one, n_threads=1)], 16: [OnnxRunner(model, n_threads=1)]}
    with HostLoop(chains, load_config(tiny_export / "config.json")) as made:
        yield made


def test_chunking_does_not_change_results(loop: HostLoop) -> None:
    tokens = np.random.default_rng(0).integers(0, 300, CL).tolist()
    loop.reset()
    at_once = loop.feed(tokens)
    loop.reset()
    cuts = [0, 1, 2, 20, 36, 37, 60, 95, 96]
    pieces = [loop.feed(tokens[a:b]) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_allclose(np.concatenate(pieces), at_once, rtol=0, atol=1e-4)


def test_the_context_can_be_filled_to_the_last_token(loop: HostLoop) -> None:
    prompt = [0] + [5] * 90
    assert len(loop.greedy(prompt, 5)) == 5
    with pytest.raises(BuildError, match="97 tokens do not fit into a context of 96"):
        loop.greedy(prompt, 6)


def test_greedy_is_argmax_after_bos(loop: HostLoop) -> None:
    chosen = loop.greedy([0, 7, 8], 4)
    tokens = [0, 7, 8]
    for token in chosen:
        loop.reset()
        assert int(loop.feed(tokens)[-1].argmax()) == token
        tokens.append(token)
    stopped = loop.greedy([0, 7, 8], 4, stop=frozenset({chosen[2]}))
    assert stopped == chosen[: chosen.index(chosen[2])]


def test_the_embedding_table_can_lie_on_the_host(
    loop: HostLoop, tiny_export: Path, tmp_path: Path
) -> None:
    model = EmbeddingExtraction().run(tiny_export / "model.onnx", tmp_path / "model.onnx")
    tokens = np.random.default_rng(5).integers(0, 300, 40).tolist()
    loop.reset()
    expected = loop.feed(tokens)
    config = load_config(tiny_export / "config.json")
    tolerances: dict[EmbedDatatype, float] = {"float32": 1e-4, "uint16": 2e-2}
    for datatype, tolerance in tolerances.items():
        table = write_table(tiny_export / "model.onnx", tmp_path / datatype, datatype)
        runners = {16: [OnnxRunner(model, n_threads=1)]}
        with HostLoop(runners, config, embed=table.rows) as hosted:
            found = hosted.feed(tokens)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
        assert (datatype == "float32") == (np.abs(found - expected).max() < 1e-4)


def test_parts_that_attend_to_nothing_have_an_ar_alone() -> None:
    assert part_sizes({"input_ids": (1, 8)}) == (8, None)
    assert part_sizes({"hidden": (1, 8, 40)}) == (8, None)
    assert part_sizes({"attention_mask": (1, 1, 8, 96), "input_ids": (1, 8)}) == (8, 96)
    with pytest.raises(ValueError, match="no AR"):
        part_sizes({"a": (1, 8, 40), "b": (1, 9, 40)})


def test_losses_are_of_each_token_after_bos(loop: HostLoop) -> None:
    window = np.random.default_rng(2).integers(0, 300, CL - 1).tolist()
    loop.feed([9, 9, 9])  # forgotten
    losses = sample_losses(loop, Sample((0,), (), tuple(window)))
    loop.reset()
    expected = token_losses(loop.feed([0, *window[:-1]]), window)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses.shape == (CL - 1,)
    loop.reset()
    alone = token_losses(loop.feed(window[:-1]), window[1:])
    without = Sample((), tuple(window[:1]), tuple(window[1:]))
    np.testing.assert_allclose(sample_losses(loop, without), alone, rtol=1e-5)
    with pytest.raises(BuildError, match="97 tokens"):
        sample_losses(loop, Sample((0,), (), (5,) * (CL + 1)))
