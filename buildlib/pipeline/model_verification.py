"""A model in float as a build reads it, beside the same files as transformers reads them."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.checkpoint.layout import CONFIG_FILE, MODEL_FILE
from buildlib.errors import CalibrationError
from buildlib.graph.interface import require_shape
from buildlib.graph.shape import GraphShape
from buildlib.numerics.comparison import Bound
from buildlib.numerics.divergence import Divergence, DivergenceSums
from buildlib.numerics.host_loop import HostLoop, TokenModel, feed_window
from buildlib.numerics.runners import OnnxRunner
from buildlib.numerics.transformers import TransformersModel, require_installed
from buildlib.numerics.verifier import SAME_MODEL, sample_tokens
from buildlib.passes.arcl import convert_arcl
from buildlib.pipeline.sources import CheckpointSource, ModelSource, OnnxSource, positions_of
from buildlib.pipeline.stages.author import AuthorModel
from buildlib.pipeline.stages.import_onnx import ImportOnnx

_AR = 32


@dataclass(frozen=True)
class ModelVerification:
    """Logits of our float model beside those of transformers, over the same tokens.

    Attributes:
        prefill: over the given tokens, which go in calls of many.
        decode: over the tokens that transformers itself goes on with, greedily, one a call.
        versions: of torch and transformers.
    """

    prefill: Divergence
    decode: Divergence
    versions: dict[str, str]
    bound: Bound = SAME_MODEL

    @property
    def passed(self) -> bool:
        """True if both are within the bound."""
        return all(one.relative <= self.bound.limit for one in (self.prefill, self.decode))


def verify_model(
    source: ModelSource,
    tokens: Sequence[int] | None = None,
    *,
    prefill: int = 144,
    decode: int = 16,
) -> ModelVerification:
    """Compare a checkpoint, or an export with its checkpoint beside it, with transformers.

    Args:
        source: what a build would read.
        tokens: to prefill; by default bos and random ids.
        prefill: so many of them, or as many as the model has positions for.
        decode: tokens after them, one a call.

    Raises:
        TransformersError: torch or transformers is not installed, or cannot compute the model.
        CalibrationError: a token lies outside the vocabulary, or there is nothing to compare.
        BuildError: we cannot read the model.
    """
    require_installed(source.folder)
    config = load_config(source.folder / CONFIG_FILE)
    prompt = list(tokens or sample_tokens(config, prefill))[:prefill]
    if any(not 0 <= token < config.vocab_size for token in prompt):
        raise CalibrationError(f"a token lies outside the vocabulary of {config.vocab_size}")
    with tempfile.TemporaryDirectory(prefix="qnnfarm-verify-") as scratch:
        limit = min(len(prompt) + decode, positions_of(source) or math.inf)
        with _float_model(source, int(limit), config, Path(scratch)) as ours:
            prompt = prompt[: max(1, int(min(limit, ours.cl)) - decode)]
            with TransformersModel(source.folder) as reference:
                found = compare_models(ours, reference, prompt, decode)
                return ModelVerification(*found, reference.versions)


def compare_models(
    ours: TokenModel, reference: TokenModel, prompt: Sequence[int], decode: int
) -> tuple[Divergence, Divergence]:
    """Compare the logits of two models over a prompt and over its continuation.

    Args:
        ours: takes the tokens that `reference` chooses.
        reference: goes on with the prompt, greedily.
        prompt: goes in calls of many tokens.
        decode: tokens after it, one a call.

    Raises:
        CalibrationError: their vocabularies differ, or logits are not finite.
    """
    sample, expected = _continue(reference, prompt, decode)
    steps = (([token], ours.feed([token])) for token in sample[len(prompt) : -1])
    sums, done = (DivergenceSums(), DivergenceSums()), 0
    try:
        for tokens, logits in chain(feed_window(ours, prompt), steps):
            end = done + len(tokens)
            sums[done >= len(prompt)].add(logits, expected[done:end], sample[done + 1 : end + 1])
            done = end
    except ValueError as error:
        raise CalibrationError(f"the models cannot be compared: {error}") from error
    return sums[0].mean(), sums[1].mean()


def _continue(
    model: TokenModel, prompt: Sequence[int], steps: int
) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Return a prompt with its greedy continuation, and logits at all but its last token."""
    sample, found = list(prompt), [logits for _, logits in feed_window(model, prompt)]
    for _ in range(steps):
        sample.append(int(found[-1][-1].argmax()))
        found.append(model.feed(sample[-1:]))
    sample.append(int(found[-1][-1].argmax()))
    return sample, np.concatenate(found)


@contextmanager
def _float_model(
    source: ModelSource, n_tokens: int, config: DecoderConfig, folder: Path
) -> Iterator[HostLoop]:
    """Make and open the model that a build would start from, for prefill and decode."""
    shape = GraphShape(_AR, max(2, -(-n_tokens // _AR)) * _AR)
    match source:
        case OnnxSource():
            ImportOnnx(source, {}, shape).run(folder)
        case CheckpointSource():
            AuthorModel(source, {}, shape).run(folder)
    model = folder / MODEL_FILE
    shape = require_shape(model)  # an export can have its own
    files = {shape.ar: model}
    if shape.ar > 1:
        files[1] = convert_arcl(model, GraphShape(1, shape.cl), folder / "decode.onnx")
    runners = {ar: [OnnxRunner(path, plain=True)] for ar, path in files.items()}
    with HostLoop(runners, config) as loop:
        yield loop
