"""One build: the stages in order, from the cache where nothing they depend on has changed."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from buildlib.cache import CacheEntry, StageCache
from buildlib.checkpoint.layout import ENCODINGS_FILE, MODEL_FILE
from buildlib.container.container import GenAIContainer
from buildlib.encodings.files import load_encodings
from buildlib.errors import InvalidOptionError
from buildlib.graph.shape import GraphShape
from buildlib.passes.balance import SplitEnds, choose_splits
from buildlib.passes.split import weights_by_segment
from buildlib.pipeline.error_names import naming
from buildlib.pipeline.memory import available_memory
from buildlib.pipeline.package import Prepared, compose
from buildlib.pipeline.plan import MAX_PART_BYTES, BuildPlan, Part, integer_bytes, own_shape, parts
from buildlib.pipeline.runner import (
    OnStage,
    StageRecord,
    StageRunner,
    hash_texts,
)
from buildlib.pipeline.scheduler import Task, run_bounded
from buildlib.pipeline.sources import ModelSource, OnnxSource
from buildlib.pipeline.stages import MULTI_HEAD
from buildlib.quantize.grids import check_shared_caches
from buildlib.quantize.summary import ignored_options
from buildlib.toolchains.base import Toolchain, compile_memory_bytes


class GivenEncodingsWarning(UserWarning):
    """Options ask for other bits than the encodings of the model have; those stay as they are."""


PartFiles = Mapping[GraphShape, tuple[Path, ...]]


@dataclass(frozen=True)
class BuildOutputs:
    """Where the cache keeps what a build made; parts are in the order of data flow.

    Attributes:
        export: folder with `model.onnx`, `model.encodings`, `config.json` and `tokenizer.json`.
        prepared: the same folder, with those of adapters and of the embedding table.
        exports: the canonical model that each shape was made of.
        float_models: whole float models by shape.
        multi_head_parts: its float parts by shape, before their heads were taken apart.
        float_parts: the parts that were quantized.
        qdq_parts: quantized parts by shape.
        dlcs: the same, converted.
        binaries: context binaries, one a part.
        container: the packaged container, whole; copies of it are made with `GenAIContainer.save`.
    """

    export: Path
    prepared: Prepared
    exports: Mapping[GraphShape, Path]
    float_models: Mapping[GraphShape, Path]
    multi_head_parts: PartFiles
    float_parts: PartFiles
    qdq_parts: PartFiles
    dlcs: PartFiles
    binaries: tuple[Path, ...]
    container: Path


@dataclass(frozen=True)
class Sources:
    """The model to build, and exports of it that are taken for single ARs."""

    main: ModelSource
    by_ar: Mapping[int, ModelSource] = field(default_factory=dict)

    def __getitem__(self, shape: GraphShape) -> ModelSource:
        return self.by_ar.get(shape.ar, self.main)

    def each(self) -> tuple[ModelSource, ...]:
        """Every source once, the main one first."""
        return tuple(dict.fromkeys((self.main, *self.by_ar.values())))


@dataclass
class Build:
    """Runs a plan over its sources."""

    sources: Sources
    plan: BuildPlan
    cache_root: Path
    toolchain: Toolchain
    max_workers: int = 1
    records: list[StageRecord] = field(default_factory=list)

    def run(self, on_stage: OnStage | None = None) -> GenAIContainer:
        """All stages and the packaging.

        Raises:
            BuildError: any of its kinds.
        """
        return GenAIContainer.load(self.outputs(on_stage).container)

    def outputs(self, on_stage: OnStage | None = None) -> BuildOutputs:
        """All stages, and where the cache keeps what they made.

        Raises:
            BuildError: any of its kinds.
        """
        with StageCache(self.cache_root, self.name) as cache:
            runner = StageRunner(self.toolchain, cache, self.cache_root, on_stage)
            self.records = runner.records
            return self._run(runner)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.sources.main.name

    def _run(self, runner: StageRunner) -> BuildOutputs:
        plan, ready = self._ready(runner)
        main = ready[self.sources.main]
        chain = parts(self._count_parts(plan, main.entry))
        runner.total = self._stage_count(plan, len(chain))
        names = [part.binary_name(self.name) for part in chain]
        composition = compose(plan, main.prepared, names)  # what does not fit ends the build here
        shapes = plan.shapes
        arcl = {shape: runner.arcl(ready[self.sources[shape]].entry, shape) for shape in shapes}
        split = {}
        for shape in shapes:
            with naming(self.sources[shape]):
                split[shape] = runner.transform(arcl[shape], shape, plan, len(chain))
        tasks = [
            Task(
                part.stem,
                partial(self._part, runner, plan, split, part),
                self._memory(plan, split, part),
            )
            for part in chain
        ]
        built = run_bounded(tasks, max_workers=self.max_workers, memory_bytes=available_memory())
        binaries = tuple(part.binary for part in built)
        compiled = [part.compiled for part in built]
        container = runner.package(
            plan,
            main.prepared,
            composition,
            [part.qdq(shape) for shape in self._a_shape_each(plan) for part in built],
            compiled,
            binaries,
            self.name,
            self._inputs(ready),
        )

        def files(of: Callable[[GraphShape, "BuiltPart"], Path]) -> PartFiles:
            return {shape: tuple(of(shape, part) for part in built) for shape in shapes}

        return BuildOutputs(
            export=main.prepared.model,
            prepared=main.prepared,
            exports={s: ready[self.sources[s]].entry.folder / MODEL_FILE for s in shapes},
            float_models={s: arcl[s].folder / MODEL_FILE for s in shapes},
            multi_head_parts=files(lambda s, part: parts_folder(split[s], plan) / part.onnx(s)),
            float_parts=files(lambda s, part: split[s].folder / part.onnx(s)),
            qdq_parts=files(lambda s, part: part.qdq(s)),
            dlcs=files(lambda s, part: part.dlc(s)),
            binaries=binaries,
            container=container,
        )

    def _ready(self, runner: StageRunner) -> "tuple[BuildPlan, dict[ModelSource, Ready]]":
        """Every source in canonical form, and the plan with the shapes that are to be made."""
        plan = self.plan
        inputs = {source: runner.watch.hashed(source.inputs()) for source in self.sources.each()}
        exports = {
            source: runner.export(source, inputs[source], plan, self._shape_for(source))
            for source in inputs
        }
        runner.watch.check(reread=True)
        if plan.keeps_shape:
            own = {source: own_shape(exports[source].folder / MODEL_FILE) for source in exports}
            for ar, source in self.sources.by_ar.items():
                if own[source].ar != ar:
                    reason = f"the model attached for AR {ar} is at {own[source]}"
                    raise InvalidOptionError("skip_ar_conversion", reason, ())
            plan = plan.at(own.values())
        ready = {}
        for source, export in exports.items():
            entry, prepared = runner.prepare(source, export, plan)
            ready[source] = Ready(entry, prepared, inputs[source])
            if isinstance(source, OnnxSource) and source.encodings is not None:
                quantization = plan.conversion.quantization
                for text in ignored_options(export.folder, quantization, source.encodings.name):
                    warnings.warn(text, GivenEncodingsWarning, stacklevel=2)
        self._check_caches(ready)
        return plan, ready

    def _check_caches(self, ready: "Mapping[ModelSource, Ready]") -> None:
        """See that attached models and the main one mean the same by their caches."""
        if len(ready) < 2:
            return
        names = {
            source: f"the model attached for AR {ar}" for ar, source in self.sources.by_ar.items()
        }
        check_shared_caches(
            {
                names.get(source, "the main model"): load_encodings(
                    one.prepared.model / ENCODINGS_FILE
                )
                for source, one in ready.items()
            }
        )

    def _inputs(self, ready: "Mapping[ModelSource, Ready]") -> dict[str, str]:
        """Hashes of everything that the container was built from."""
        main = self.sources.main
        hashes = {**ready[main].inputs, **hash_texts(main)}
        for ar, source in self.sources.by_ar.items():
            hashes |= {f"ar{ar}/{name}": sha for name, sha in ready[source].inputs.items()}
        return hashes

    def _a_shape_each(self, plan: BuildPlan) -> tuple[GraphShape, ...]:
        """One shape of every source: all of them have the same weights."""
        return tuple({self.sources[shape]: shape for shape in reversed(plan.shapes)}.values())

    def _shape_for(self, source: ModelSource) -> GraphShape | None:
        """The largest shape that is made of a source: so few calls calibrate it.

        None where the source keeps its own.
        """
        fitting = [shape for shape in self.plan.shapes if self.sources[shape] == source]
        return fitting[-1] if fitting else None

    def _part(
        self,
        runner: StageRunner,
        plan: BuildPlan,
        split: Mapping[GraphShape, CacheEntry],
        part: Part,
    ) -> "BuiltPart":
        """One part from float ONNX to its context binary."""
        weights: dict[ModelSource, CacheEntry] = {}
        converted: dict[GraphShape, CacheEntry] = {}
        for shape in plan.shapes:
            source = self.sources[shape]
            with naming(source):
                if source not in weights:
                    weights[source] = runner.weights(split[shape], shape, part)
                converted[shape] = runner.convert(split[shape], weights[source], shape, part, plan)
        name = part.binary_name(self.name)
        compiled = runner.compile_part(converted, part, plan, name)
        return BuiltPart(part, converted, compiled, compiled.folder / name)

    def _memory(self, plan: BuildPlan, split: Mapping[GraphShape, CacheEntry], part: Part) -> int:
        """What compiling a part takes at its peak, in bytes."""
        shape = plan.shapes[0]
        weights = integer_bytes(parts_folder(split[shape], plan) / f"{part.graph(shape)}.onnx")
        sharing = plan.compilation.weight_sharing
        return compile_memory_bytes(weights, len(plan.shapes), weight_sharing=sharing)

    def _count_parts(self, plan: BuildPlan, export: CacheEntry) -> int:
        options = plan.transformation.split_model
        if options.num_splits is not None:
            return options.num_splits
        apart = SplitEnds(embedding=options.split_embedding, head=options.split_lm_head)
        return choose_splits(weights_by_segment(export.folder / MODEL_FILE), MAX_PART_BYTES, apart)

    def _stage_count(self, plan: BuildPlan, n_parts: int) -> int:
        shapes, sources = len(plan.shapes), self.sources.each()
        added = plan.additions
        more = (added.lora is not None) + (added.embedding is not None)
        made = sum(more + (2 if isinstance(source, OnnxSource) else 1) for source in sources)
        weights = sum(any(self.sources[s] == source for s in plan.shapes) for source in sources)
        return made + 2 * shapes + n_parts * (weights + shapes + 1) + 1


@dataclass(frozen=True)
class Ready:
    """A source in canonical form, with all that is added to it.

    Attributes:
        inputs: hashes of the files it came from.
    """

    entry: CacheEntry
    prepared: Prepared
    inputs: Mapping[str, str]


def parts_folder(split: CacheEntry, plan: BuildPlan) -> Path:
    """Where parts lie as they are before their heads are taken apart."""
    by_head = plan.transformation.mha2sha.enabled
    return split.folder / MULTI_HEAD if by_head else split.folder


@dataclass(frozen=True)
class BuiltPart:
    """What was made of one part."""

    part: Part
    converted: Mapping[GraphShape, CacheEntry]
    compiled: CacheEntry
    binary: Path

    def onnx(self, shape: GraphShape) -> str:
        """Name of the part's float ONNX."""
        return f"{self.part.graph(shape)}.onnx"

    def qdq(self, shape: GraphShape) -> Path:
        """The part as QDQ ONNX."""
        return self.converted[shape].folder / f"{self.part.graph(shape)}.qdq.onnx"

    def dlc(self, shape: GraphShape) -> Path:
        """The part as DLC."""
        return self.converted[shape].folder / f"{self.part.graph(shape)}.dlc"
