"""The contract of a stage: an input, a configuration and an output, each a class of its own."""

import dataclasses
import hashlib
import inspect
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from buildlib.builder.runner import OnStage, StageRunner
from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import SIDECAR
from buildlib.error_base import nearest_names
from buildlib.paths import user_path
from harness.errors import WrongUseError
from plugins.pipeline.settings import PipelineSettings


class StageConfig(BaseModel):
    """Base of the configurations of stages: the keys of a stage's section in a recipe.

    Fields may be assigned until `construct()`; unknown keys and values of other types are refused.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which name an unknown one is nearest to, or else which ones are known."""
    names = list(known)
    near = nearest_names(name, names)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"


class StageConfigs:
    """The configurations of a pipeline's stages, to be changed before `construct()`.

    `pipe.stages.quantization.recipe_name = "w4a16"`
    """

    def __init__(self, configs: Mapping[str, StageConfig]) -> None:
        self.__dict__.update(configs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (each stage has its own class)
        raise AttributeError(f"this pipeline has no stage {name!r}: {nearest(name, self)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"stages.{name}: assign the keys of its configuration instead")

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


@dataclass(frozen=True)
class ModelFolder:
    """A model on its way from stage to stage.

    Attributes:
        path: folder with `model.onnx`, `config.json` and `tokenizer.json`, and `model.encodings`
            of what is quantized.
        key: SHA-256 over everything that it was made from.
        quantized: whether there are encodings for all of it.
        canonical: whether the ONNX has the form that our own stages give it; any other is imported.
        made_of: the model in float that it was made of; None of that itself.
    """

    path: Path
    key: str
    quantized: bool = False
    canonical: bool = False
    made_of: "ModelFolder | None" = None


@dataclass(frozen=True)
class StageInput:
    """Base of the inputs of stages; each field is the output of that name of an earlier stage."""


@dataclass(frozen=True)
class StageOutput:
    """Base of the outputs of stages.

    A field holds a `ModelFolder`, a path, or a JSON value. The manifest keeps it.
    """


InputT = TypeVar("InputT", bound=StageInput)
ConfigT = TypeVar("ConfigT", bound=StageConfig)
OutputT = TypeVar("OutputT", bound=StageOutput)


class Stage(ABC, Generic[InputT, ConfigT, OutputT]):
    """One step of a pipeline, registered by `register_stage`.

    Attributes:
        name: its section in recipes, set by `register_stage`.
        Input: frozen dataclass of its inputs.
        Config: model of its section.
        Output: frozen dataclass of its outputs.
    """

    name: ClassVar[str] = ""
    Input: ClassVar[type[StageInput]] = StageInput
    Config: ClassVar[type[StageConfig]] = StageConfig
    Output: ClassVar[type[StageOutput]] = StageOutput

    def check(self, config: ConfigT, settings: PipelineSettings, folder: Path) -> None:
        """Refuse a wrong configuration that its model accepts; called before any stage runs.

        Args:
            config: of the stage.
            settings: of the pipeline.
            folder: base of the recipe's relative paths.

        Raises:
            QnnfarmError: names the key.
        """

    @abstractmethod
    def run(self, inputs: InputT, config: ConfigT, context: "StageContext") -> OutputT:
        """Do the work, through the cache of `context`.

        Raises:
            QnnfarmError: on any failure; `construct()` passes it on.
        """

    def export(self, output: OutputT, destination: Path) -> Path:
        """Copy the output to a new folder, and return it.

        Raises:
            WrongUseError: there is something at the destination already.
        """
        folder = next(
            (value.path for value in vars(output).values() if isinstance(value, ModelFolder)), None
        )
        if folder is None:
            raise WrongUseError(f"the stage {self.name} makes no folder to export")
        if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
            raise WrongUseError(f"{destination}: it is there already; name a new folder")
        hidden = shutil.ignore_patterns(".*", SIDECAR)
        shutil.copytree(folder, destination, dirs_exist_ok=True, ignore=hidden)
        return destination


AnyStage = Stage[Any, Any, Any]


@dataclass(frozen=True)
class StageContext:
    """Surroundings of one run of a stage.

    Attributes:
        stage: the name of the stage.
        settings: of the pipeline.
        sections: of all stages in the recipe.
        model_dir: the user's model.
        model_name: of the model, and of its folder in the cache.
        cache_root: of the stage cache.
        runner: runs stages of the build library through the cache.
        on_record: to be called with the records of stages that others run.
        folder_of_recipe: base of its relative paths.
    """

    stage: str
    settings: PipelineSettings
    sections: StageConfigs
    model_dir: Path
    model_name: str
    cache_root: Path
    runner: StageRunner
    on_record: OnStage
    folder_of_recipe: Path

    @property
    def folder_of_model(self) -> Path:
        """Folder of the user's model, also where it is named by its ONNX file."""
        return self.model_dir if self.model_dir.is_dir() else self.model_dir.parent

    def resolve(self, path: str) -> Path:
        """Resolve a path of the recipe."""
        return self.folder_of_recipe / user_path(path)

    def folder(
        self,
        stage: AnyStage,
        inputs: StageInput,
        config: StageConfig,
        fill: Callable[[Path], None],
    ) -> ModelFolder:
        """Return the folder that `fill` makes of an empty one, from the cache if nothing changed.

        It is made again when the inputs, the configuration or the file of the stage's class change.
        """
        keys = tuple(v.key for v in vars(inputs).values() if isinstance(v, ModelFolder))
        others = {k: v for k, v in vars(inputs).items() if not isinstance(v, ModelFolder)}
        plain = TypeAdapter(dict[str, Any]).dump_python(others, mode="json")
        custom = _CustomFolder(
            stage.name,
            self.model_dir,
            keys,
            {
                "stage": stage.name,
                "config": config.model_dump(mode="json"),
                "inputs": plain,
                "code": _code_sha256(type(stage)),
            },
            fill,
        )
        entry = self.runner.run(custom)
        return ModelFolder(entry.folder, entry.hash)


@dataclass(frozen=True)
class _CustomFolder(CachedStage):
    """A user's stage as the build library's cache knows stages."""

    name: str
    model_dir: Path
    keys: tuple[str, ...]
    decides: Mapping[str, object]
    fill: Callable[[Path], None]

    @property
    def operation(self) -> str:  # type: ignore[override]  # of each object its own
        return re.sub(r"[^a-z]", "", self.name.lower()) or "custom"

    @property
    def subject(self) -> str:
        return self.name

    @property
    def source(self) -> Path:
        return self.model_dir

    @property
    def options(self) -> Mapping[str, object]:
        return self.decides

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.keys

    def run(self, folder: Path) -> None:
        self.fill(folder)


def _code_sha256(kind: type) -> str:
    """Hash the file of a class; one without a file is new at each call, and so never cached."""
    try:
        file = inspect.getsourcefile(kind)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        return secrets.token_hex(32)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def bind_inputs(stage: type[AnyStage], outputs: Mapping[str, object]) -> StageInput:
    """Fill a stage's input with the outputs of earlier stages, by the names of its fields."""
    names = [field.name for field in dataclasses.fields(stage.Input)]
    return stage.Input(**{name: outputs[name] for name in names if name in outputs})


def makes_containers(stage: type[AnyStage]) -> bool:
    """Return whether a stage gives a container."""
    return any(field.name == "container" for field in dataclasses.fields(stage.Output))


def find_unbound_inputs(stages: Mapping[str, type[AnyStage]]) -> Iterator[tuple[str, str]]:
    """Yield each stage and input that no stage before it makes."""
    outputs: set[str] = set()
    for name, stage in stages.items():
        for field in dataclasses.fields(stage.Input):
            needed = field.default is field.default_factory is dataclasses.MISSING
            if needed and field.name not in outputs:
                yield name, field.name
        outputs |= {field.name for field in dataclasses.fields(stage.Output)}
