"""One build: the stages in order, from the cache where nothing they depend on has changed."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from buildlib import stages
from buildlib.cache import CacheEntry, Operation, StageCache, StageKey
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.container.container import GenAIContainer
from buildlib.errors import InvalidOptionError
from buildlib.graph.shape import GraphShape
from buildlib.hashing import combined, sha256_file, sha256_sources
from buildlib.options import ModelTransformerConfig
from buildlib.package import package
from buildlib.source import CheckpointSource, ModelSource, OnnxSource
from buildlib.stages import Part
from buildlib.targets import Target
from buildlib.toolchains.base import CompileConfig, Toolchain

# The code of each stage, as sources of this package: a changed pass must not find its old results.
_CODE: Mapping[Operation, tuple[str, ...]] = MappingProxyType(
    {
        "export": ("checkpoint", "encodings", "graph", "quantize", "reference"),
        "arcl": ("encodings", "graph", "passes/base.py", "passes/arcl.py"),
        "transform": ("encodings", "graph", "passes"),
        "convert": ("encodings", "graph", "quantize", "toolchains"),
        "compile": ("toolchains",),
        "package": ("container", "package.py"),
    }
)
_CONTAINER = "container"


@dataclass(frozen=True)
class StageRecord:
    """One stage that a build went through.

    Attributes:
        subject: which graph or part, such as `ar32_cl192_1_of_2`.
        reused: whether it came from the cache.
    """

    operation: Operation
    subject: str
    seconds: float
    reused: bool
    number: int
    total: int


OnStage = Callable[[StageRecord], None]


@dataclass(frozen=True)
class BuildPlan:
    """What is to be built: shapes from decode to prefill, number of parts, target."""

    shapes: tuple[GraphShape, ...]
    n_splits: int
    target: Target

    @classmethod
    def create(cls, config: ModelTransformerConfig, target: Target) -> "BuildPlan":
        """Check options against each other.

        Raises:
            InvalidShapeError: an AR does not fit the context length.
            InvalidOptionError: there is no decode graph, or an AR twice.
        """
        ars = sorted(config.arn_cl_options.auto_regression_number)
        key = "arn_cl_options.auto_regression_number"
        if len(set(ars)) != len(ars):
            raise InvalidOptionError(key, f"an AR stands twice in {ars}", ())
        if ars[0] != 1:
            raise InvalidOptionError(key, f"{ars} has no 1: Genie decodes with an AR-1 graph", ())
        (cl,) = config.arn_cl_options.context_length
        shapes = tuple(GraphShape(ar, cl) for ar in ars)
        return cls(shapes, config.split_model.num_splits, target)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in the order of data flow."""
        return tuple(Part(number, self.n_splits) for number in range(1, self.n_splits + 1))

    @property
    def n_stages(self) -> int:
        """How many stages a build of ONNX goes through; for a checkpoint, one more exports it."""
        shapes, parts = len(self.shapes), self.n_splits
        return 2 * shapes + shapes * parts + parts + 1


@dataclass(frozen=True)
class BuildOutputs:
    """Where the cache keeps what a build made.

    Attributes:
        export: folder with `model.onnx`, `model.encodings`, `config.json` and `tokenizer.json`.
        float_models: whole float models by shape.
        qdq_parts: quantized parts by shape, in the order of data flow.
        binaries: context binaries, one a part.
        container: the packaged container, whole; copies of it are made with `GenAIContainer.save`.
    """

    export: Path
    container: Path
    float_models: Mapping[GraphShape, Path]
    qdq_parts: Mapping[GraphShape, tuple[Path, ...]]
    binaries: tuple[Path, ...]


@dataclass
class Build:
    """Runs a plan over a source."""

    source: ModelSource
    plan: BuildPlan
    cache_root: Path
    toolchain: Toolchain
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
        self.records.clear()
        cache = StageCache(self.cache_root, self.source.name)
        runner = _Runner(self, cache, on_stage)
        export = runner.export()
        arcl = {shape: runner.arcl(export, shape) for shape in self.plan.shapes}
        split = {shape: runner.transform(arcl[shape], shape) for shape in self.plan.shapes}
        converted = {
            (shape, part): runner.convert(split[shape], shape, part)
            for part in self.plan.parts
            for shape in self.plan.shapes
        }
        compiled = [
            runner.compile_part([converted[shape, part] for shape in self.plan.shapes], part)
            for part in self.plan.parts
        ]
        return BuildOutputs(
            export=export.folder,
            container=runner.package(export, compiled),
            float_models={shape: arcl[shape].folder / MODEL_FILE for shape in self.plan.shapes},
            qdq_parts={
                shape: tuple(
                    converted[shape, part].folder / f"{part.stem(shape)}.qdq.onnx"
                    for part in self.plan.parts
                )
                for shape in self.plan.shapes
            },
            binaries=runner.binaries(compiled),
        )


