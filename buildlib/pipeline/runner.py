"""The stages of one build with their keys: what each one's outcome depends on."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from buildlib.cache import CacheEntry, Operation, StageCache, StageKey
from buildlib.cache.file_hashes import MEMO_FILE, hash_files
from buildlib.cache.hashing import combined, sha256_sources
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.child_processes import check_cancelled
from buildlib.errors import InvalidOptionError
from buildlib.graph.shape import GraphShape
from buildlib.lora.config import LoraBuilderInputConfig, LoraSet
from buildlib.pipeline import stages
from buildlib.pipeline.error_names import naming
from buildlib.pipeline.package import Composition, Prepared, package
from buildlib.pipeline.plan import BuildPlan, Part
from buildlib.pipeline.source_watch import SourceWatch
from buildlib.pipeline.sources import CheckpointSource, ModelSource, OnnxSource
from buildlib.toolchains.base import Toolchain

_GRAPHS = ("pipeline/stages.py", "checkpoint", "encodings", "graph", "passes/base.py")
_WEIGHTS = (*_GRAPHS, "quantize", "reference")

# The code of each stage, as sources of this package: a changed pass must not find its old results.
_CODE: Mapping[Operation, tuple[str, ...]] = MappingProxyType(
    {
        "export": _WEIGHTS,
        "import": (*_GRAPHS, "importing", "passes", "quantize/export.py"),
        "quantize": _WEIGHTS,
        "lora": (*_WEIGHTS, "container", "lora"),
        "embedding": (*_GRAPHS, "container", "embedding"),
        "arcl": (*_GRAPHS, "passes/arcl.py"),
        "transform": (*_GRAPHS, "passes"),
        "convert": (*_WEIGHTS, "toolchains"),
        "compile": ("pipeline/stages.py", "toolchains"),
        "package": (*_GRAPHS, "container", "embedding", "pipeline/package.py", "quantize"),
    }
)
_COMPILED = frozenset({"convert", "compile", "package"})  # what the toolchain's versions decide
_CONTAINER = "container"


@dataclass(frozen=True)
class StageRecord:
    """One stage that a build went through.

    Attributes:
        subject: which graph or part, such as `ar32_cl192_1_of_2`.
        reused: whether it came from the cache.
        total: stages of the build; `None` before it is known how many parts there are.
    """

    operation: Operation
    subject: str
    seconds: float
    reused: bool
    number: int
    total: int | None


OnStage = Callable[[StageRecord], None]


class StageRunner:
    """Runs stages through the cache, from any thread, and keeps a record of each."""

    def __init__(
        self, toolchain: Toolchain, cache: StageCache, cache_root: Path, on_stage: OnStage | None
    ) -> None:
        self.records: list[StageRecord] = []
        self.total: int | None = None
        self.watch = SourceWatch(cache_root / MEMO_FILE)
        self._toolchain = toolchain
        self._cache = cache
        self._cache_root = cache_root
        self._on_stage = on_stage
        self._recording = threading.Lock()
        self._versions = dict(toolchain.versions())
        package_folder = Path(__file__).parents[1]
        self._code = {name: sha256_sources(package_folder, *_CODE[name]) for name in _CODE}

    def export(
        self,
        source: ModelSource,
        inputs: Mapping[str, str],
        plan: BuildPlan,
        shape: GraphShape | None,
    ) -> CacheEntry:
        """The model in canonical form, with encodings for all of it.

        Args:
            source: of the graphs of one AR at least.
            inputs: hashes of its files.
            plan: how what has no encodings is quantized, of a checkpoint all.
            shape: that it is made at, if it has none of its own; a prefill shape, if there is a
                choice.

        Raises:
            InvalidOptionError: a checkpoint, which has no shape to keep.
        """
        match source:
            case OnnxSource():
                imported = self._import(source, inputs, shape)
                return self._complete(source, imported, plan)
            case CheckpointSource():
                if shape is None:
                    key = "arn_cl_options.skip_ar_cl_conversion"
                    raise InvalidOptionError(key, "a checkpoint has no AR and CL to keep", ())
                options, text = plan.conversion.quantization, _sha256(source.calibration_text)
                return self._stage(
                    "export",
                    source.name,
                    source.folder,
                    {
                        "ar": shape.ar,
                        "cl": shape.cl,
                        "quantization": options,
                        "calibration_sha256": text,
                    },
                    (combined(inputs),),
                    lambda folder: stages.export(source, shape, options, folder),
                )

    def _import(
        self,
        source: OnnxSource,
        inputs: Mapping[str, str],
        shape: GraphShape | None,
    ) -> CacheEntry:
        config = {
            "ar": shape.ar if shape else None,
            "cl": shape.cl if shape else None,
            "config_sha256": _sha256(source.config),
        }
        return self._stage(
            "import",
            source.name,
            source.model,
            config,
            (combined(inputs),),
            lambda folder: stages.import_onnx(source, shape, folder),
        )

    def _complete(self, source: OnnxSource, imported: CacheEntry, plan: BuildPlan) -> CacheEntry:
        text = source.calibration_text
        options = plan.conversion.quantization

        def complete(folder: Path) -> None:
            with naming(source):
                stages.complete(imported.folder, text, options, folder)

        return self._stage(
            "quantize",
            "encodings",
            imported.folder,
            {"quantization": options, "calibration_sha256": _sha256(text) if text else None},
            (imported.hash,),
            complete,
        )

    def arcl(self, export: CacheEntry, shape: GraphShape) -> CacheEntry:
        """The whole model at one shape."""
        model = export.folder / MODEL_FILE
        return self._stage(
            "arcl",
            str(shape),
            model,
            {"ar": shape.ar, "cl": shape.cl},
            (export.hash,),
            lambda folder: stages.arcl(model, shape, folder),
        )

    def transform(
        self, arcl: CacheEntry, shape: GraphShape, plan: BuildPlan, n_splits: int
    ) -> CacheEntry:
        """The parts of the model at one shape."""
        model = arcl.folder / MODEL_FILE
        options = plan.transformation
        splitting = options.split_model.model_copy(update={"num_splits": n_splits})
        return self._stage(
            "transform",
            str(shape),
            model,
            {"split_model": splitting, "mha2sha": options.mha2sha},
            (arcl.hash,),
            lambda folder: stages.transform(model, n_splits, splitting, options.mha2sha, folder),
        )

    def weights(self, split: CacheEntry, shape: GraphShape, part: Part) -> CacheEntry:
        """The integer weights of one part, which all its shapes share."""
        source = split.folder / f"{part.graph(shape)}.onnx"
        return self._stage(
            "quantize",
            f"weights {part.stem}",
            source,
            {"part": part.stem},
            (split.hash,),
            lambda folder: stages.weights(source, folder),
        )

    def convert(
        self, split: CacheEntry, weights: CacheEntry, shape: GraphShape, part: Part, plan: BuildPlan
    ) -> CacheEntry:
        """One part at one shape, quantized and as a DLC."""
        stem = part.graph(shape)
        source = split.folder / f"{stem}.onnx"
        shared = weights.folder / f"{part.stem}.weights"
        return self._stage(
            "convert",
            stem,
            source,
            {"part": stem, "target": str(plan.target)},
            (split.hash, weights.hash),
            lambda folder: stages.convert(
                source, shared, stem, plan.target, self._toolchain, folder
            ),
        )

    def compile_part(
        self,
        converted: Mapping[GraphShape, CacheEntry],
        part: Part,
        plan: BuildPlan,
        name: str,
    ) -> CacheEntry:
        """The context binary of one part, of all its shapes; `name` is the file's."""
        dlcs = [entry.folder / f"{part.graph(shape)}.dlc" for shape, entry in converted.items()]
        config = plan.compile_config(part)
        return self._stage(
            "compile",
            f"part {part.number} of {part.count}",
            dlcs[0],
            config.compiled_part().model_dump(mode="json"),
            tuple(entry.hash for entry in converted.values()),
            lambda folder: stages.compile_part(dlcs, config, self._toolchain, folder / name),
        )

    def prepare(
        self, source: ModelSource, export: CacheEntry, plan: BuildPlan
    ) -> tuple[CacheEntry, Prepared]:
        """The model with what the plan adds to it before it is cut: adapters, a table outside."""
        entry, lora, table = export, None, None
        config, datatype = plan.additions.lora, plan.additions.embedding
        if config is not None:
            entry = self._lora(source, entry, config)
            lora = entry.folder
        if datatype is not None:
            before = entry
            entry = self._stage(
                "embedding",
                "table",
                before.folder / MODEL_FILE,
                {"embed_datatype": datatype},
                (before.hash,),
                lambda folder: stages.extract_embedding(before.folder, datatype, folder),
            )
            table = entry.folder
        return entry, Prepared(entry.folder, lora, table)

    def _lora(
        self, source: ModelSource, entry: CacheEntry, config: LoraBuilderInputConfig
    ) -> CacheEntry:
        text = source.calibration_text
        adapters = LoraSet.load(config.lora_config_path)
        paths = {
            f"{adapter.name}/{path.name}": path
            for adapter in adapters.adapters
            for path in sorted(adapter.path.glob("adapter_*"))
        }
        hashes = self.watch.hashed(paths)
        options = {
            "lora_config": config.model_dump(mode="json", exclude={"lora_config_path"}),
            "adapters": [adapter.name for adapter in adapters.adapters],
            "use_cases": [case.model_dump() for case in adapters.cases],
            "calibration_sha256": _sha256(text) if text else None,
        }
        return self._stage(
            "lora",
            ", ".join(case.name for case in adapters.cases),
            config.lora_config_path,
            options,
            (entry.hash, combined(hashes)),
            lambda folder: stages.add_lora(entry.folder, config, text, folder),
        )

    def package(
        self,
        plan: BuildPlan,
        prepared: Prepared,
        composition: Composition,
        quantized: Sequence[Path],
        compiled: Sequence[CacheEntry],
        binaries: Sequence[Path],
        model_name: str,
        inputs: Mapping[str, str],
    ) -> Path:
        """The container; `quantized` are QDQ parts that tell how its weights are stored."""
        extras = {name: file.path for name, file in composition.extras.items()}
        hashes = hash_files(extras.values(), self._cache_root / MEMO_FILE)
        config = {
            "target": str(plan.target),
            "model": model_name,
            "options": plan.as_options(),
            "genie_config": json.loads(composition.genie_config.to_json()),
        }
        entry = self._stage(
            "package",
            str(plan.target),
            prepared.model,
            config,
            (
                combined(inputs),
                combined({name: hashes[path].sha256 for name, path in extras.items()}),
                *(entry.hash for entry in compiled),
            ),
            lambda folder: package(
                folder / _CONTAINER,
                plan=plan,
                model_name=model_name,
                prepared=prepared,
                composition=composition,
                quantized=quantized,
                inputs=inputs,
                binaries=binaries,
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
        versions = self._versions if operation in _COMPILED else {}
        key = StageKey(operation, config, source_hashes, versions, self._code[operation])

        def watched(folder: Path) -> None:
            work(folder)
            self.watch.check()  # or there would be an entry of other content than its key

        check_cancelled()
        entry = self._cache.get_or_build(key, source, watched, subject=subject)
        with self._recording:
            record = StageRecord(
                operation,
                subject,
                time.monotonic() - began,
                entry.reused,
                len(self.records) + 1,
                self.total,
            )
            self.records.append(record)
            if self._on_stage is not None:
                self._on_stage(record)
        return entry


def hash_texts(source: ModelSource) -> dict[str, str]:
    """SHA-256 of what else decides what is built, by name."""
    return {name: _sha256(text) for name, text in source.texts().items()}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
