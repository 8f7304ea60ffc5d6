"""Builder of text encoders: a checkpoint or ONNX in, a container that Genie embeds with out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from buildlib.builder.build import Build, BuildOutputs, Sources
from buildlib.builder.build_options import BuildOptions
from buildlib.builder.options import ARnContextLengthConfig
from buildlib.builder.plan import BuildPlan
from buildlib.builder.runner import OnStage
from buildlib.builder.sources import CheckpointSource, ModelSource, OnnxSource
from buildlib.builder.stage_graph import StageGraph, StageNode
from buildlib.builder.stages.package import CONTAINER
from buildlib.cache.key import text_sha256
from buildlib.checkpoint.layout import CONFIG_FILE, MODEL_FILE, TOKENIZER_FILE, read_json
from buildlib.container.container import GenAIContainer
from buildlib.errors import InvalidOptionError, ModelFileError
from buildlib.graph.files import load_model
from buildlib.numerics.transformers import require_installed
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.toolchains.base import Toolchain
from buildlib.toolchains.compile_config import CompileConfig
from plugins.encoders.calibration import rounding_technique
from plugins.encoders.export import EXPORT_FAILURE
from plugins.encoders.interface import (
    EncoderConfig,
    is_encoder,
    is_sentence_transformer,
    longest_text,
    read_pooling,
    sentence_files,
)
from plugins.encoders.stages import (
    CompileEncoder,
    EncoderModel,
    ExportEncoder,
    ImportEncoder,
    PackageEncoder,
    QuantizeEncoder,
    encoder_binary,
)

DEFAULT_LENGTH, _LONGEST_DEFAULT = 128, 512
"""Tokens of the longest text, if neither an option nor the model says it, and the most of those."""
_WEIGHT_BYTES = 2  # or 4, but half-precision is usual
_LENGTHS = "arn_cl_options.context_length"


def builds(source: ModelSource) -> bool:
    """Return whether a source is a text encoder; an unreadable ONNX is none."""
    if isinstance(source, CheckpointSource):
        return is_sentence_transformer(source.folder)
    try:
        return is_encoder(load_model(source.model))
    except ModelFileError:
        return False


def read_config(path: Path) -> Mapping[str, object] | None:
    """See `BuilderModule.read_config`; no encoder ends its answers."""
    if "eos_token_id" in read_json(path):
        return None
    config = EncoderConfig.from_text(path.read_text("utf-8"), path)
    return config.model_dump(mode="json", exclude_none=True)


@dataclass
class EncoderBuild(Build):
    """A build of a text encoder, ready to run.

    Attributes:
        length: tokens of the longest text.
    """

    length: int = DEFAULT_LENGTH

    def run(self, on_stage: OnStage | None = None) -> GenAIContainer:
        """See `Build.run`."""
        with self._graph(on_stage) as graph:
            container = self._add_encoder(graph)
            graph.run(last=True)
            return GenAIContainer.load(container)

    def stages(self) -> tuple[StageNode, ...]:
        """See `Build.stages`."""
        with self._graph(None) as graph:
            self._add_encoder(graph)
        return tuple(graph)

    def files(self) -> frozenset[Path]:
        """See `Build.files`."""
        return super().files() | sentence_files(self.sources.main.folder.absolute())

    @cached_property
    def weights(self) -> int:
        """See `Build.weights`; of a checkpoint an estimate, from the size of its files."""
        source = self.sources.main
        if isinstance(source, OnnxSource):
            return source.weights()
        return sum(path.stat().st_size for path in source.inputs().values()) // _WEIGHT_BYTES

    def outputs(self, on_stage: OnStage | None = None) -> BuildOutputs:
        """Refuse: the stages of an encoder are not those of a decoder."""
        del on_stage
        reason = "stages of a text encoder are not compared; `qnnfarm embed --reference` compares"
        raise InvalidOptionError("verify", reason, ())

    def _add_encoder(self, graph: StageGraph) -> Path:
        plan, runner, source = self.plan, graph.runner, self.sources.main
        texts = {name: text_sha256(text) for name, text in source.texts().items()}
        files = runner.watch.hash(source.inputs()) | texts
        export = source
        if isinstance(source, CheckpointSource):
            exported = graph.add(ExportEncoder(source, files))
            export = _exported(source, exported.folder)
        assert isinstance(export, OnnxSource)  # noqa: S101  (the one or the other)
        model = EncoderModel(
            export=export,
            config=EncoderConfig.from_text(export.config, export.config_file),
            files=files,
            length=self.length,
            pooling=read_pooling(source.folder),
        )
        imported = graph.add(ImportEncoder(model))
        quantized = graph.add(QuantizeEncoder(model, imported, plan.options.quantization))
        name = encoder_binary(source.name)
        compiled = graph.add(
            CompileEncoder(quantized, plan.compilation, plan.target, name, self.toolchain)
        )
        package = PackageEncoder(model, plan, imported, quantized, compiled, runner.versions)
        return graph.add(package).folder / CONTAINER


def plan_build(
    source: ModelSource,
    options: BuildOptions,
    compilation: CompileConfig,
    cache_root: Path,
    toolchain: Toolchain,
) -> EncoderBuild:
    """Check the options of a builder and return the build.

    The context length is that of the longest text, and there is one. ARs mean nothing to an
    encoder, which sees a text at once.
    """
    read_pooling(source.folder)  # which refuses others
    if isinstance(source, CheckpointSource):
        require_installed(source.folder, EXPORT_FAILURE)
        config = _config(source)
    else:
        config = EncoderConfig.from_text(source.config, source.config_file)
    longest = config.max_position_embeddings
    shapes = options.arn_cl_options
    lengths = shapes.context_length
    if lengths == ARnContextLengthConfig().context_length:  # nothing was asked for
        default = longest_text(source.folder) or DEFAULT_LENGTH
        lengths = (min(default, longest or default, _LONGEST_DEFAULT),)
    if len(lengths) != 1:
        raise InvalidOptionError(_LENGTHS, f"an encoder has one, not {len(lengths)}", ())
    if longest is not None and lengths[0] > longest:
        reason = f"{lengths[0]} is more than the {longest} positions of {source.name}"
        raise InvalidOptionError(_LENGTHS, f"{reason} (max_position_embeddings)", ())
    if options.split_model.num_splits not in {None, 1}:
        raise InvalidOptionError("split_model.num_splits", "an encoder is built in one part", ())
    Bitwidths.from_options(options.quantization)
    rounding_technique(options.quantization)
    toolchain.check(compilation)
    update = {"context_length": lengths, "auto_regression_number": lengths}
    shapes = shapes.model_copy(update=update)
    plan = BuildPlan(options.model_copy(update={"arn_cl_options": shapes}), compilation)
    build = EncoderBuild(Sources(source), plan, cache_root, toolchain)
    return replace(build, length=lengths[0])


def _config(source: CheckpointSource) -> EncoderConfig:
    path = source.folder / CONFIG_FILE
    return EncoderConfig.from_text(path.read_text(encoding="utf-8"), path)


def _exported(source: CheckpointSource, folder: Path) -> OnnxSource:
    """Return the export of a checkpoint, which need not be there yet."""
    return OnnxSource(
        name=source.name,
        model=folder / MODEL_FILE,
        encodings=None,
        config=(source.folder / CONFIG_FILE).read_text(encoding="utf-8"),
        config_file=source.folder / CONFIG_FILE,
        tokenizer=source.folder / TOKENIZER_FILE,
        calibration_text=source.calibration_text,
    )
