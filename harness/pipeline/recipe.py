"""`Recipe`: a pipeline as a mapping or a YAML file, checked strictly before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ValidationError

from buildlib.files import atomic_write_bytes
from buildlib.paths import absolute_user_path
from buildlib.validation import Location, first_fault, reason_for
from harness.errors import ConfigFileError
from harness.pipeline.registry import StageRegistry
from harness.pipeline.settings import NO_DRAFT_STAGES, PipelineSettings
from harness.pipeline.stage import AnyStage, StageConfig, check_bindings
from harness.yaml_files import YamlFile, read_yaml

_SUFFIXES = (".yaml", ".yml")


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
        """Read a recipe from a file whose name ends in `.yaml` or `.yml`.

        Raises:
            ConfigFileError: it ends otherwise, cannot be read, or is no YAML mapping.
        """
        file = absolute_user_path(path)
        if file.suffix not in _SUFFIXES:
            raise ConfigFileError(str(path), None, "", f"a recipe ends in {' or '.join(_SUFFIXES)}")
        return cls.from_yaml(file)

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> Self:
        """Read a recipe from a YAML file.

        Raises:
            ConfigFileError: it cannot be read, is no YAML mapping, or has other keys than recipes.
        """
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
    """A recipe whose keys and values have been checked.

    Attributes:
        stages: the class of each stage, in the order in which they run.
        configs: the configuration of each.
        folder: what relative paths of the recipe are relative to.
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

        Args:
            recipe: a `Recipe` or any mapping.
            overrides: top-level keys in place of the recipe's.

        Raises:
            ConfigFileError: names file, line and key where there are some, and the nearest key.
        """
        checks = _Checks(recipe)
        settings = checks.settings(overrides or {})
        known = StageRegistry().stages()
        sections = settings.stages or dict.fromkeys(DEFAULT_STAGES)
        for name in sections:
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                hint = NO_DRAFT_STAGES if name.startswith("dm_") else hint
                raise checks.error(("stages", name), f"there is no such stage: {hint}")
        stages = {name: known[name] for name in sections}
        configs = {
            name: checks.section(("stages", name), stages[name].Config, section or {})
            for name, section in sections.items()
        }
        if settings.checkpoint is not None and settings.checkpoint not in stages:
            reason = f"{settings.checkpoint!r} is none of its stages: {', '.join(stages)}"
            raise checks.error(("checkpoint",), reason)
        try:
            check_bindings(stages)
        except ConfigFileError as error:
            raise checks.error(tuple(error.key.split(".")), error.reason) from None
        return cls(settings, stages, configs, checks.folder)


DEFAULT_STAGES = ("model_loader", "quantization", "genai_builder")
"""Stages of a recipe that names none."""


class _Checks:
    """Checks of one recipe; errors have lines if it came from a file."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self._recipe = recipe
        self._file: YamlFile[PipelineSettings] | None = None
        self._path = "recipe"
        self.folder = Path.cwd()
        if isinstance(recipe, Recipe) and recipe.path is not None:
            self._path, self.folder = str(recipe.path), recipe.path.parent
            unchanged = recipe.text is not None and yaml.safe_load(recipe.text) == dict(recipe)
            if unchanged and recipe.text is not None:
                self._file = YamlFile(self._path, recipe.text, PipelineSettings)

    def settings(self, overrides: Mapping[str, Any]) -> PipelineSettings:
        settings: PipelineSettings = self.section(
            (), PipelineSettings, {**self._recipe, **overrides}
        )
        return settings

    def section(self, location: Location, model: type[Any], values: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Validate a part of the recipe."""
        try:
            return model.model_validate(dict(values))
        except ValidationError as error:
            raise self._invalid(location, error, model) from None

    def error(self, location: Location, reason: str) -> ConfigFileError:
        """Make the error of a place in the recipe."""
        if self._file is not None:
            return self._file.error(location, reason)
        return ConfigFileError(self._path, None, ".".join(map(str, location)), reason)

    def _invalid(
        self, location: Location, error: ValidationError, model: type[BaseModel]
    ) -> ConfigFileError:
        fault = error.errors(include_url=False)[0]
        return self.error((*location, *fault["loc"]), reason_for(fault, model))


def check_config(name: str, config: StageConfig) -> StageConfig:
    """Check a configuration again that a program has changed, values within its mappings too.

    Raises:
        ConfigFileError: names the stage's key.
    """
    kind = type(config)
    try:
        return kind.model_validate(config.model_dump())
    except ValidationError as error:
        fault = first_fault(error, kind)
        raise ConfigFileError("recipe", None, f"stages.{name}.{fault.key}", fault.reason) from None
