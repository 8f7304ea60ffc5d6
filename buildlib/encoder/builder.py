"""Builder of text encoders: one ONNX in, a container that Genie embeds texts with out."""

from dataclasses import dataclass, replace
from pathlib import Path

from buildlib.builder.build import Build, BuildOutputs, Sources
from buildlib.builder.build_options import BuildOptions
from buildlib.builder.options import ARnContextLengthConfig
from buildlib.builder.plan import BuildPlan
from buildlib.builder.runner import OnStage
from buildlib.builder.sources import ModelSource, OnnxSource
from buildlib.builder.stage_graph import StageGraph, StageNode
from buildlib.builder.stages.package import CONTAINER
from buildlib.cache.key import text_sha256
from buildlib.container.container import GenAIContainer
from buildlib.encoder.interface import POOLING, EncoderConfig, is_encoder, read_pooling
from buildlib.encoder.stages import (
    CompileEncoder,
    EncoderModel,
    ImportEncoder,
    PackageEncoder,
    QuantizeEncoder,
    encoder_binary,
)
from buildlib.errors import InvalidOptionError, ModelFileError
from buildlib.graph.files import load_model
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.toolchains.base import Toolchain
from buildlib.toolchains.compile_config import CompileConfig

DEFAULT_LENGTH = 128
"""Tokens of the longest text, if no context length is set; a shorter model sets a lower one."""
_LENGTHS = "arn_cl_options.context_length"


def encodes_text(source: ModelSource) -> bool:
    """Return whether a source is a text encoder; an unreadable ONNX is none."""
    try:
        return isinstance(source, OnnxSource) and is_encoder(load_model(source.model))
    except ModelFileError:
        return False


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
        path = self.sources.main.folder.absolute() / POOLING
        return super().files() | ({path} if path.is_file() else set())

    def outputs(self, on_stage: OnStage | None = None) -> BuildOutputs:
        """Refuse: the stages of an encoder are not those of a decoder."""
        del on_stage
        reason = "stages of a text encoder are not compared; `qnnfarm embed --reference` compares"
        raise InvalidOptionError("verify", reason, ())

    def _add_encoder(self, graph: StageGraph) -> Path:
        plan, runner, source = self.plan, graph.runner, self.sources.main
        if not isinstance(source, OnnxSource):
            raise TypeError("an encoder is built from ONNX")
        texts = {name: text_sha256(text) for name, text in source.texts().items()}
        model = EncoderModel(
            export=source,
            config=EncoderConfig.from_text(source.config, source.config_file),
            files=runner.watch.hash(source.inputs()) | texts,
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


def plan_encoder(
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
    if not isinstance(source, OnnxSource):
        raise TypeError("an encoder is built from ONNX")
    config = EncoderConfig.from_text(source.config, source.config_file)
    longest = config.max_position_embeddings
    shapes = options.arn_cl_options
    lengths = shapes.context_length
    if lengths == ARnContextLengthConfig().context_length:  # nothing was asked for
        lengths = (min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH),)
    if len(lengths) != 1:
        raise InvalidOptionError(_LENGTHS, f"an encoder has one, not {len(lengths)}", ())
    if longest is not None and lengths[0] > longest:
        reason = f"{lengths[0]} is more than the {longest} positions of {source.name}"
        raise InvalidOptionError(_LENGTHS, f"{reason} (max_position_embeddings)", ())
    if options.split_model.num_splits not in {None, 1}:
        raise InvalidOptionError("split_model.num_splits", "an encoder is built in one part", ())
    Bitwidths.from_options(options.quantization)
    toolchain.check(compilation)
    update = {"context_length": lengths, "auto_regression_number": lengths}
    shapes = shapes.model_copy(update=update)
    plan = BuildPlan(options.model_copy(update={"arn_cl_options": shapes}), compilation)
    build = EncoderBuild(Sources(source), plan, cache_root, toolchain)
    return replace(build, length=lengths[0])
