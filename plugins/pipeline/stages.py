"""The four stages of this project, thin over the building blocks of `buildlib`."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from buildlib.builder.additions import additions_of
from buildlib.builder.build_options import COMPILATION, TRANSFORMATION, BuildOptions
from buildlib.builder.calibration_text import read_text
from buildlib.builder.model_folder import check_loss
from buildlib.builder.plan import BuildPlan
from buildlib.builder.sources import CheckpointSource, OnnxSource, find_source
from buildlib.builder.stages.author import AuthorModel
from buildlib.builder.stages.complete_encodings import CompleteEncodings
from buildlib.builder.stages.import_onnx import ImportOnnx
from buildlib.builder.stages.optimize_weights import OptimizeWeights
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.layout import (
    CALIBRATION_TEXT,
    CONFIG_FILE,
    ENCODINGS_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
)
from buildlib.container.chat_template import ChatTemplate
from buildlib.container.container import GenAIContainer
from buildlib.container.op_packages import added_operations, host_libraries
from buildlib.errors import InputFileError, InvalidOptionError
from buildlib.genai import GenAIBuilderHTP
from buildlib.graph.shape import GraphShape
from buildlib.paths import user_path
from buildlib.quantize.options import QuantizationOptions, TechniqueName, check_arguments
from buildlib.targets import parse_target
from buildlib.validation import NoEffect, first_fault
from harness.errors import ConfigFileError
from plugins.pipeline.settings import NonEmpty, PipelineSettings, PositiveInt, known_options
from plugins.pipeline.stage import (
    ModelFolder,
    Stage,
    StageConfig,
    StageContext,
    StageInput,
    StageOutput,
)


class _Accepted(BaseModel):
    """Documented keys that have one value here."""

    model_config = ConfigDict(extra="forbid")


class ModelConfigOverrides(_Accepted):
    """The documented overrides of a model's configuration.

    Attributes:
        input_tokens_per_inference: tokens of one call of the float model; by default
            `sequence_length` of `generator_config`.
    """

    input_tokens_per_inference: PositiveInt | None = None
    transposed_key_cache: Literal[True] = True
    return_new_key_value_only: Literal[True] = True
    num_logits_to_keep: Literal[0] = 0


def _known_overrides(overrides: dict[str, Any]) -> dict[str, Any]:
    try:
        ModelConfigOverrides.model_validate(overrides)
    except ValidationError as error:
        raise ValueError(str(first_fault(error, ModelConfigOverrides))) from error
    return overrides


_RUNS_NO_CODE = NoEffect("no code of a model is run")


class PretrainedKwargs(_Accepted):
    """Arguments of loading.

    Attributes:
        revision: branch, tag or commit of a model of the hub.
    """

    revision: NonEmpty | None = None
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        NoEffect("weights stay in the checkpoint's files, as they are stored there"),
    ] = "auto"
    attn_implementation: Literal["eager"] = "eager"
    trust_remote_code: Annotated[bool, _RUNS_NO_CODE] = False


class TokenizerKwargs(_Accepted):
    """Arguments of loading the tokenizer, none of which changes `tokenizer.json`."""

    trust_remote_code: Annotated[bool, _RUNS_NO_CODE] = False


class ModelLoaderConfig(StageConfig):
    """Section `model_loader`."""

    model_reauthoring: Literal[True] = True
    apply_default_adaptations: Literal[True] = True
    load_tokenizer: Literal[True] = True
    execution_environment: Annotated[
        Literal["cpu", "gpu"], NoEffect("models are loaded and calibrated on the CPU")
    ] = "cpu"
    model_config_overrides: Annotated[dict[str, Any], AfterValidator(_known_overrides)] = Field(
        default_factory=dict
    )
    hf_pretrained_kwargs: PretrainedKwargs = Field(default_factory=PretrainedKwargs)
    hf_tokenizer_kwargs: TokenizerKwargs = Field(default_factory=TokenizerKwargs)


@dataclass(frozen=True)
class ModelInput(StageInput):
    """A model folder."""

    model: ModelFolder


@dataclass(frozen=True)
class ModelOutput(StageOutput):
    """A model folder, in place of the one that was taken."""

    model: ModelFolder


class ModelLoader(Stage[StageInput, ModelLoaderConfig, ModelOutput]):
    """Load a checkpoint or an ONNX export as canonical float ONNX; weights stay in its files."""

    Config = ModelLoaderConfig
    Output = ModelOutput

    def run(
        self,
        inputs: StageInput,  # noqa: ARG002
        config: ModelLoaderConfig,
        context: StageContext,
    ) -> ModelOutput:
        """Author the checkpoint's graph, or import the ONNX."""
        overrides = ModelConfigOverrides.model_validate(config.model_config_overrides)
        sizes = context.settings.generator_config
        ar = overrides.input_tokens_per_inference or sizes.sequence_length
        shape = GraphShape(ar, sizes.context_length)
        source = find_source(context.model_dir, None, calibrates=False)
        files = context.runner.watch.hash(source.inputs())
        context.runner.watch.hash({path.name: path for path in source.text_files()})
        match source:
            case CheckpointSource():
                entry = context.runner.run(AuthorModel(source, files, shape))
            case OnnxSource():
                entry = context.runner.run(ImportOnnx(source, files, shape, _operations(context)))
        return ModelOutput(ModelFolder(entry.folder, entry.hash, canonical=True))