class _Runner:
    """The stages of one build, with their keys."""

    def __init__(self, build: Build, cache: StageCache, on_stage: OnStage | None) -> None:
        self._build = build
        self._plan = build.plan
        self._cache = cache
        self._on_stage = on_stage
        self._versions = dict(build.toolchain.versions())
        self._inputs = {path.name: sha256_file(path) for path in build.source.inputs()}
        package_folder = Path(__file__).parent
        self._code = {name: sha256_sources(package_folder, *_CODE[name]) for name in _CODE}

    def export(self) -> CacheEntry:
        source = self._build.source
        inputs = combined(self._inputs)
        match source:
            case OnnxSource():
                return CacheEntry("export", source.folder, inputs, reused=True)
            case CheckpointSource():
                shape = self._plan.shapes[-1]
                text = hashlib.sha256(source.calibration_text.encode()).hexdigest()
                return self._stage(
                    "export",
                    source.name,
                    source.folder,
                    {"ar": shape.ar, "cl": shape.cl, "calibration_sha256": text},
                    (inputs,),
                    lambda folder: stages.export(
                        source.folder, source.calibration_text, shape, folder
                    ),
                )

    def arcl(self, export: CacheEntry, shape: GraphShape) -> CacheEntry:
        model = export.folder / MODEL_FILE
        return self._stage(
            "arcl",
            str(shape),
            model,
            {"ar": shape.ar, "cl": shape.cl},
            (export.hash,),
            lambda folder: stages.arcl(model, shape, folder),
        )

    def transform(self, arcl: CacheEntry, shape: GraphShape) -> CacheEntry:
        model = arcl.folder / MODEL_FILE
        return self._stage(
            "transform",
            str(shape),
            model,
            {"num_splits": self._plan.n_splits},
            (arcl.hash,),
            lambda folder: stages.transform(model, self._plan.n_splits, folder),
        )

    def convert(self, split: CacheEntry, shape: GraphShape, part: Part) -> CacheEntry:
        stem = part.stem(shape)
        source = split.folder / f"{stem}.onnx"
        toolchain, target = self._build.toolchain, self._plan.target
        return self._stage(
            "convert",
            stem,
            source,
            {"part": stem, "target": str(target), **self._versions},
            (split.hash,),
            lambda folder: stages.convert(source, stem, target, toolchain, folder),
        )

    def compile_part(self, converted: list[CacheEntry], part: Part) -> CacheEntry:
        dlcs = [
            entry.folder / f"{part.stem(shape)}.dlc"
            for entry, shape in zip(converted, self._plan.shapes, strict=True)
        ]
        config = CompileConfig.for_target(self._plan.target)
        name = part.binary_name(self._build.source.name)
        return self._stage(
            "compile",
            f"part {part.number} of {part.count}",
            dlcs[0],
            {**config.as_options(), **self._versions},
            tuple(entry.hash for entry in converted),
            lambda folder: stages.compile_part(dlcs, config, self._build.toolchain, folder / name),
        )

    def binaries(self, compiled: list[CacheEntry]) -> tuple[Path, ...]:
        name = self._build.source.name
        return tuple(
            entry.folder / part.binary_name(name)
            for entry, part in zip(compiled, self._plan.parts, strict=True)
        )

    def package(self, export: CacheEntry, compiled: list[CacheEntry]) -> Path:
        build, plan = self._build, self._plan
        entry = self._stage(
            "package",
            str(plan.target),
            export.folder,
            {"target": str(plan.target), "model": build.source.name},
            (export.hash, *(entry.hash for entry in compiled)),
            lambda folder: package(
                folder / _CONTAINER,
                model_name=build.source.name,
                export=export.folder,
                inputs=self._inputs,
                shapes=plan.shapes,
                binaries=self.binaries(compiled),
                target=plan.target,
                toolchain_versions=self._versions,
            ),
        )
        return entry.folder / _CONTAINER

    def _stage(
        self,
        operation: Operation,
        subject: str,
        source: Path,
        config: Mapping[str, object],
        source_hashes: tuple[str, ...],
        work: Callable[[Path], None],
    ) -> CacheEntry:
        began = time.monotonic()
        code = {"code_sha256": self._code[operation]}
        key = StageKey(operation, {**config, **code}, source_hashes)
        entry = self._cache.get_or_build(key, source, work)
        build = self._build
        record = StageRecord(
            operation,
            subject,
            time.monotonic() - began,
            entry.reused,
            len(build.records) + 1,
            self._plan.n_stages + isinstance(build.source, CheckpointSource),
        )
        build.records.append(record)
        if self._on_stage is not None:
            self._on_stage(record)
        return entry
