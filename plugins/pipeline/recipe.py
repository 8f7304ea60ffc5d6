"""`Recipe`: a pipeline as a mapping or a YAML file, checked strictly before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from buildlib.files import atomic_write_bytes
from buildlib.paths import absolute_user_path
from buildlib.validation import Location, first_fault
from harness.errors import ConfigFileError
from harness.yaml_files import YamlFile, read_yaml
from plugins.pipeline.registry import StageRegistry
from plugins.pipeline.settings import NO_DRAFT_STAGES, Features, PipelineSettings
from plugins.pipeline.stage import (
    AnyStage,
    StageConfig,
    find_unbound_inputs,
    makes_containers,
    nearest,
)

_SUFFIXES = (".yaml", ".yml")
_Model = TypeVar("_Model", bound=BaseModel)


class Recipe(dict[str, Any]):
    """A recipe as it was written; `LLMPipelineConfig.of` checks it.

    Attributes:
        path: of its file; None if it was made in a program.
        text: of the file, for the lines of errors.
    """

    path: Path | None = None
    text: str | None = None

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Self:
        """Read a recipe from a `.yaml` or `.yml` file.

        Raises:
            ConfigFileError: it ends otherwise, cannot be read, or is no YAML mapping.
        """
        file = absolute_user_path(path)
        if file.suffix not in _SUFFIXES:
            raise ConfigFileError(str(path), None, "", f"a recipe ends in {' or '.join(_SUFFIXES)}")
        return cls.from_yaml(file)

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> Self:
        """Read a recipe from a YAML file."""
        file = absolute_user_path(path)
        text = read_yaml(file)
        YamlFile(str(path), text, PipelineSettings)
        recipe = cls(yaml.safe_load(text) or {})
        recipe.path, recipe.text = file, text
        return recipe

    def to_yaml(self, path: str | PathLike[str]) -> Path:
        """Write the recipe as YAML, and return the path."""
        file = absolute_user_path(path)
        text = yaml.safe_dump(dict(self), sort_keys=False, allow_unicode=True)
        atomic_write_bytes(file, text.encode())
        return file


@dataclass(frozen=True)
class LLMPipelineConfig:
    """A recipe with checked keys and values.

    Attributes:
        stages: the class of each stage, in the order in which they run.
        configs: the configuration of each.
        folder: base of the recipe's relative paths.
    """

    settings: PipelineSettings
    stages: Mapping[str, type[AnyStage]]
    configs: Mapping[str, StageConfig]
    folder: Path

    @classmethod
    def of(
        cls,
        recipe: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
    ) -> Self:
        """Check a recipe.

        Raises:
            ConfigFileError: names file, line and key where there are some, and the nearest key.
        """
        settings = _checked(recipe, (), PipelineSettings, {**recipe, **(overrides or {})})
        classes = StageRegistry().stages()
        sections = settings.stages or dict.fromkeys(DEFAULT_STAGES)
        for name in sections:
            if name not in classes:
                hint = NO_DRAFT_STAGES if name.startswith("dm_") else nearest(name, classes)
                raise _error(recipe, ("stages", name), f"there is no such stage: {hint}")
        stages = {name: classes[name] for name in sections}
        configs = {
            name: _checked(recipe, ("stages", name), stages[name].Config, section or {})
            for name, section in sections.items()
        }
        if settings.checkpoint is not None and settings.checkpoint not in stages:
            reason = f"{settings.checkpoint!r} is none of its stages: {', '.join(stages)}"
            raise _error(recipe, ("checkpoint",), reason)
        if settings.features != Features() and not any(map(makes_containers, stages.values())):
            reason = f"none of its stages builds them in: {', '.join(stages)}; add genai_builder"
            raise _error(recipe, ("features",), reason)
        for name, field in find_unbound_inputs(stages):
            reason = f"it needs {field}, which no stage before it makes"
            raise _error(recipe, ("stages", name), reason)
        path = recipe.path if isinstance(recipe, Recipe) else None
        return cls(settings, stages, configs, Path.cwd() if path is None else path.parent)


DEFAULT_STAGES = ("model_loader", "quantization", "genai_builder")
"""Stages of a recipe that names none."""


def _checked(
    recipe: Mapping[str, Any], location: Location, model: type[_Model], values: Mapping[str, Any]
) -> _Model:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        fault = first_fault(error, model)
        raise _error(recipe, (*location, *fault.location), fault.reason) from None


def _error(recipe: Mapping[str, Any], location: Location, reason: str) -> ConfigFileError:
    """Make the error of a place in a recipe, with the line if it is as its file has it."""
    path, text = (recipe.path, recipe.text) if isinstance(recipe, Recipe) else (None, None)
    if text is not None and yaml.safe_load(text) == dict(recipe):
        return YamlFile(str(path), text, PipelineSettings).error(location, reason)
    return ConfigFileError(str(path or "recipe"), None, ".".join(map(str, location)), reason)


def check_config(name: str, config: StageConfig) -> StageConfig:
    """Check a configuration again that a program has changed, values within its mappings too."""
    kind = type(config)
    try:
        return kind.model_validate(config.model_dump())
    except ValidationError as error:
        fault = first_fault(error, kind)
        raise ConfigFileError("recipe", None, f"stages.{name}.{fault.key}", fault.reason) from None
