"""The stages of a build against each other, from the source export to the emulator.

All models are fed the same tokens, so that one difference does not make all later positions
incomparable: the largest graph of a context length takes most of them, and the others go on from
its caches, as in decoding after prefill. A fault of keys and values shows in the logits of the
calls behind it. Each model runs once, and its logits serve as those behind its stage and before the
next.

Memory is that of one model, its weights being mapped, plus the logits of two (positions x
vocabulary x 4 bytes each; 82 MB at 160 positions of 128,256 tokens). The emulator is slower than
the CPU by far, so `max_positions` bounds the sample.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from buildlib.checkpoint.config import DecoderConfig
from buildlib.errors import BuildError
from buildlib.graph import interface
from buildlib.graph.shape import GraphShape
from buildlib.numerics.comparison import (
    EXACT,
    FINITE,
    SAME_FLOAT,
    Bound,
    SideComparison,
    VerificationReport,
)
from buildlib.numerics.divergence import DivergenceSums, Logits
from buildlib.numerics.emulator import emulator_chains
from buildlib.numerics.feeds import Embed
from buildlib.numerics.host_loop import HostLoop, greedy_tokens
from buildlib.numerics.runners import Arrays, OnnxRunner, PartRunner, read_ports
from buildlib.toolchains.base import OpPackageLibrary, Toolchain

OnComparison = Callable[[SideComparison], None]
Parts = Mapping[GraphShape, Sequence[Path]]
Chains = Mapping[int, Sequence[PartRunner]]
OpenChains = Callable[[], Chains]
_TAIL = 24
"""Positions that each graph but the largest gets, when there are enough."""

COMPILED_DB, COARSEST_DB = 40.0, 15.0  # a step of 8 bits is all that they may differ by, and large
TWICE_THE_NOISE_DB = 3.0


@dataclass(frozen=True)
class Version:
    """A whole model before a stage that keeps its shape.

    Attributes:
        stage: made the next version of it: `import`, `optimize`, `lora`.
        bound: of the changes that the stage may make.
        open: opens it under the names and shapes of the canonical model; the caller closes it.
    """

    stage: str
    bound: Bound
    open: Callable[[], PartRunner]


@dataclass(frozen=True)
class StageModels:
    """Files that each stage of a build made; a stage that did not run is None.

    Attributes:
        imported: for each shape, the whole model it was converted from: the same file
            for all shapes, but for models attached for an AR.
        earlier: versions before a file of `imported`, the oldest first, by that file.
        arcl: the whole model at each shape.
        split: its parts, in the order of data flow.
        sha: the parts with single-head attention.
        qdq: the parts as QDQ ONNX.
        binaries: a context binary for each part, unshared, since the emulator loads no others.
        embed: the embedding table, of models that take `inputs_embeds`.
        op_packages: for this host, with operations of the graphs.
    """

    config: DecoderConfig
    imported: Mapping[GraphShape, Path]
    arcl: Mapping[GraphShape, Path]
    split: Parts | None = None
    sha: Parts | None = None
    qdq: Parts | None = None
    binaries: Sequence[Path] | None = None
    earlier: Mapping[Path, Sequence[Version]] = field(default_factory=dict)
    embed: Embed | None = None
    constants: Arrays = field(default_factory=dict)
    op_packages: Sequence[OpPackageLibrary] = ()

    def at(self, cl: int) -> tuple[GraphShape, ...]:
        """Return the shapes of one context length, the smallest AR first."""
        return tuple(sorted(shape for shape in self.arcl if shape.cl == cl))


@dataclass(frozen=True)
class VerifyOptions:
    """Size of the sample and resources of a verification.

    Attributes:
        max_positions: tokens of the sample, its continuation included; the shortest context length
            bounds it too.
        continuation: how many of them the source model chooses itself, greedily.
        n_threads: threads of ONNX Runtime; 0 for one per core.
    """

    max_positions: int = 160
    continuation: int = 16
    n_threads: int = 0
    soc_model: int | None = None


def verify_outputs(
    models: StageModels,
    tokens: Sequence[int] | None = None,
    *,
    emulator: Toolchain | None = None,
    options: VerifyOptions | None = None,
    on_comparison: OnComparison | None = None,
) -> VerificationReport:
    """Compare the models of each stage with those they were made from, by running both.

    Args:
        models: files of the stages.
        tokens: start of the sample; by default random ids (see `sample_tokens`).
        emulator: runs the binaries; without it they are not compared.
        on_comparison: called with each comparison as it is made.
    """
    verification = _Verification(models, emulator, options or VerifyOptions(), on_comparison)
    verification.run(tokens)
    return VerificationReport(tuple(verification.comparisons))


def sample_tokens(config: DecoderConfig, n_tokens: int) -> list[int]:
    """Return bos and random ids, the same at each call, without one that ends a text."""
    special = {*config.begin, *config.eos_token_ids}
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.vocab_size, 4 * n_tokens + 64).tolist()
    plain = [token for token in ids if token not in special] or ids
    return [*config.begin, *plain][:n_tokens]


class _Verification:
    """One run of `verify_outputs`."""

    def __init__(
        self,
        models: StageModels,
        emulator: Toolchain | None,
        options: VerifyOptions,
        on_comparison: OnComparison | None,
    ) -> None:
        self.comparisons: list[SideComparison] = []
        self._models = models
        self._emulator = emulator
        self._options = options
        self._on_comparison = on_comparison
        self._lengths = sorted({shape.cl for shape in models.arcl})
        self._imported = {path: interface.require_shape(path) for path in models.imported.values()}
        self._sample: Sequence[int] = ()

    def run(self, tokens: Sequence[int] | None) -> None:
        models = self._models
        self._sample = self._continued(tokens)
        imported = {path: self._whole(path) for path in self._imported}
        for cl in self._lengths:
            logits = self._arcl(cl, imported)
            shapes = models.at(cl)
            for stage, chains, bound in (
                ("split", models.split, EXACT),
                ("mha2sha", models.sha, SAME_FLOAT),
                ("quantize", models.qdq, FINITE),
            ):
                if chains is not None:
                    files = {shape: chains[shape] for shape in shapes}
                    after = self._run(partial(self._opened, files), shapes)
                    for shape in shapes:
                        self._compare(stage, shape, bound, logits[shape.ar], after[shape.ar])
                    logits = after
            if models.binaries is not None and self._emulator is not None:
                after = self._run(partial(self._emulated, cl), shapes)
                for shape in shapes:
                    bound = self._compiled_bound(shape)
                    self._compare("compile", shape, bound, logits[shape.ar], after[shape.ar])

    def _continued(self, tokens: Sequence[int] | None) -> list[int]:
        """Return the given tokens and their continuation by the model at the shortest context."""
        models, options = self._models, self._options
        vocab_size = models.config.vocab_size
        whole = [shape.cl // shape.ar * shape.ar for shape in self._imported.values()]
        length = min(options.max_positions, *self._lengths, *whole)
        n_prompt = max(1, length - options.continuation)
        start = tokens if tokens is not None else sample_tokens(models.config, n_prompt)
        prompt = list(start)[:n_prompt]
        if not prompt or any(not 0 <= token < vocab_size for token in prompt):
            raise BuildError(
                f"a sample needs tokens below {vocab_size}, the size of the vocabulary"
            )
        shapes = models.at(self._lengths[0])
        fed = min(length, shapes[0].cl - shapes[0].ar + 1)  # the last calls need a graph that fits
        with self._loop(self._opened({shape: [models.arcl[shape]] for shape in shapes})) as loop:
            return prompt + list(islice(greedy_tokens(loop, prompt), max(0, fed - len(prompt))))

    def _whole(self, path: Path) -> Logits:
        """Compare the versions of a whole model at its own shape, each with the one before it."""
        shape = self._imported[path]
        earlier = self._models.earlier.get(path, ())
        openers = [partial(_alone, shape.ar, one.open) for one in earlier]
        openers.append(partial(self._opened, {shape: [path]}))
        logits = self._run(openers[0], (shape,))[shape.ar]
        for version, opened in zip(earlier, openers[1:], strict=True):
            after = self._run(opened, (shape,))[shape.ar]
            self._compare(version.stage, shape, version.bound, logits, after)
            logits = after
        return logits

    def _arcl(self, cl: int, imported: Mapping[Path, Logits]) -> dict[int, Logits]:
        """Compare the whole model at one context length with the one it was converted from."""
        shapes = self._models.at(cl)
        files = {shape: [self._models.arcl[shape]] for shape in shapes}
        logits = self._run(partial(self._opened, files), shapes)
        end = sum(map(len, logits.values()))
        for shape in shapes:  # the largest had its turn first
            path, begin = self._models.imported[shape], end - len(logits[shape.ar])
            first = shape == self._imported[path] == shapes[-1]
            bound = EXACT if first else SAME_FLOAT
            self._compare("arcl", shape, bound, imported[path][begin:end], logits[shape.ar])
            end = begin
        return logits

    def _run(self, opened: OpenChains, shapes: Sequence[GraphShape]) -> dict[int, Logits]:
        """Return the logits of each graph, [tokens, vocab], in its turn over the sample."""
        ars = sorted((shape.ar for shape in shapes), reverse=True)
        tail = min(_TAIL, len(self._sample) // (len(ars) + 1))
        tails = tail * (len(ars) - 1)
        position, logits = 0, {}
        with self._loop(opened()) as loop:
            for ar in ars:
                count = tail if position else len(self._sample) - tails
                logits[ar] = loop.feed(self._sample[position : position + count], ar)
                position += count
        return logits

    def _loop(self, chains: Chains) -> HostLoop:
        models = self._models
        return HostLoop(chains, models.config, embed=models.embed, constants=models.constants)

    def _opened(self, files: Parts) -> Chains:
        """Open the parts of a model from their files; weights stay mapped from these."""
        threads = self._options.n_threads
        return {
            shape.ar: [OnnxRunner(path, n_threads=threads, plain=True) for path in paths]
            for shape, paths in files.items()
        }

    def _emulated(self, cl: int) -> Chains:
        models = self._models
        if models.binaries is None or self._emulator is None:
            raise AssertionError("there is nothing to emulate")
        return emulator_chains(
            models.binaries,
            self._emulator,
            soc_model=self._options.soc_model,
            cl=cl,
            op_packages=models.op_packages,
        )

    def _compiled_bound(self, shape: GraphShape) -> Bound:
        """Return the bound of differences between the rounding of HTP and of the CPU."""
        # They may differ by twice the noise that rounding to the same grids adds to float.
        chains = self._models.qdq or {}
        if shape in chains:
            logits = read_ports(chains[shape][-1]).outputs[interface.LOGITS]
            if logits.dtype == np.uint8:
                return Bound("sqnr", COARSEST_DB)
        costs = (
            one.divergence.sqnr_db - TWICE_THE_NOISE_DB
            for one in self.comparisons
            if (one.side, one.where) == ("quantize", str(shape)) and one.divergence is not None
        )
        return Bound("sqnr", max(COARSEST_DB, min([COMPILED_DB, *costs])))

    def _compare(
        self, stage: str, shape: GraphShape, bound: Bound, before: Logits, after: Logits
    ) -> None:
        found, note = None, "no token of the sample ran in this graph"
        if len(before):
            sums = DivergenceSums()
            try:
                sums.add(after, before, before.argmax(axis=1))
                found, note = sums.mean(), ""
            except ValueError as error:
                note = str(error)
        passed = found is not None and bound.holds(found)
        one = SideComparison(stage, str(shape), None, found, str(bound), passed, note)
        self.comparisons.append(one)
        if self._on_comparison is not None:
            self._on_comparison(one)


def _alone(ar: int, open_model: Callable[[], PartRunner]) -> Chains:
    """Open a whole model that has one graph."""
    return {ar: [open_model()]}
