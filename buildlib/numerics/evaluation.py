"""Models over the same text beside each other: the one engine of all questions about logits.

A `ModelSide` is a model of any kind: a checkpoint in float, by our graphs or by transformers; the
model of a stage; a container's graphs through a runtime. One side is the reference. It runs first,
its logits stay in a temporary file, and memory holds those of one call.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from buildlib.cancellation import check_cancelled
from buildlib.checkpoint.config import DecoderConfig
from buildlib.closeable import Closeable
from buildlib.errors import BuildError
from buildlib.numerics.comparison import FINITE, Bound, Calls, SideComparison
from buildlib.numerics.divergence import Divergence, DivergenceSums, Logits, token_losses
from buildlib.numerics.host_loop import HostLoop, TokenModel, feed_window, open_onnx
from buildlib.numerics.runners import OnnxRunner

_ROWS = 64


@dataclass(frozen=True)
class Sample:
    """A piece of text from an empty context, of which a model predicts the last tokens.

    Attributes:
        begin: before it, which runtimes put there by themselves: bos, or nothing.
        prompt: predicted for nothing.
        following: predicted one after another; something stands before them.
    """

    begin: tuple[int, ...]
    prompt: tuple[int, ...]
    following: tuple[int, ...]

    def halved(self) -> "Sample":
        """Return the sample with the first half of what is predicted in the prompt."""
        half = len(self.following) // 2
        prompt = (*self.prompt, *self.following[:half])
        return Sample(self.begin, prompt, self.following[half:])


def text_samples(windows: Iterable[Sequence[int]], begin: Sequence[int]) -> list[Sample]:
    """Return windows of which all tokens are predicted; without `begin`, all but the first."""
    first = 0 if begin else 1
    return [Sample(tuple(begin), tuple(w[:first]), tuple(w[first:])) for w in windows]


def predict(
    model: TokenModel, samples: Iterable[Sample], calls: Calls = "prefill"
) -> Iterator[Logits]:
    """Yield the logits of all predictions of samples in order, some rows at a time.

    Args:
        calls: `decode` feeds the tokens that follow one by one.
    """
    for sample in samples:
        prompt, following = (*sample.begin, *sample.prompt), sample.following[:-1]
        at_once = prompt if calls == "decode" else (*prompt, *following)
        unread = len(prompt) - 1
        for tokens, logits in feed_window(model, at_once):
            if unread < len(tokens):
                yield logits[max(unread, 0) :]
            unread -= len(tokens)
        for token in following if calls == "decode" else ():
            check_cancelled()
            yield model.feed([token])


class ReferenceLogits(Closeable):
    """Logits of the reference at each prediction of some samples, kept in a temporary file.

    The file has predictions x vocabulary x 4 bytes, and goes when this is closed.

    Raises:
        BuildError: nothing is predicted, or a token lies outside the vocabulary.
    """

    def __init__(self, samples: Sequence[Sample], vocab_size: int) -> None:
        self.samples = tuple(sample for sample in samples if sample.following)
        tokens = [token for sample in self.samples for token in sample.following]
        self._following = np.array(tokens, np.int64)
        if not self._following.size:
            raise BuildError("there is no text to evaluate the model on")
        used = [token for s in self.samples for token in (*s.prompt, *s.following)]
        if not 0 <= min(used) <= max(used) < vocab_size:
            raise BuildError(f"a token lies outside the vocabulary of {vocab_size}")
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        shape = (self._following.size, vocab_size)
        self._logits = np.memmap(self._file, np.float32, "w+", shape=shape)
        self._recorded = 0

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def restart(self) -> None:
        """Record from the first prediction again."""
        self._recorded = 0

    def record(self, logits: Logits) -> None:
        """Keep the logits of the reference at the next predictions."""
        end = self._recorded + len(logits)
        self._logits[self._recorded : end] = logits
        self._recorded = end

    def own(self) -> Divergence:
        """Return the evaluation of the reference itself."""
        starts = range(0, self._recorded, _ROWS)
        return self.measure(np.asarray(self._logits[start : start + _ROWS]) for start in starts)

    def compare(self, logits: Logits, sums: DivergenceSums) -> None:
        """Add a model's logits at its next predictions to its sums."""
        where = slice(sums.steps, sums.steps + len(logits))
        sums.add(logits, self._logits[where], self._following[where])

    def measure(self, rows: Iterable[Logits]) -> Divergence:
        """Return the distance of a model from the reference, of its logits at all predictions.

        Raises:
            BuildError: logits that are not finite, or of another vocabulary.
        """
        sums = DivergenceSums()
        try:
            for logits in rows:
                self.compare(logits, sums)
        except ValueError as error:
            raise BuildError(f"the models cannot be compared: {error}") from error
        return sums.mean()


