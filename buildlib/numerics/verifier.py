"""The stages of a build against each other, from the source export to the emulator.

Both sides of a comparison are fed the same tokens, so that one difference does not make all later
positions incomparable. A model runs over a sample once, one part in memory at a time, and its
outputs serve as `after` of its stage and `before` of the next.

Its cost: for each stage and context length, one pass over the sample, in which all ARs take turns.
Memory is that of one part's activations and caches, its weights being mapped, plus the outputs of
two stages (positions x vocabulary x 4 bytes each; 82 MB at 160 positions of 128,256 tokens). Time
is that of the arithmetic: a float model of 187 million parameters (two layers of Llama-3.2-1B's
width, vocabulary 16,000) took 1.2 s for a call of 128 tokens, 0.13 s for one of 1, and 26 s for
source, AR/CL and split at the default sample, on two busy cores, with 160 MB of memory beside the
mapped weights. The emulator is slower by far, so `max_positions` bounds the sample.
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
    StageComparison,
    VerificationReport,
    compare,
)
from buildlib.numerics.emulator import emulator_chains
from buildlib.numerics.feeds import CallInputs, Embed
from buildlib.numerics.host_loop import HostLoop, greedy_tokens
from buildlib.numerics.runners import Arrays, OnnxRunner, PartRunner, read_ports
from buildlib.numerics.trace import (
    OpenPart,
    Schedule,
    Trace,
    alternating_schedule,
    single_graph_schedule,
    trace_model,
)
from buildlib.toolchains.base import OpPackageLibrary, Toolchain

OnComparison = Callable[[StageComparison], None]
Parts = Mapping[GraphShape, Sequence[Path]]

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
        self.comparisons: list[StageComparison] = []
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
            trace = self._arcl(cl, imported)
            shapes = models.at(cl)
            for stage, chains, bound in (
                ("split", models.split, EXACT),
                ("mha2sha", models.sha, SAME_FLOAT),
                ("quantize", models.qdq, FINITE),
            ):
                if chains is not None:
                    parts = self._parts({shape: chains[shape] for shape in shapes})
                    trace = self._stage(stage, bound, shapes, trace, parts)
            if models.binaries is not None and self._emulator is not None:
                emulate = partial(
                    _emulate, self._emulator, cl, self._options.soc_model, models.op_packages
                )
                parts = [partial(emulate, binary) for binary in models.binaries]
                self._stage("compile", None, shapes, trace, parts)

    def _continued(self, tokens: Sequence[int] | None) -> list[int]:
        """Return the given tokens and their continuation by the model at the shortest context."""
        models, options = self._models, self._options
        vocab_size = models.config.vocab_size
        shortest = min(self._lengths + [shape.cl for shape in self._imported.values()])
        length = min(options.max_positions, shortest)
        n_prompt = max(1, length - options.continuation)
        start = tokens if tokens is not None else sample_tokens(models.config, n_prompt)
        prompt = list(start)[:n_prompt]
        if not prompt or any(not 0 <= token < vocab_size for token in prompt):
            raise BuildError(
                f"a sample needs tokens below {vocab_size}, the size of the vocabulary"
            )
        shapes = models.at(self._lengths[0])
        runners = {
            shape.ar: [OnnxRunner(models.arcl[shape], n_threads=options.n_threads, plain=True)]
            for shape in shapes
        }
        fed = min(length, shapes[0].cl - shapes[0].ar + 1)  # the last calls need a graph that fits
        with HostLoop(
            runners, models.config, embed=models.embed, constants=models.constants
        ) as loop:
            return prompt + list(islice(greedy_tokens(loop, prompt), max(0, fed - len(prompt))))

    def _whole(self, path: Path) -> Trace:
        """Compare the versions of a whole model at its own shape, each with the one before it."""
        shape = self._imported[path]
        schedule = single_graph_schedule(shape.ar, shape.cl, len(self._sample))
        earlier = self._models.earlier.get(path, ())
        parts: list[OpenPart] = [partial(_alone, shape.ar, one.open) for one in earlier]
        parts += self._parts({shape: [path]})
        trace = self._run(parts[:1], shape.cl, schedule)
        for version, part in zip(earlier, parts[1:], strict=True):
            trace = self._stage(version.stage, version.bound, (shape,), trace, [part])
        return trace

    def _arcl(self, cl: int, imported: Mapping[Path, Trace]) -> Trace:
        """Compare the whole model at one context length with the one it was converted from."""
        models = self._models
        shapes = models.at(cl)
        files = {shape: [models.arcl[shape]] for shape in shapes}
        schedule = alternating_schedule([shape.ar for shape in shapes], cl, len(self._sample))
        trace = self._run(self._parts(files), cl, schedule)
        for shape in shapes:
            path = models.imported[shape]
            if shape == self._imported[path]:
                own = single_graph_schedule(shape.ar, cl, len(self._sample))
                parts = self._parts({shape: files[shape]})
                same = trace if own == schedule else self._run(parts, cl, own)
                self._compare("arcl", shape, EXACT, imported[path], same)
            else:
                self._compare("arcl", shape, SAME_FLOAT, imported[path], trace)
        return trace

    def _stage(
        self,
        stage: str,
        bound: Bound | None,
        shapes: Sequence[GraphShape],
        before: Trace,
        parts: Sequence[OpenPart],
    ) -> Trace:
        after = self._run(parts, shapes[0].cl, before.schedule)
        for shape in shapes:
            self._compare(stage, shape, bound or self._compiled_bound(shape), before, after)
        return after

    def _compiled_bound(self, shape: GraphShape) -> Bound:
        """Return the bound of differences between the rounding of HTP and of the CPU."""
        # They may differ by twice the noise that rounding to the same grids adds to float.
        chains = self._models.qdq or {}
        if shape in chains:
            logits = read_ports(chains[shape][-1]).outputs[interface.LOGITS]
            if logits.dtype == np.uint8:
                return Bound("sqnr", COARSEST_DB)
        costs = (
            one.sqnr_db - TWICE_THE_NOISE_DB
            for one in self.comparisons
            if (one.stage, one.subject) == ("quantize", str(shape))
        )
        return Bound("sqnr", max(COARSEST_DB, min([COMPILED_DB, *costs])))

    def _parts(self, chains: Parts) -> list[OpenPart]:
        """Return the parts of a model from their files; weights stay mapped from these."""
        ars = [shape.ar for shape in chains]
        return [
            partial(_open, dict(zip(ars, paths, strict=True)), self._options.n_threads)
            for paths in zip(*chains.values(), strict=True)
        ]

    def _run(self, parts: Sequence[OpenPart], cl: int, schedule: Schedule) -> Trace:
        models = self._models
        inputs = CallInputs(models.config, cl, embed=models.embed, constants=models.constants)
        return trace_model(parts, inputs, cl, schedule, self._sample)

    def _compare(
        self, stage: str, shape: GraphShape, bound: Bound, before: Trace, after: Trace
    ) -> None:
        positions = after.positions_of(shape.ar)
        one = compare(stage, str(shape), bound, before, after, positions)
        self.comparisons.append(one)
        if self._on_comparison is not None:
            self._on_comparison(one)


def _alone(ar: int, open_model: Callable[[], PartRunner]) -> dict[int, PartRunner]:
    """Open a whole model that has one graph."""
    return {ar: open_model()}


def _open(paths: Mapping[int, Path], n_threads: int) -> dict[int, PartRunner]:
    return {ar: OnnxRunner(path, n_threads=n_threads, plain=True) for ar, path in paths.items()}


def _emulate(
    toolchain: Toolchain,
    cl: int,
    soc_model: int | None,
    op_packages: Sequence[OpPackageLibrary],
    binary: Path,
) -> dict[int, PartRunner]:
    """Open a part on the emulator, in a process of its own."""
    chains = emulator_chains(
        [binary], toolchain, soc_model=soc_model, cl=cl, op_packages=op_packages
    )
    return {ar: chain[0] for ar, chain in chains.items()}