def _no_arguments() -> defaultdict[str, dict[str, Any]]:
    return defaultdict(dict)


TechniqueKwargs = defaultdict[str, dict[str, Any]]
"""Arguments by the name of a technique."""


def _quantization_options(
    keys: dict[str, Any], arguments: Mapping[str, Mapping[str, Any]] | None = None
) -> QuantizationOptions:
    kwargs = {name: values for name, values in (arguments or {}).items() if values}
    try:
        options = QuantizationOptions(**(keys | ({"technique_kwargs": kwargs} if kwargs else {})))
        check_arguments(options)
    except InvalidOptionError as error:
        raise ValueError(f"{error.key.removeprefix('quantization.')}: {error.reason}") from error
    except ValidationError as error:
        fault = first_fault(error, QuantizationOptions)
        reason = f"{fault.key}: {fault.reason}" if fault.key else fault.reason
        raise ValueError(reason) from error
    return options


class _QuantizationSection(StageConfig):
    """Section with options of quantization, which are checked together."""

    @abstractmethod
    def quantization(self) -> QuantizationOptions:
        """Return the options."""

    @model_validator(mode="after")
    def _has_known_options(self) -> Self:
        self.quantization()
        return self


class QuantizationOptConfig(_QuantizationSection):
    """Section `quantization_opt`.

    Attributes:
        techniques: applied one after the other; none leaves the model as it is. They prepare the
            weights for the bits of the section `quantization`.
        technique_kwargs: arguments of the techniques.
    """

    techniques: tuple[TechniqueName, ...] = ()
    technique_kwargs: TechniqueKwargs = Field(default_factory=_no_arguments)

    def quantization(self, bits: "QuantizationConfig | None" = None) -> QuantizationOptions:
        """Return the options of the techniques, with the bits of the section `quantization`."""
        keys = {} if bits is None else {**bits.options, "recipe": bits.recipe_name}
        keys["techniques"] = self.techniques
        return _quantization_options(keys, self.technique_kwargs)


class QuantizationOpt(Stage[ModelInput, QuantizationOptConfig, ModelOutput]):
    """Change the float weights by techniques, so that they quantize better."""

    Input = ModelInput
    Config = QuantizationOptConfig
    Output = ModelOutput

    def run(
        self, inputs: ModelInput, config: QuantizationOptConfig, context: StageContext
    ) -> ModelOutput:
        """Apply the techniques."""
        if not config.techniques:
            return ModelOutput(inputs.model)
        bits = _following(context)
        source = onnx_source(
            inputs.model, context, _calibration_text(bits.calibration_text, context)
        )
        model = _canonical(inputs.model, context)
        options = config.quantization(bits)
        entry = context.runner.run(OptimizeWeights(model, source, options))
        made_of = inputs.model.made_of or inputs.model
        return ModelOutput(ModelFolder(entry.folder, entry.hash, canonical=True, made_of=made_of))


