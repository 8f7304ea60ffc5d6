"""One build: its stages in order, each from the cache unless what it depends on has changed."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from buildlib.cache.file_hashes import MEMO_FILE, hash_files
from buildlib.cache.key import text_sha256
from buildlib.cache.layout import CacheEntry
from buildlib.cache.store import StageCache
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.layout import ENCODINGS_FILE, MODEL_FILE
from buildlib.container.container import GenAIContainer
from buildlib.encodings.files import load_encodings
from buildlib.errors import InvalidOptionError
from buildlib.graph.decoder import build_decoder
from buildlib.graph.files import external_tensors, load_model
from buildlib.graph.interface import require_shape
from buildlib.graph.shape import GraphShape
from buildlib.lora.adapters import check_adapters
from buildlib.lora.config import LoraSet
from buildlib.passes.balance import MAX_PART_BYTES, SplitEnds, choose_splits
from buildlib.passes.split import weights_by_segment
from buildlib.pipeline.options import SplitModelConfig
from buildlib.pipeline.original_paths import original_paths
from buildlib.pipeline.parts import Part, all_parts
from buildlib.pipeline.plan import BuildPlan, compile_cost, quantized_bytes
from buildlib.pipeline.runner import OnStage, StageRecord, StageRunner
from buildlib.pipeline.scheduler import Task, run_bounded, usable_memory
from buildlib.pipeline.sources import CheckpointSource, ModelSource, OnnxSource
from buildlib.pipeline.stage import Stage
from buildlib.pipeline.stages.add_forecast import AddForecast
from buildlib.pipeline.stages.add_lora import BEYOND_FILE, AddLora
from buildlib.pipeline.stages.arcl import ConvertShape
from buildlib.pipeline.stages.author import AuthorModel
from buildlib.pipeline.stages.compile_part import CompilePart
from buildlib.pipeline.stages.complete_encodings import CompleteEncodings
from buildlib.pipeline.stages.convert import Convert
from buildlib.pipeline.stages.export import Export
from buildlib.pipeline.stages.extract_embedding import ExtractEmbedding
from buildlib.pipeline.stages.import_onnx import ImportOnnx
from buildlib.pipeline.stages.optimize_weights import OptimizeWeights
from buildlib.pipeline.stages.package import CONTAINER, Package, PreparedModel, compose
from buildlib.pipeline.stages.prepare_draft import GiveHiddenStates, PrepareDraft
from buildlib.pipeline.stages.quantize_weights import QuantizeWeights
from buildlib.pipeline.stages.transform import MULTI_HEAD, Transform
from buildlib.quantize.grids import check_shared_caches
from buildlib.quantize.summary import ignored_options
from buildlib.speculative.config import DRAFT_FOLDER, EagletBuilderConfig, SsdBuilderConfig
from buildlib.toolchains.base import Toolchain, compile_memory_bytes


class GivenEncodingsWarning(UserWarning):
    """Options ask for other bits than the given encodings have; the encodings win."""


class AdapterRangeWarning(UserWarning):
    """An adapter's values leave the ranges of the graphs, and are clipped."""


PartFiles = Mapping[GraphShape, tuple[Path, ...]]


@dataclass(frozen=True)
class BuildOutputs:
    """Paths of a build's outputs in the cache; parts are in the order of data flow.

    Attributes:
        export: folder with `model.onnx`, `model.encodings`, `config.json` and `tokenizer.json`.
        prepared: the same with adapters and embedding table.
        versions: the canonical models that each shape was made of, by the operation that made or
            changed each of them; the last is in `prepared`.
        float_models: whole float models by shape.
        multi_head_parts: its float parts by shape, before their heads were taken apart.
        float_parts: the parts that were quantized.
        qdq_parts: quantized parts by shape.
        dlcs: the same, converted.
        binaries: context binaries, one a part.
        container: the packaged container; `GenAIContainer.save` copies it.
    """

    export: Path
    prepared: PreparedModel
    versions: Mapping[GraphShape, Mapping[str, CacheEntry]]
    float_models: Mapping[GraphShape, Path]
    multi_head_parts: PartFiles
    float_parts: PartFiles
    qdq_parts: PartFiles
    dlcs: PartFiles
    binaries: tuple[Path, ...]
    container: Path


