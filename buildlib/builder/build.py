"""One build: its stages in order, each from the cache unless inputs, options or code changed.

`Build._run_models` brings every source into canonical form, with what the plan adds to it.
`Build._add_container` goes on from there: each model at every shape, cut into parts, quantized,
converted, compiled (`_add_binaries`) and packaged. Both declare stages to a `StageGraph`, which
takes them from the cache or runs them, and `BuildOutputs` has where each left its files.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path

import onnx_ir as ir

from buildlib.builder.additions import (
    HostTable,
    Making,
    PreparedModel,
    draft_binary,
)
from buildlib.builder.lora_config import BEYOND_FILE
from buildlib.builder.model_folder import check_loss, load_factors
from buildlib.builder.model_place import hub_origin
from buildlib.builder.options import SplitModelConfig
from buildlib.builder.parts import GENIE, Part
from buildlib.builder.plan import BuildPlan, compile_cost, quantized_bytes
from buildlib.builder.runner import OnStage, StageRecord, StageRunner
from buildlib.builder.sources import CheckpointSource, ModelSource, OnnxSource
from buildlib.builder.stage_graph import Load, StageGraph, StageNode, UnmadeError
from buildlib.builder.stages.arcl import ConvertShape
from buildlib.builder.stages.author import AuthorModel
from buildlib.builder.stages.compile_part import CompilePart
from buildlib.builder.stages.complete_encodings import CompleteEncodings
from buildlib.builder.stages.convert import Convert
from buildlib.builder.stages.import_onnx import ImportOnnx
from buildlib.builder.stages.optimize_weights import OptimizeWeights
from buildlib.builder.stages.package import CONTAINER, Package, compose
from buildlib.builder.stages.quantize_weights import QuantizeWeights
from buildlib.builder.stages.transform import MULTI_HEAD, Transform
from buildlib.cache.file_hashes import MEMO_FILE, hash_files
from buildlib.cache.key import text_sha256
from buildlib.cache.layout import CacheEntry
from buildlib.cache.store import StageCache
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.layout import ENCODINGS_FILE, MODEL_FILE
from buildlib.container.container import GenAIContainer
from buildlib.container.writer import ContainerFile
from buildlib.encodings.files import load_encodings
from buildlib.errors import InvalidOptionError, ModelWarning
from buildlib.graph.decoder import build_decoder
from buildlib.graph.files import load_model
from buildlib.graph.interface import require_shape
from buildlib.graph.shape import GraphShape
from buildlib.passes.balance import (
    EMULATED_PART_BYTES,
    MAX_PART_BYTES,
    SplitEnds,
    choose_emulated_splits,
    choose_splits,
)
from buildlib.passes.split import weights_by_segment
from buildlib.paths import plain_path
from buildlib.quantize.grids import check_shared_caches
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.summary import ignored_options
from buildlib.quantize.techniques.scaling import check_shared_factors
from buildlib.toolchains.base import Toolchain, compile_memory_bytes

_LEAST_S, _EMULATOR_S, _PHONE_S, _TECHNIQUE_S = 8.0, 0.34e-6, 0.15e-6, 0.16e-6
"""Seconds of a build, and of each weight."""
PartFiles = Mapping[GraphShape, tuple[Path, ...]]


@dataclass(frozen=True)
class BuildOutputs:
    """Paths of a build's outputs in the cache; parts are in the order of data flow.

    Attributes:
        export: folder with `model.onnx`, `model.encodings`, `config.json` and `tokenizer.json`.
        prepared: the same with adapters and embedding table.
        versions: the canonical models that each shape was made of, as stages made and changed them;
            the last is in `prepared`.
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
    versions: Mapping[GraphShape, tuple[CacheEntry, ...]]
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

    @property
    def groups(self) -> dict[ModelSource, str]:
        """Folders in the cache of the stages of attached models."""
        return {source: self.names[ar] for ar, source in self.by_ar.items() if ar in self.names}

    def distinct(self) -> tuple[ModelSource, ...]:
        """Return every source once, the main one first."""
        return tuple(dict.fromkeys((self.main, *self.by_ar.values())))