def _known_recipe(name: str) -> str:
    _quantization_options({"recipe": name})
    return name


class QuantizationConfig(_QuantizationSection):
    """Section `quantization`.

    Attributes:
        recipe_name: which of the quantization recipes (docs/quantization.md).
        options: of quantization, in place of the recipe's, such as `mixed_precision`.
        technique_kwargs: arguments of its techniques.
        calibration_text: a text file, relative to the recipe; by default the model's own
            `text/calibration.txt`.
        max_kl: bound of the KL divergence from float on that text, in nats.
    """

    recipe_name: Annotated[NonEmpty, AfterValidator(_known_recipe)] = "w8a16"
    options: dict[str, Any] = Field(default_factory=dict)
    technique_kwargs: TechniqueKwargs = Field(default_factory=_no_arguments)
    calibration_text: NonEmpty | None = None
    max_kl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def quantization(self) -> QuantizationOptions:
        """Return the options of the recipe with those that replace them."""
        keys = {**self.options, "recipe": self.recipe_name}
        return _quantization_options(keys, self.technique_kwargs)


class Quantization(Stage[ModelInput, QuantizationConfig, ModelOutput]):
    """Choose the grid of every weight and activation, calibrated on text."""

    Input = ModelInput
    Config = QuantizationConfig
    Output = ModelOutput

    def check(self, config: QuantizationConfig, settings: PipelineSettings, folder: Path) -> None:  # noqa: ARG002
        """Refuse a text that cannot be read."""
        if config.calibration_text is not None:
            read_text(folder / user_path(config.calibration_text))

    def run(
        self, inputs: ModelInput, config: QuantizationConfig, context: StageContext
    ) -> ModelOutput:
        """Apply the recipe's techniques, and calibrate."""
        text = _calibration_text(config.calibration_text, context)
        source = onnx_source(inputs.model, context, text)
        entry, options = _canonical(inputs.model, context), config.quantization()
        made_of = inputs.model.made_of or inputs.model
        float_model = entry if made_of is inputs.model else _canonical(made_of, context)
        optimize = OptimizeWeights(entry, source, options)
        if optimize.steps and text is not None:
            entry = context.runner.run(optimize)
        entry = context.runner.run(CompleteEncodings(entry, source, options, float_model))
        check_loss(entry.folder, context.model_name, config.max_kl)
        return ModelOutput(
            ModelFolder(entry.folder, entry.hash, quantized=True, canonical=True, made_of=made_of)
        )


def _following(context: StageContext) -> QuantizationConfig:
    """Return the recipe's section `quantization`, by default that of a recipe without one."""
    sections = vars(context.sections).values()
    there = (one for one in sections if isinstance(one, QuantizationConfig))
    return next(there, QuantizationConfig())


def _canonical(model: ModelFolder, context: StageContext) -> CacheEntry:
    """Return the model as an entry of the cache, imported if a user's stage has made it."""
    if model.canonical:
        return _as_entry(model)
    source = onnx_source(model, context, None)
    files = context.runner.watch.hash(source.inputs())
    return context.runner.run(ImportOnnx(source, files, None, _operations(context)))


def _operations(context: StageContext) -> tuple[str, ...]:
    """Return the operations of the recipe's op packages, which models may have."""
    packages = context.settings.features.packages(context.folder_of_recipe)
    return added_operations(host_libraries(packages), context.runner.toolchain)


def _as_entry(model: ModelFolder) -> CacheEntry:
    return CacheEntry("load", model.path, model.key, reused=True)


def _calibration_text(name: str | None, context: StageContext) -> str | None:
    """Read the text that the recipe names, or else the model's own or the default one."""
    path = context.folder_of_model / CALIBRATION_TEXT if name is None else context.resolve(name)
    if name is not None or path.is_file():
        context.runner.watch.hash({path.name: path})
        return read_text(path)
    return find_source(context.model_dir, None).calibration_text