@dataclass(frozen=True)
class OpenSide:
    """A side that runs.

    Attributes:
        where: what runs it: `CPU, quantized`, a device.
        predict: gives the logits of samples, as the function of that name does.
        keep: takes what was found.
    """

    where: str
    predict: Callable[[Sequence[Sample], Calls], Iterable[Logits]]
    keep: Callable[[Divergence], object] = str


@dataclass(frozen=True)
class ModelSide:
    """One of the models that are compared.

    Attributes:
        name: of the stage, the model or the runtime.
        open: opens it for a block.
        bound: of its distance from the reference.
        calls: that it takes.
        missing: why it cannot run; empty if it can.
    """

    name: str
    open: Callable[[], AbstractContextManager[OpenSide]]
    bound: Bound = FINITE
    calls: tuple[Calls, ...] = ("prefill",)
    missing: str = ""


@contextmanager
def open_side(
    model: AbstractContextManager[TokenModel], where: str, *, decodes: bool = False
) -> Iterator[OpenSide]:
    """Open a model of this host as a side.

    Args:
        decodes: whether it computes the steps of `decode` by calls of one token, too.
    """
    with model as opened:
        yield OpenSide(
            where,
            lambda samples, calls: predict(opened, samples, calls if decodes else "prefill"),
        )


def compare_sides(
    reference: ModelSide, sides: Sequence[ModelSide], samples: Sequence[Sample], vocab_size: int
) -> Iterator[SideComparison]:
    """Run all sides over the same samples, and yield the reference's own rows and theirs in order.

    Decode steps are the second half of each sample.

    Raises:
        BuildError: a sample does not fit into a context; or logits that are not finite, or of
            another vocabulary.
        RunnerDiedError: the emulator failed.
    """
    wanted = {calls for side in sides for calls in side.calls} or {"prefill"}
    with ExitStack() as stack:
        logits: dict[Calls, ReferenceLogits] = {}
        with reference.open() as opened:
            for calls in sorted(wanted, reverse=True):
                asked = samples if calls == "prefill" else [sample.halved() for sample in samples]
                kept = stack.enter_context(ReferenceLogits(asked, vocab_size))
                for rows in opened.predict(kept.samples, calls):
                    kept.record(rows)
                logits[calls] = kept
                yield SideComparison(reference.name, opened.where, calls, kept.own(), bound="")
        for side in sides:
            if side.missing:
                yield SideComparison(side.name, note=side.missing)
                continue
            with side.open() as opened:
                for calls in side.calls:
                    kept = logits[calls]
                    found = kept.measure(opened.predict(kept.samples, calls))
                    passed = side.bound.holds(found)
                    yield SideComparison(
                        side.name, opened.where, calls, found, str(side.bound), passed
                    )
                    opened.keep(found)


def record_float(
    model_path: Path,
    config: DecoderConfig,
    windows: Sequence[Sequence[int]],
) -> ReferenceLogits:
    """Run a whole float ONNX model, and keep its logits; the caller closes them.

    Args:
        model_path: at a prefill shape, in canonical form.
        windows: token ids without bos, each shorter than the context length.
    """
    reference = ReferenceLogits(text_samples(windows, config.begin), config.vocab_size)
    try:
        with open_onnx(model_path, config, plain=True) as loop:
            for logits in predict(loop, reference.samples):
                reference.record(logits)
    except BaseException:
        reference.close()
        raise
    return reference


def evaluate_model(model: TokenModel, reference: ReferenceLogits) -> Divergence:
    """Evaluate a model of this host over the samples of its reference, in calls of many tokens."""
    return reference.measure(predict(model, reference.samples))


def sample_losses(model: TokenModel, sample: Sample) -> npt.NDArray[np.float64]:
    """Return the negative log-likelihood of each token that follows in a sample."""
    losses: list[npt.NDArray[np.float64]] = []
    n_done = 0
    for logits in predict(model, [sample]):
        losses.append(token_losses(logits, sample.following[n_done : n_done + len(logits)]))
        n_done += len(logits)
    return np.concatenate(losses)


def text_perplexity(model: TokenModel, samples: Iterable[Sample]) -> float:
    """Return `exp` of the mean negative log-likelihood of the tokens that follow in samples.

    Args:
        model: a `HostLoop` over `OnnxRunner`s or `emulator_chains`, or a `TransformersModel`.
    """
    losses = np.concatenate([sample_losses(model, sample) for sample in samples])
    return math.exp(float(losses.mean()))


def onnx_perplexity(
    chains: Mapping[int, Sequence[Path]], config: DecoderConfig, windows: Sequence[Sequence[int]]
) -> float:
    """Return the perplexity of ONNX models, float or QDQ, on ONNX Runtime's CPU provider.

    Args:
        chains: parts of the model in order, by AR.
        windows: token ids without bos: the positions that Genie scores on a device.
    """
    runners = {ar: [OnnxRunner(path) for path in paths] for ar, paths in chains.items()}
    with HostLoop(runners, config) as loop:
        return text_perplexity(loop, text_samples(windows, config.begin))