@dataclass
class Build:
    """A plan and its sources, ready to run.

    Attributes:
        memory_limit: bytes for stages that run at once; by default two thirds of the available.
        records: of the stages that ran or were reused.
        inputs: the user's files that decide the output, once it has run; None where it also depends
            on others.
    """

    sources: Sources
    plan: BuildPlan
    cache_root: Path
    toolchain: Toolchain
    max_workers: int = 1
    memory_limit: int | None = None
    records: list[StageRecord] = field(default_factory=list)
    inputs: frozenset[Path] | None = None

    def run(self, on_stage: OnStage | None = None) -> GenAIContainer:
        """Run all stages, and open the container."""
        return GenAIContainer.load(self.outputs(on_stage).container)

    def outputs(self, on_stage: OnStage | None = None) -> BuildOutputs:
        """Run all stages, and return where the cache keeps their outputs."""
        with self._graph(on_stage) as graph:
            outputs = self._add_container(graph, *self._run_models(graph))
            graph.run(last=True)
            if all(isinstance(one, HostTable) for one in self.plan.additions) and not (
                self.sources.by_ar
            ):
                hashes = graph.runner.watch.hashes
                self.inputs = frozenset((*hashes, *self.sources.main.text_files()))
            return outputs

    def stages(self) -> tuple[StageNode, ...]:
        """Return the stages that a run would take through the cache, and run none.

        The last is `package`, unless outputs are missing on which the next stages depend: the size
        of a canonical model decides the number of its parts.
        """
        with self._graph(None) as graph, suppress(UnmadeError):
            graph.dry = True
            self._add_container(graph, *self._run_models(graph))
        return tuple(graph)

    @contextmanager
    def _graph(self, on_stage: OnStage | None) -> Iterator[StageGraph]:
        """Open the cache, and keep the records of stages that run."""
        with StageCache(self.cache_root, self.name) as cache:
            runner = StageRunner(self.toolchain, cache, self.cache_root, on_stage)
            self.records = runner.records
            runner.needed_bytes = self.needed_bytes
            yield StageGraph(runner, self.sources.groups, self.max_workers, self.memory_limit)

    def files(self) -> frozenset[Path]:
        """Return the user's files that a run reads."""
        sources = self.sources.distinct()
        files = {path for source in sources for path in source.inputs().values()}
        files.update(path for source in sources for path in source.text_files())
        files.update(s.config_file for s in sources if isinstance(s, OnnxSource))
        files.update(path for one in self.plan.additions for path in one.files())
        folders = [path for path in files if path.is_dir()]  # of a container that drafts
        files.update(path for folder in folders for path in folder.rglob("*"))
        return frozenset(plain_path(path) for path in files if path.is_file())

    @property
    def memory_bytes(self) -> int:
        """Estimate of the peak memory of a run: that of its largest parts in the compiler.

        Of up to two parts one is converted while the other is compiled.
        """
        n_bytes = sum(source.quantized_bytes() for source in self.sources.distinct())
        limit = EMULATED_PART_BYTES if self.plan.target.emulator else MAX_PART_BYTES
        parts = self.plan.options.split_model.num_splits or -(-n_bytes // limit)
        sharing, graphs = self.plan.compilation.weight_sharing, max(1, len(self.plan.shapes))
        at_once = min(self.max_workers, -(-parts // 2))
        return compile_memory_bytes(at_once * n_bytes // parts, graphs, weight_sharing=sharing)

    @property
    def seconds(self) -> float:
        """Estimate of the time of a run that finds nothing in the cache, on two idle cores.

        From random models of 0.18B (emulator) and 1B (phone), each with two shapes, and GPTQ of the
        latter; AdaScale takes longer.
        """
        per_weight = _EMULATOR_S if self.plan.target.emulator else _PHONE_S
        if self.plan.options.quantization.weight_techniques:
            per_weight += _TECHNIQUE_S
        return _LEAST_S + per_weight * self.weights

    @property
    def needed_bytes(self) -> int:
        """Estimate of the disk space that a build takes in the cache, from its first stage on.

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

    def _run_models(self, graph: StageGraph) -> "tuple[BuildPlan, dict[ModelSource, BuiltModel]]":
        """Make the canonical model of every source, and give the plan its shapes."""
        plan, watch = self.plan, graph.runner.watch
        for source in self.sources.distinct() if plan.additions else ():
            if isinstance(source, CheckpointSource):
                self._check_model(build_decoder(Checkpoint.load(source.folder), GraphShape(1, 2)))
        inputs = {source: watch.hash(source.inputs()) for source in self.sources.distinct()}
        canonical: dict[ModelSource, tuple[CacheEntry, ...]] = {}
        for source, files in inputs.items():  # the main one first, whose caches all others share
            sharing = canonical[self.sources.main][-1] if canonical else None
            canonical[source] = self._add_canonical(graph, source, files, sharing)
        graph.run()
        watch.check(reread=True)
        check_loss(canonical[self.sources.main][-1].folder, self.name, plan.options.max_kl)
        if plan.keeps_shape:
            plan = plan.at(self._own_shapes(canonical))
        models = {s: self._add_additions(graph, s, canonical[s], inputs[s]) for s in inputs}
        graph.run()
        for source, model in models.items():
            if model.prepared.lora is not None:
                _warn_of_ranges(model.prepared.lora)
            if isinstance(source, OnnxSource) and source.encodings is not None:
                folder, bits = canonical[source][-1].folder, self._quantization(source)
                for text in ignored_options(folder, bits, source.encodings.name):
                    warnings.warn(text, ModelWarning, stacklevel=2)
        self._check_caches(models)
        return plan, models

    def _add_canonical(
        self,
        graph: StageGraph,
        source: ModelSource,
        files: Mapping[str, str],
        sharing: CacheEntry | None,
    ) -> tuple[CacheEntry, ...]:
        """Bring one source into canonical form, the last version with encodings for all of it.

        Args:
            sharing: the last version of the main model, if this is an attached one.
        """
        quantization, contract = self._quantization(source), self.plan.contract
        if contract.kv_bitwidth is not None and quantization.kv_bitwidth is None:
            quantization = quantization.model_copy(update={"kv_bitwidth": contract.kv_bitwidth})
        if any(one.reads_stream for one in self.plan.additions) or contract != GENIE:
            quantization = quantization.model_copy(update={"spreading": False})
        main = self.sources.main
        if sharing is not None and isinstance(main, OnnxSource) and main.encodings is not None:
            scaling = bool(quantization.scaling)  # as the main model is
            quantization = quantization.model_copy(update={"scaling": scaling})
        shape = self._shape_for(source)
        match source:
            case OnnxSource(canonical=CacheEntry() as made):
                return (made,)
            case OnnxSource():
                stage = ImportOnnx(source, files, shape, self.plan.operations.names)
                # before minutes of calibration
                versions = [graph.add(stage, source, check=self._check_import)]
            case CheckpointSource() if shape is None:
                key = self.plan.skip_key
                raise InvalidOptionError(key, "a checkpoint has no AR and CL to keep", ())
            case CheckpointSource():
                versions = [graph.add(AuthorModel(source, files, shape), source)]
        optimize = OptimizeWeights(versions[-1], source, quantization)
        if optimize.steps and source.calibration_text is not None:
            versions.append(graph.add(optimize, source))
        complete = CompleteEncodings(versions[-1], source, quantization, versions[0], sharing)
        versions.append(graph.add(complete, source))
        return tuple(versions)

    def _add_additions(
        self,
        graph: StageGraph,
        source: ModelSource,
        canonical: tuple[CacheEntry, ...],
        files: Mapping[str, str],
    ) -> "BuiltModel":
        """Add to a canonical model what the plan says."""
        making = Making(
            name=self.name,
            calibration_text=source.calibration_text,
            quantization=self._quantization(source),
            declare=lambda stage: graph.add(stage, source),
            hash_files=graph.runner.watch.hash,
            versions=list(canonical),
        )
        for addition in self.plan.additions:
            addition.stages(making)
        prepared = PreparedModel(making.last.folder, **making.prepared)
        return BuiltModel(making, prepared, files)

    def _check_import(self, folder: Path) -> None:
        self._check_model(load_model(folder / MODEL_FILE))

    def _check_model(self, model: ir.Model) -> None:
        for addition in self.plan.additions:
            addition.check_model(model)

    def _add_container(
        self, graph: StageGraph, plan: BuildPlan, models: "Mapping[ModelSource, BuiltModel]"
    ) -> BuildOutputs:
        """Take canonical models to the container; their sizes decide the number of parts."""
        main, options = models[self.sources.main], plan.options.split_model
        n_parts = options.num_splits or _count_parts(main.entry, plan)
        parts = plan.contract.parts(n_parts)
        names = {part: part.binary_name(self.name) for part in parts}
        composition = compose(plan, main.prepared, list(names.values()))
        extras = {name: file.path for name, file in composition.extras.items()}
        for package in plan.operations.packages:
            extras |= package.files()
        hashes = hash_files(extras.values(), self.cache_root / MEMO_FILE)
        sources = {shape: self.sources[shape] for shape in plan.shapes}
        entries = {shape: models[source].entry for shape, source in sources.items()}
        artifacts = self._add_binaries(graph, plan, sources, entries, names, options)
        draft = self._add_draft(graph, plan, main)
        if draft is not None:
            path = draft.folder / draft_binary(self.name)
            drafts = dict.fromkeys(main.prepared.draft, ContainerFile(path, "binary"))
            composition = composition.having(composition.genie_config, drafts)
        binaries = tuple(entry.folder / names[part] for part, entry in artifacts.compiled.items())
        container = graph.add(
            Package(
                plan=plan,
                model_name=self.name,
                prepared=main.prepared,
                composition=composition,
                quantized=[
                    artifacts.qdq(part, shape)
                    for shape in _one_shape_each(sources)
                    for part in parts
                ],
                compiled=[*artifacts.compiled.values(), *([] if draft is None else [draft])],
                binaries=binaries,
                files=self._inputs(models),
                extra_files={name: hashes[path].sha256 for name, path in extras.items()},
                toolchain_versions=graph.runner.versions,
                chat_template=self.sources.main.chat_template,
                origin=hub_origin(self.sources.main.folder),
            )
        )

        def files(of: Callable[[Part, GraphShape], Path]) -> PartFiles:
            return {shape: tuple(of(part, shape) for part in parts) for shape in plan.shapes}

        return BuildOutputs(
            export=main.prepared.model,
            prepared=main.prepared,
            versions={shape: models[source].versions for shape, source in sources.items()},
            float_models={
                shape: artifacts.arcl[shape].folder / MODEL_FILE for shape in plan.shapes
            },
            multi_head_parts=files(artifacts.multi_head),
            float_parts=files(artifacts.onnx),
            qdq_parts=files(artifacts.qdq),
            dlcs=files(artifacts.dlc),
            binaries=binaries,
            container=container.folder / CONTAINER,
        )

    def _add_binaries(
        self,
        graph: StageGraph,
        plan: BuildPlan,
        sources: Mapping[GraphShape, ModelSource],
        models: Mapping[GraphShape, CacheEntry],
        names: Mapping[Part, str],
        split_model: SplitModelConfig,
    ) -> "BuiltParts":
        """Take the model of each shape to context binaries, of the given names."""
        target = plan.target
        arcl = {s: graph.add(ConvertShape(model, s), sources[s]) for s, model in models.items()}
        splits = {}
        for shape, model in arcl.items():
            mha = plan.mha_config(shape)
            transform = Transform(model, shape, len(names), split_model, mha)
            splits[shape] = graph.add(transform, sources[shape])
        packages = {
            one: graph.runner.watch.hash({one.provider: one.library})[one.provider]
            for one in plan.operations.host
        }
        adapted, positions = dict(splits), plan.context_lengths[-1] + plan.ars[-1]
        for shape, entry in splits.items():
            contracted = plan.contract.stage(entry, models[shape], shape, positions)
            if contracted is not None:
                adapted[shape] = graph.add(contracted, sources[shape])
        artifacts = BuiltParts(plan, arcl, splits, adapted)
        for part, name in names.items():
            load = cache(partial(artifacts.load, part))
            weights = {}
            for shape in _one_shape_each(sources):
                stage = QuantizeWeights(adapted[shape], shape, part)
                weights[sources[shape]] = graph.add(stage, sources[shape], load=load)
            for shape, source in sources.items():
                bits = plan.quantization_of([shape.ar])
                convert = Convert(
                    adapted[shape], weights[source], shape, part, target, self.toolchain, bits
                )
                artifacts.converted[part, shape] = graph.add(convert, source, load=load)
            dlcs = {shape: artifacts.converted[part, shape] for shape in plan.shapes}
            config = plan.compile_config(part)
            compile_part = CompilePart(dlcs, part, config, name, self.toolchain, packages)
            artifacts.compiled[part] = graph.add(compile_part, load=load)
        return artifacts

    def _add_draft(
        self, graph: StageGraph, plan: BuildPlan, main: "BuiltModel"
    ) -> CacheEntry | None:
        """Build the context binary of a model that drafts, at the shapes of the model."""
        stages = (addition.draft(main.making) for addition in plan.additions)
        stage = next((one for one in stages if one is not None), None)
        if stage is None:
            return None
        source, draft = self.sources.main, graph.add(stage)
        sources, models = dict.fromkeys(plan.shapes, source), dict.fromkeys(plan.shapes, draft)
        part = Part(1, 1)
        names, whole = {part: draft_binary(self.name)}, SplitModelConfig()
        return self._add_binaries(graph, plan, sources, models, names, whole).compiled[part]

    def _own_shapes(
        self, canonical: Mapping[ModelSource, tuple[CacheEntry, ...]]
    ) -> list[GraphShape]:
        """Return the shapes that models have."""
        own = {
            source: require_shape(versions[-1].folder / MODEL_FILE)
            for source, versions in canonical.items()
        }
        for ar, source in self.sources.by_ar.items():
            if own[source].ar != ar:
                reason = f"the model attached for AR {ar} is at {own[source]}"
                raise InvalidOptionError("skip_ar_conversion", reason, ())
        return list(own.values())

    def _check_caches(self, models: "Mapping[ModelSource, BuiltModel]") -> None:
        """Check that attached models and the main one quantize their caches alike."""
        if len(models) < 2:
            return
        names = {
            source: f"the model attached for AR {ar}" for ar, source in self.sources.by_ar.items()
        }
        folders = {
            names.get(source, "the main model"): model.prepared.model
            for source, model in models.items()
        }
        check_shared_factors({name: load_factors(folder) for name, folder in folders.items()})
        check_shared_caches(
            {name: load_encodings(folder / ENCODINGS_FILE) for name, folder in folders.items()}
        )

    def _inputs(self, models: "Mapping[ModelSource, BuiltModel]") -> dict[str, str]:
        """Return SHA-256 of everything that the container is built from, by name."""
        main = self.sources.main
        hashes = {**models[main].inputs}
        hashes |= {name: text_sha256(text) for name, text in main.texts().items()}
        for ar, source in self.sources.by_ar.items():
            hashes |= {f"ar{ar}/{name}": sha for name, sha in models[source].inputs.items()}
        return hashes

    def _quantization(self, source: ModelSource) -> QuantizationOptions:
        ars = [ar for ar, attached in self.sources.by_ar.items() if attached == source]
        return self.plan.quantization_of(ars)

    def _shape_for(self, source: ModelSource) -> GraphShape | None:
        """Return the largest shape of a source, where calibration takes the fewest calls."""
        fitting = [shape for shape in self.plan.shapes if self.sources[shape] == source]
        return fitting[-1] if fitting else None


@dataclass(frozen=True)
class BuiltModel:
    """A source in canonical form, with everything that the plan adds to it.

    Attributes:
        making: of which all stages are declared.
        inputs: hashes of the files it came from.
    """

    making: Making
    prepared: PreparedModel
    inputs: Mapping[str, str]

    @property
    def versions(self) -> tuple[CacheEntry, ...]:
        """As `BuildOutputs` has them."""
        return tuple(self.making.versions)

    @property
    def entry(self) -> CacheEntry:
        """The last version."""
        return self.making.last


@dataclass(frozen=True)
class BuiltParts:
    """A model from its float graphs, one a shape, to its context binaries, one a part.

    Attributes:
        arcl: the whole model.
        split: its parts.
        adapted: its parts in the contract of the build.
        converted: each part as QDQ ONNX and as DLC.
        compiled: the context binaries, in the order of data flow.
    """

    plan: BuildPlan
    arcl: Mapping[GraphShape, CacheEntry]
    split: Mapping[GraphShape, CacheEntry]
    adapted: Mapping[GraphShape, CacheEntry]
    converted: dict[tuple[Part, GraphShape], CacheEntry] = field(default_factory=dict)
    compiled: dict[Part, CacheEntry] = field(default_factory=dict)

    def onnx(self, part: Part, shape: GraphShape) -> Path:
        """Return a part as float ONNX."""
        return self.adapted[shape].folder / f"{part.graph(shape)}.onnx"

    def multi_head(self, part: Part, shape: GraphShape) -> Path:
        """Return the same before its attention was taken apart into heads."""
        folder, name = self.split[shape].folder, f"{part.split(shape)}.onnx"
        return folder / MULTI_HEAD / name if self.plan.mha_config(shape).enabled else folder / name

    def qdq(self, part: Part, shape: GraphShape) -> Path:
        """Return a part as QDQ ONNX."""
        return self.converted[part, shape].folder / f"{part.graph(shape)}.qdq.onnx"

    def dlc(self, part: Part, shape: GraphShape) -> Path:
        """Return a part as DLC."""
        return self.converted[part, shape].folder / f"{part.graph(shape)}.dlc"

    def load(self, part: Part) -> Load:
        """Estimate memory and time of each stage of a part that has been split off."""
        shapes, sharing = self.plan.shapes, self.plan.compilation.weight_sharing
        onnx = self.multi_head(part, shapes[0])
        size = quantized_bytes(onnx)
        memory = compile_memory_bytes(size, len(shapes), weight_sharing=sharing)
        return Load(memory, compile_cost(onnx))


def _one_shape_each(sources: Mapping[GraphShape, ModelSource]) -> tuple[GraphShape, ...]:
    """Return one shape of each source: all shapes of a source share its weights."""
    return tuple({sources[shape]: shape for shape in reversed(list(sources))}.values())


def _count_parts(model: CacheEntry, plan: BuildPlan) -> int:
    options, weights = plan.options.split_model, weights_by_segment(model.folder / MODEL_FILE)
    apart = SplitEnds(embedding=options.split_embedding, head=options.split_lm_head)
    if plan.target.emulator:
        return choose_emulated_splits(weights, apart)
    return choose_splits(weights, MAX_PART_BYTES, apart)


def _warn_of_ranges(lora: Path) -> None:
    """Warn of adapters that the encodings of a model do not cover."""
    for name, part in json.loads((lora / BEYOND_FILE).read_text("utf-8")).items():
        warnings.warn(
            f"adapter {name} leaves the ranges of the model by up to {part:.0%} of one, and is "
            "clipped: build with lora_config.quant_updatable_mode=all",
            ModelWarning,
            stacklevel=2,
        )
