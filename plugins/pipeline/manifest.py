"""`PipelineManifest`: the finished stages of a pipeline and their outputs, on disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from buildlib.cache.layout import model_folders
from buildlib.files import atomic_write_bytes
from buildlib.validation import first_fault
from harness.errors import PipelineError
from plugins.pipeline.stage import AnyStage, StageOutput

FILE = "pipeline_manifest.json"
VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StageEntry(_Part):
    """One finished stage.

    Attributes:
        config: its configuration, defaults included.
        output: its output, with paths into the stage cache.
        seconds: that it took; about nothing if everything of it came from the cache.
        reused: whether it did.
        metrics: results of `evaluate()` after it, by display name.
    """

    name: str
    config: Mapping[str, Any]
    output: Mapping[str, Any]
    seconds: float
    reused: bool
    metrics: Mapping[str, float] = Field(default_factory=dict)

    def read_output(self, stage: type[AnyStage]) -> StageOutput:
        """Return the output as the stage's class has it.

        Raises:
            ValidationError: it was written by another version of the stage.
        """
        return TypeAdapter(stage.Output).validate_python(dict(self.output))


class PipelineManifest(_Part):
    """All finished stages of a pipeline, in order.

    Attributes:
        model: folder of the user's model.
        recipe: the recipe as it ran, changes by the program included.
        folder: base of its relative paths.
    """

    version: int = VERSION
    model: str
    folder: str
    recipe: Mapping[str, Any]
    stages: tuple[StageEntry, ...] = ()

    def save(self, path: Path) -> None:
        """Write the manifest, whole or not at all."""
        atomic_write_bytes(path, self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a manifest."""
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise PipelineError(f"{path}: {error.strerror or 'cannot be read'}") from error
        except ValidationError as error:
            reason = f"no manifest of a pipeline: {first_fault(error, cls)}"
            raise PipelineError(f"{path}: {reason}") from error
        if manifest.version > VERSION:
            reason = f"a later qnnfarm wrote it (version {manifest.version}); use that one"
            raise PipelineError(f"{path}: {reason}")
        return manifest


def find_manifest(cache_dir: Path, model: str | None = None) -> Path:
    """Find the manifest of a pipeline in its cache folder, or in the model's folder there."""
    if (cache_dir / FILE).is_file():
        return cache_dir / FILE
    manifests = {folder.name: folder / FILE for folder in model_folders(cache_dir)}
    manifests = {name: path for name, path in manifests.items() if path.is_file()}
    if model is not None and model in manifests:
        return manifests[model]
    if len(manifests) == 1 and model is None:
        return next(iter(manifests.values()))
    if not manifests:
        raise PipelineError(f"{cache_dir}: no pipeline has run with this cache_dir")
    names = f"it has pipelines of {', '.join(manifests)}"
    if model is None:
        raise PipelineError(f"{cache_dir}: {names}; name one: model=...")
    raise PipelineError(f"{cache_dir}: no pipeline of {model} has run with it; {names}")