@dataclass(frozen=True)
class Sources:
    """The model to build, and other exports of it for single ARs.

    Attributes:
        names: of the builders attached for these ARs, and of the folders of their stages.
    """

    main: ModelSource
    by_ar: Mapping[int, ModelSource] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)

    def __getitem__(self, shape: GraphShape) -> ModelSource:
        return self.by_ar.get(shape.ar, self.main)

    def group(self, of: GraphShape | ModelSource) -> str | None:
        """Return the folder of a shape's or source's stages in the cache; None for the model's."""
        if isinstance(of, GraphShape):
            return self.names.get(of.ar)
        return next((self.names.get(ar) for ar, one in self.by_ar.items() if one == of), None)

    def distinct(self) -> tuple[ModelSource, ...]:
        """Return every source once, the main one first."""
        return tuple(dict.fromkeys((self.main, *self.by_ar.values())))


@dataclass
class Build:
    """A plan and its sources, ready to run.

    Attributes:
        records: of the stages that ran or were reused.
        inputs: the user's files that decide the output, once it has run; None where it also depends
            on others.
    """

    sources: Sources
    plan: BuildPlan
    cache_root: Path
    toolchain: Toolchain
    max_workers: int = 1
    records: list[StageRecord] = field(default_factory=list)
    inputs: frozenset[Path] | None = None

    def run(self, on_stage: OnStage | None = None) -> GenAIContainer:
        """Run all stages, and open the container.

        Raises:
            BuildError: any of its kinds.
        """
        return GenAIContainer.load(self.outputs(on_stage).container)

    def outputs(self, on_stage: OnStage | None = None) -> BuildOutputs:
        """Run all stages, and return where the cache keeps their outputs.

        Raises:
            BuildError: any of its kinds.
        """
        with StageCache(self.cache_root, self.name) as cache:
            runner = StageRunner(self.toolchain, cache, self.cache_root, on_stage)
            self.records = runner.records
            runner.needed_bytes = self.needed_bytes
            outputs = self._run(runner)
            added = self.plan.additions
            others = added.lora or added.speculative or added.op_packages or self.sources.by_ar
            if not others:
                self.inputs = frozenset((*runner.watch.hashes, *self.sources.main.text_files()))
            return outputs

    @property
    def needed_bytes(self) -> int:
        """Estimate of what the cache takes for a build from its first stage on.

        Each shape has a DLC that is copied once, and binary and container hold the weights too: 10
        GiB of 1.24e9 weights at two shapes.
        """
        return self.weights * (2 * max(1, len(self.plan.shapes)) + 4)

    @cached_property
    def weights(self) -> int:
        """The number of weights of all sources: a container has about a byte for each."""
        return sum(source.weights() for source in self.sources.distinct())

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.sources.main.name

    def _run(self, runner: StageRunner) -> BuildOutputs:
        plan, ready = self._ready(runner)
        main = ready[self.sources.main]
        chain = all_parts(self._count_parts(plan, main.entry))
        runner.total = self._stage_count(plan, len(chain))
        names = [part.binary_name(self.name) for part in chain]
        composition = compose(plan, main.prepared, names)  # what does not fit ends the build here
        shapes = plan.shapes
        arcl = {
            shape: runner.run(
                ConvertShape(ready[self.sources[shape]].entry, shape), self.sources.group(shape)
            )
            for shape in shapes
        }
        split = {}
        for shape in shapes:
            with original_paths(self.sources[shape]):
                options = plan.transformation
                mha = plan.mha_config(shape)
                split[shape] = runner.run(
                    Transform(arcl[shape], shape, len(chain), options.split_model, mha),
                    self.sources.group(shape),
                )
        built = self._build_parts(runner, plan, split, dict(zip(chain, names, strict=True)))
        binaries = tuple(part.binary for part in built)
        drafts = dict.fromkeys(main.prepared.draft, self._draft(runner, plan, main))
        composition = composition.with_binaries(drafts)
        extras = {name: file.path for name, file in composition.extras.items()}
        for package in plan.additions.op_packages:
            extras |= package.files()
        hashes = hash_files(extras.values(), self.cache_root / MEMO_FILE)
        packaged = runner.run(
            Package(
                plan=plan,
                model_name=self.name,
                prepared=main.prepared,
                composition=composition,
                quantized=[
                    part.qdq(shape) for shape in self._one_shape_per_source(plan) for part in built
                ],
                compiled=[part.compiled for part in built],
                binaries=binaries,
                files=self._inputs(ready),
                extra_files={name: hashes[path].sha256 for name, path in extras.items()},
                toolchain_versions=runner.versions,
                chat_template=self.sources.main.chat_template,
            )
        )

        def files(of: Callable[[GraphShape, "BuiltPart"], Path]) -> PartFiles:
            return {shape: tuple(of(shape, part) for part in built) for shape in shapes}

        return BuildOutputs(
            export=main.prepared.model,
            prepared=main.prepared,
            versions={s: ready[self.sources[s]].versions for s in shapes},
            float_models={s: arcl[s].folder / MODEL_FILE for s in shapes},
            multi_head_parts=files(lambda s, part: parts_folder(split[s], plan, s) / part.onnx(s)),
            float_parts=files(lambda s, part: split[s].folder / part.onnx(s)),
            qdq_parts=files(lambda s, part: part.qdq(s)),
            dlcs=files(lambda s, part: part.dlc(s)),
            binaries=binaries,
            container=packaged.folder / CONTAINER,
        )

    def _ready(self, runner: StageRunner) -> "tuple[BuildPlan, dict[ModelSource, PreparedSource]]":
        """Bring every source into canonical form, and give the plan its shapes."""
        plan = self.plan
        for source in self.sources.distinct():
            if isinstance(source, CheckpointSource) and plan.additions.lora is not None:
                decoder = build_decoder(Checkpoint.load(source.folder), GraphShape(1, 2))
                check_adapters(plan.additions.lora, decoder)
        inputs = {source: runner.watch.hash(source.inputs()) for source in self.sources.distinct()}
        exports = {source: self._export(runner, source, inputs[source]) for source in inputs}
        runner.watch.check(reread=True)
        if plan.keeps_shape:
            own = {
                source: require_shape(_last(exports[source]).folder / MODEL_FILE)
                for source in exports
            }
            for ar, source in self.sources.by_ar.items():
                if own[source].ar != ar:
                    reason = f"the model attached for AR {ar} is at {own[source]}"
                    raise InvalidOptionError("skip_ar_conversion", reason, ())
            plan = plan.at(own.values())
        ready = {}
        for source, export in exports.items():
            ready[source] = self._prepare(runner, source, export, inputs[source])
            if isinstance(source, OnnxSource) and source.encodings is not None:
                quantization = plan.conversion.quantization
                for text in ignored_options(
                    _last(export).folder, quantization, source.encodings.name
                ):
                    warnings.warn(text, GivenEncodingsWarning, stacklevel=2)
        self._check_caches(ready)
        return plan, ready

    def _export(
        self, runner: StageRunner, source: ModelSource, files: Mapping[str, str]
    ) -> dict[str, CacheEntry]:
        """Bring one source into canonical form, the last version with encodings for all of it."""
        shape, quantization = self._shape_for(source), self.plan.conversion.quantization
        group = self.sources.group(source)
        match source:
            case OnnxSource(canonical=CacheEntry() as made):
                return {made.operation: made}
            case OnnxSource():
                operations = self.plan.additions.operations
                entry = runner.run(ImportOnnx(source, files, shape, operations), group)
                if self.plan.additions.lora is not None:  # before minutes of calibration
                    check_adapters(self.plan.additions.lora, load_model(entry.folder / MODEL_FILE))
            case CheckpointSource():
                if shape is None:
                    key = "arn_cl_options.skip_ar_cl_conversion"
                    raise InvalidOptionError(key, "a checkpoint has no AR and CL to keep", ())
                if not quantization.weight_techniques:
                    entry = runner.run(Export(source, files, shape, quantization))
                    return {entry.operation: entry}
                entry = runner.run(AuthorModel(source, files, shape))
        versions = {entry.operation: entry}
        if quantization.weight_techniques and source.calibration_text is not None:
            entry = runner.run(OptimizeWeights(entry, source, quantization), group)
            versions[entry.operation] = entry
        complete = runner.run(CompleteEncodings(entry, source, quantization), group)
        return {**versions, entry.operation: complete}

    def _prepare(
        self,
        runner: StageRunner,
        source: ModelSource,
        exported: Mapping[str, CacheEntry],
        files: Mapping[str, str],
    ) -> "PreparedSource":
        """Add adapters, and take the embedding table out, as the plan says."""
        versions = dict(exported)
        entry, lora, table, group = _last(exported), None, None, self.sources.group(source)
        added = self.plan.additions
        if added.lora is not None:
            adapters = LoraSet.load(added.lora.lora_config_path)
            hashes = runner.watch.hash(adapters.files())
            text, quantization = source.calibration_text, self.plan.conversion.quantization
            entry = runner.run(
                AddLora(entry, added.lora, adapters, hashes, text, quantization), group
            )
            versions[entry.operation] = entry
            lora = entry.folder
            _warn_of_ranges(lora)
        forecast = None
        if isinstance(added.speculative, SsdBuilderConfig):
            path = added.speculative.ssd_tensor_file
            hashes = runner.watch.hash({path.name: path})
            entry = runner.run(AddForecast(entry, added.speculative, hashes), group)
            versions[entry.operation] = entry
            forecast = entry.folder
        spoken = None
        if isinstance(added.speculative, EagletBuilderConfig):
            spoken = entry = runner.run(GiveHiddenStates(entry), group)
            versions[entry.operation] = entry
        if added.embedding is not None:
            entry = runner.run(ExtractEmbedding(entry, added.embedding), group)
            versions[entry.operation] = entry
            table = entry.folder
        draft = () if spoken is None else (f"{DRAFT_FOLDER}/{self._draft_binary}",)
        prepared = PreparedModel(entry.folder, lora, table, forecast, draft)
        return PreparedSource(versions, prepared, files, spoken)

    def _check_caches(self, ready: "Mapping[ModelSource, PreparedSource]") -> None:
        """Check that attached models and the main one quantize their caches alike."""
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

    def _inputs(self, ready: "Mapping[ModelSource, PreparedSource]") -> dict[str, str]:
        """Return SHA-256 of everything that the container is built from, by name."""
        main = self.sources.main
        hashes = {**ready[main].inputs}
        hashes |= {name: text_sha256(text) for name, text in main.texts().items()}
        for ar, source in self.sources.by_ar.items():
            hashes |= {f"ar{ar}/{name}": sha for name, sha in ready[source].inputs.items()}
        return hashes

    def _one_shape_per_source(self, plan: BuildPlan) -> tuple[GraphShape, ...]:
        """Return one shape of each source, whose weights all its shapes share."""
        return tuple({self.sources[shape]: shape for shape in reversed(plan.shapes)}.values())

    def _shape_for(self, source: ModelSource) -> GraphShape | None:
        """Return the largest shape of a source, at which calibration takes the fewest calls.

        None where the source keeps its own shape.
        """
        fitting = [shape for shape in self.plan.shapes if self.sources[shape] == source]
        return fitting[-1] if fitting else None

    @property
    def _draft_binary(self) -> str:
        return f"{self.name}_draft.bin"

    def _draft(self, runner: StageRunner, plan: BuildPlan, main: "PreparedSource") -> Path | None:
        """Build the context binary of a draft head, at the shapes of the model."""
        how = plan.additions.speculative
        if not isinstance(how, EagletBuilderConfig) or main.spoken is None:
            return None
        path = how.draft_model_path
        files = {Path(tensor.path) for tensor in external_tensors(load_model(path))} | {path}
        hashes = runner.watch.hash({file.name: file for file in sorted(files)})
        text, quantization = self.sources.main.calibration_text, plan.conversion.quantization
        ready = runner.run(PrepareDraft(path, hashes, main.spoken, main.entry, text, quantization))
        split = {}
        for shape in plan.shapes:
            arcl = runner.run(ConvertShape(ready, shape))
            mha = plan.mha_config(shape)
            split[shape] = runner.run(Transform(arcl, shape, 1, SplitModelConfig(), mha))
        [built] = self._build_parts(runner, plan, split, {Part(1, 1): self._draft_binary})
        return built.binary

    def _build_parts(
        self,
        runner: StageRunner,
        plan: BuildPlan,
        split: Mapping[GraphShape, CacheEntry],
        names: Mapping[Part, str],
    ) -> "list[BuiltPart]":
        """Take parts from float ONNX to their context binaries, of the given names."""
        tasks = [
            task
            for part, name in names.items()
            for task in self._part_tasks(runner, plan, split, part, name)
        ]
        made = run_bounded(tasks, max_workers=self.max_workers, memory_bytes=usable_memory())
        return [one for one in made if isinstance(one, BuiltPart)]

    def _part_tasks(
        self,
        runner: StageRunner,
        plan: BuildPlan,
        split: Mapping[GraphShape, CacheEntry],
        part: Part,
        name: str,
    ) -> "list[Task[CacheEntry | BuiltPart]]":
        """Return the stages of one part as tasks; the last one returns what they all made."""
        first = plan.shapes[0]
        onnx = parts_folder(split[first], plan, first) / f"{part.graph(first)}.onnx"
        packages = {
            one: runner.watch.hash({one.provider: one.library})[one.provider]
            for one in plan.additions.host_packages
        }
        sharing, size = plan.compilation.weight_sharing, quantized_bytes(onnx)
        memory = compile_memory_bytes(size, len(plan.shapes), weight_sharing=sharing)
        cost = compile_cost(onnx)

        def run(stage: Stage, shape: GraphShape) -> CacheEntry:
            with original_paths(self.sources[shape]):
                return runner.run(stage, self.sources.group(shape))

        def quantize(shape: GraphShape) -> CacheEntry:
            return run(QuantizeWeights(split[shape], shape, part), shape)

        def convert(shape: GraphShape, weights: CacheEntry) -> CacheEntry:
            bits, target = plan.conversion.quantization, plan.target
            stage = Convert(split[shape], weights, shape, part, target, self.toolchain, bits)
            return run(stage, shape)

        def compile_part(*dlcs: CacheEntry) -> BuiltPart:
            converted = dict(zip(plan.shapes, dlcs, strict=True))
            config = plan.compile_config(part)
            entry = runner.run(CompilePart(converted, part, config, name, self.toolchain, packages))
            return BuiltPart(part, converted, entry, entry.folder / name)

        weights: dict[ModelSource, Task[CacheEntry | BuiltPart]] = {
            self.sources[shape]: Task(part.stem, partial(quantize, shape), memory, cost)
            for shape in self._one_shape_per_source(plan)
        }
        dlcs: list[Task[CacheEntry | BuiltPart]] = [
            Task(part.graph(shape), partial(convert, shape), memory, cost, [weights[source]])
            for shape in plan.shapes
            for source in [self.sources[shape]]
        ]
        return [*weights.values(), *dlcs, Task(name, compile_part, memory, cost, dlcs)]

    def _count_parts(self, plan: BuildPlan, export: CacheEntry) -> int:
        options = plan.transformation.split_model
        if options.num_splits is not None:
            return options.num_splits
        apart = SplitEnds(embedding=options.split_embedding, head=options.split_lm_head)
        return choose_splits(weights_by_segment(export.folder / MODEL_FILE), MAX_PART_BYTES, apart)

    def _export_stages(self, source: ModelSource) -> int:
        """Return the number of stages of `_export`."""
        techniques = bool(self.plan.conversion.quantization.weight_techniques)
        if isinstance(source, OnnxSource):
            if source.canonical is not None:
                return 0
            return 2 + (techniques and source.calibration_text is not None)
        return 3 if techniques else 1

    def _stage_count(self, plan: BuildPlan, n_parts: int) -> int:
        shapes, sources = len(plan.shapes), self.sources.distinct()
        added = plan.additions
        more = (added.lora is not None) + (added.embedding is not None)
        more += isinstance(added.speculative, SsdBuilderConfig | EagletBuilderConfig)
        made = sum(more + self._export_stages(source) for source in sources)
        weights = sum(any(self.sources[s] == source for s in plan.shapes) for source in sources)
        own = 2 * shapes + n_parts * (weights + shapes + 1) + 1
        drafts = isinstance(added.speculative, EagletBuilderConfig)
        return made + own + drafts * (1 + 2 * shapes + weights + shapes + 1)


