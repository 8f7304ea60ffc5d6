"""Settings of a pipeline: the keys of a recipe outside its stages.

Names: "Pipeline Configuration", docs.qualcomm.com 80-87189-2; pipeline.md says which are ours.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from buildlib.builder.build_options import BuildOptions
from buildlib.builder.options import DEFAULT_CONTEXT, DEFAULT_PREFILL
from buildlib.container.op_packages import OpPackage
from buildlib.errors import BuildError, InvalidOptionError
from buildlib.paths import default_cache_root, user_path
from buildlib.targets import parse_target
from buildlib.toolchains.base import Toolchain
from buildlib.toolchains.registry import ToolchainName, open_toolchain
from buildlib.validation import NoEffect

NonEmpty = Annotated[str, Field(min_length=1, pattern=r"\A[^\x00]+\z")]
PositiveInt = Annotated[int, Field(ge=1)]
DEFAULT_WINDOWS = 8


def _known_target(text: str) -> str:
    try:
        parse_target(text)
    except BuildError as error:
        raise ValueError(str(error)) from error
    return text


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class GeneratorConfig(_Section):
    """Sizes of the model's graphs.

    Attributes:
        sequence_length: tokens of one call of the prefill graph (AR).
        context_length: tokens that a graph can attend to (CL).
    """

    sequence_length: PositiveInt = DEFAULT_PREFILL
    context_length: PositiveInt = DEFAULT_CONTEXT


class MetricConfig(_Section):
    """A metric of `evaluate()`.

    Attributes:
        dataset: a text file, relative to the recipe or in the model's folder.
        display_name: its key in the result of `evaluate()`.
        windows: pieces of the text, from its start, each of the context length; None: all.
    """

    name: Literal["perplexity"]
    dataset: NonEmpty
    display_name: NonEmpty | None = None
    windows: PositiveInt | None = DEFAULT_WINDOWS

    @property
    def key(self) -> str:
        """The name in results."""
        return self.display_name or self.name

    def find_text(self, folders: Sequence[Path]) -> Path | None:
        """Return the file of the data set in the first folder that has it."""
        places = (folder / self.dataset for folder in folders)
        return next((place for place in places if place.is_file()), None)


class EvaluatorConfig(_Section):
    """Metrics that `evaluate()` computes.

    Attributes:
        context_length: of the windows; by default that of the graphs.
    """

    context_length: PositiveInt | None = None
    metrics: Annotated[tuple[MetricConfig, ...], Field(min_length=1)]


def known_options(*sections: str) -> AfterValidator:
    """Make the check of options of the builder: keys of one section, or dotted keys of several."""
    only = sections[0] if len(sections) == 1 else ""

    def check(keys: dict[str, Any]) -> dict[str, Any]:
        try:
            BuildOptions().with_options({only: keys} if only else keys, sections)
        except InvalidOptionError as error:
            known = f"; there are {', '.join(error.known)}" if error.known else ""
            reason = f"{error.key.removeprefix(f'{only}.')}: {error.reason}{known}"
            raise ValueError(reason) from error
        return keys

    return AfterValidator(check)


NO_DRAFT_STAGES = (
    "no stage makes a draft here: `qnnfarm train draft` trains one, and "
    "features.speculative_decoding names it: {type: eaglet, draft_model_path: draft_model.onnx}"
)
"""Why `eaglet` and the stages `dm_*` of the vendor's recipes are refused."""


def _no_draft(value: object) -> None:
    if value is not None:
        raise ValueError(NO_DRAFT_STAGES)


class Features(_Section):
    """Features of the dialog that the container is built for.

    Attributes:
        speculative_decoding: keys of `speculative_config`, paths relative to the recipe.
        lora: keys of `lora_config`.
        op_packages: libraries with operations of your own, paths relative to the recipe.
    """

    speculative_decoding: Annotated[dict[str, Any], known_options("speculative_config")] | None = (
        None
    )
    lora: Annotated[dict[str, Any], known_options("lora_config")] | None = None
    op_packages: tuple[OpPackage, ...] = ()

    def packages(self, folder: Path) -> tuple[OpPackage, ...]:
        """Return the op packages with absolute paths; `folder` is that of the recipe."""
        return tuple(package.resolved(folder) for package in self.op_packages)

    def options(self, folder: Path) -> dict[str, object]:
        """Return them as options of the builder; `folder` is that of the recipe."""
        from buildlib.builder_options import flatten_options

        keys: dict[str, object] = {
            "speculative_config": self.speculative_decoding,
            "lora_config": self.lora,
            "op_packages": [package.model_dump() for package in self.packages(folder)] or None,
        }
        given = {key: value for key, value in keys.items() if value is not None}
        return flatten_options(given, folder)


class PipelineSettings(_Section):
    """A recipe as it stands, before its stages are checked by their own models.

    Attributes:
        model_id_or_path: a folder, relative to the recipe; or an id of the Hugging Face hub.
        soc_details: `chipset:SM8750`, `SM8750`, or `SM8750:emulator`.
        enable_observers: whether time, memory and bytes of each stage are recorded.
        enable_cache: whether outputs of stages are kept and used again.
        cache_dir: where, relative to the recipe; by default the user's cache folder.
        checkpoint: a stage of the recipe.
        log_level: of the log while stages run.
        toolchain: compiler, as of `qnnfarm build`.
        qairt_sdk: folder of the SDK, relative to the recipe.
        runner_s: seconds for an answer or a window of text on a device; None for those of commands.
        stages: section of each stage, in the order in which they run.
        features: speculative decoding and adapters, which `genai_builder` builds in.
        eaglet: the vendor's way to make a draft, which is refused.
    """

    model_id_or_path: NonEmpty | None = None
    backend: Literal["HTP"] = "HTP"
    soc_details: Annotated[NonEmpty, AfterValidator(_known_target)] | None = None
    enable_observers: bool = True
    enable_cache: bool = True
    cache_dir: NonEmpty | None = None
    checkpoint: Annotated[
        NonEmpty | None, NoEffect("every finished stage is kept, whether it is named or not")
    ] = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    toolchain: ToolchainName = "pypi"
    qairt_sdk: NonEmpty | None = None
    runner_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    generator_config: GeneratorConfig = Field(default_factory=GeneratorConfig)
    evaluator_config: EvaluatorConfig | None = None
    stages: dict[str, dict[str, Any] | None] = Field(default_factory=dict)
    features: Features = Field(default_factory=Features)
    eaglet: Annotated[None, BeforeValidator(_no_draft)] = None

    def cache_root(self, folder: Path) -> Path:
        """Return the root of the stage cache; `folder` is that of the recipe."""
        if self.cache_dir is None:
            return default_cache_root()
        return (folder / user_path(self.cache_dir)).absolute()

    def open_toolchain(self, folder: Path) -> Toolchain:
        """Open the compiler; `folder` is that of the recipe."""
        sdk = None if self.qairt_sdk is None else folder / user_path(self.qairt_sdk)
        return open_toolchain(self.toolchain, sdk)