def onnx_source(model: ModelFolder, context: StageContext, text: str | None) -> OnnxSource:
    """Return a stage's model folder as a source of the Gen AI Builder, by the model's own name."""
    folder = model.path
    encodings, config = folder / ENCODINGS_FILE, folder / CONFIG_FILE
    try:
        content = config.read_text(encoding="utf-8")
    except OSError as error:
        raise InputFileError(str(config), error.strerror or str(error)) from error
    return OnnxSource(
        name=context.model_name,
        model=folder / MODEL_FILE,
        encodings=encodings if encodings.is_file() else None,
        config=content,
        config_file=config,
        tokenizer=folder / TOKENIZER_FILE,
        calibration_text=text,
        chat_template=ChatTemplate.find(context.folder_of_model),
        canonical=_as_entry(model) if model.canonical and model.quantized else None,
    )


class GenAIBuilderConfig(StageConfig):
    """Section `genai_builder`: the options of the Gen AI Builder, by its own names.

    Attributes:
        transformation_options: by dotted keys; AR and CL follow `generator_config`.
        compilation_options: by dotted keys.
    """

    transformation_options: Annotated[dict[str, Any], known_options(*TRANSFORMATION)] = Field(
        default_factory=dict
    )
    compilation_options: Annotated[dict[str, Any], known_options(*COMPILATION)] = Field(
        default_factory=dict
    )
    prepare_embedding_lut: bool = False
    max_workers: PositiveInt | None = None


@dataclass(frozen=True)
class GenAIBuilderOutput(StageOutput):
    """The container, in the stage cache."""

    container: Path


_AR = "arn_cl_options.auto_regression_number"
_CL = "arn_cl_options.context_length"


def _builder_options(
    config: GenAIBuilderConfig, settings: PipelineSettings, folder: Path
) -> BuildOptions:
    """Return the options of the builder, with the shapes that the recipe has for all stages."""
    sizes = settings.generator_config
    return BuildOptions().with_options(
        {
            _AR: sorted({1, sizes.sequence_length}),
            _CL: [sizes.context_length],
            **config.transformation_options,
            **config.compilation_options,
            "prepare_embedding_lut": config.prepare_embedding_lut,
            "max_workers": config.max_workers,
            **settings.features.options(folder),
        }
    )


class GenAIBuilder(Stage[ModelInput, GenAIBuilderConfig, GenAIBuilderOutput]):
    """Compile the quantized model into a container, by the Gen AI Builder."""

    Input = ModelInput
    Config = GenAIBuilderConfig
    Output = GenAIBuilderOutput

    def check(self, config: GenAIBuilderConfig, settings: PipelineSettings, folder: Path) -> None:
        """Refuse options that the builder has not, shapes that it cannot build, missing files."""
        if settings.soc_details is None:
            reason = "the genai_builder needs it; name the SoC, such as chipset:SM8750"
            raise ConfigFileError("recipe", None, "soc_details", reason)
        options = _builder_options(config, settings, folder)
        target, toolchain = parse_target(settings.soc_details), settings.open_toolchain(folder)
        additions = additions_of(options, target, toolchain)
        plan = BuildPlan(options, options.compile_config(target), additions).checked()
        for one in plan.compile_configs():
            toolchain.check(one)

    def run(
        self, inputs: ModelInput, config: GenAIBuilderConfig, context: StageContext
    ) -> GenAIBuilderOutput:
        """Build."""
        settings = context.settings
        adds = settings.features.options(context.folder_of_recipe)
        text = _calibration_text(_following(context).calibration_text, context) if adds else None
        source = onnx_source(inputs.model, context, text)
        builder = GenAIBuilderHTP(source, context.cache_root, context.runner.toolchain)
        builder.options = _builder_options(config, settings, context.folder_of_recipe)
        builder.set_targets([settings.soc_details or ""])
        build = builder.plan()
        outputs = build.outputs(context.on_record)
        return GenAIBuilderOutput(outputs.container)

    def export(self, output: GenAIBuilderOutput, destination: Path) -> Path:
        """Save the container to a folder; a container that is there is replaced."""
        return GenAIContainer.load(output.container).save(destination, exist_ok=True).path