@dataclass(frozen=True)
class PreparedSource:
    """A source in canonical form, with everything that the plan adds to it.

    Attributes:
        versions: as `BuildOutputs` has them.
        inputs: hashes of the files it came from.
        spoken: with hidden states as an output, and the embedding still in the graph.
    """

    versions: Mapping[str, CacheEntry]
    prepared: PreparedModel
    inputs: Mapping[str, str]
    spoken: CacheEntry | None = None

    @property
    def entry(self) -> CacheEntry:
        """The last version."""
        return _last(self.versions)


def _last(versions: Mapping[str, CacheEntry]) -> CacheEntry:
    return list(versions.values())[-1]


def _warn_of_ranges(lora: Path) -> None:
    """Warn of adapters that the encodings of a model do not cover."""
    for name, part in json.loads((lora / BEYOND_FILE).read_text("utf-8")).items():
        warnings.warn(
            f"adapter {name} leaves the ranges of the model by up to {part:.0%} of one, and is "
            "clipped: build with lora_config.quant_updatable_mode=all",
            AdapterRangeWarning,
            stacklevel=2,
        )


def parts_folder(split: CacheEntry, plan: BuildPlan, shape: GraphShape) -> Path:
    """Return the folder with the parts before their attention is split into heads."""
    return split.folder / MULTI_HEAD if plan.mha_config(shape).enabled else split.folder


@dataclass(frozen=True)
class BuiltPart:
    """Outputs of one part."""

    part: Part
    converted: Mapping[GraphShape, CacheEntry]
    compiled: CacheEntry
    binary: Path

    def onnx(self, shape: GraphShape) -> str:
        """Return the name of the part's float ONNX."""
        return f"{self.part.graph(shape)}.onnx"

    def qdq(self, shape: GraphShape) -> Path:
        """Return the part as QDQ ONNX."""
        return self.converted[shape].folder / f"{self.part.graph(shape)}.qdq.onnx"

    def dlc(self, shape: GraphShape) -> Path:
        """Return the part as DLC."""
        return self.converted[shape].folder / f"{self.part.graph(shape)}.dlc"
