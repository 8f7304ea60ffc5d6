"""Record of a finished `qnnfarm pipeline run`, by which an unchanged one is answered.

Files alone decide the result of a run on this host. While those that it read and made have not
changed, its answer stands: no stage is looked up, and no text is scored again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from buildlib.cache.finished_builds import (
    FinishedBuild,
    code_state,
    find_finished,
    remember_finished,
)
from buildlib.checkpoint.layout import CALIBRATION_TEXT
from buildlib.errors import InputFileError
from buildlib.paths import absolute_user_path, user_path
from harness.errors import ConfigFileError
from harness.pipeline.settings import Features, PipelineSettings
from harness.yaml_files import YamlFile, read_yaml

if TYPE_CHECKING:
    from harness.pipeline.llm import LLMPipeline
    from harness.pipeline.observers import StageEvent

_OUR_STAGES = "harness.pipeline.stages"


@dataclass(frozen=True)
class RecordedRun:
    """One run of a recipe on this host.

    Attributes:
        root: of the stage cache, with the record.
        request: all that decides the run but the content of files.
    """

    root: Path
    request: Mapping[str, Any]

    @classmethod
    def of(cls, recipe: Path, model: str | None, **arguments: object) -> Self | None:
        """Describe a run; None if no record can stand for it, or its recipe is wrong.

        Runs without a cache leave nothing to go by, and a model of the hub may have changed there.
        """
        file = absolute_user_path(recipe)
        try:
            text = read_yaml(file)
            settings = YamlFile(str(file), text, PipelineSettings).content
        except ConfigFileError:
            return None
        model_path = model or settings.model_id_or_path
        if model_path is None or not settings.enable_cache:
            return None
        path = (Path.cwd() if model else file.parent) / user_path(model_path)
        if not path.exists():
            return None
        request = {
            "recipe": str(file),
            "text": text,
            "model": str(path.absolute()),
            "harness": code_state(Path(__file__).parents[1]),
            **arguments,
        }
        return cls(settings.cache_root(file.parent), request)

    def answer(self) -> dict[str, Any] | None:
        """Return the answer of the run, if no file has changed since."""
        build = find_finished(self.root, self.request)
        if build is None:
            return None
        answer: dict[str, Any]
        answer, outputs = build.answer
        return answer if _made(Path(answer["manifest"])) == outputs else None

    def remember(
        self,
        pipe: "LLMPipeline",
        events: "Sequence[StageEvent]",
        answer: dict[str, Any],
        out: Path | None,
    ) -> None:
        """Keep the answer of the run that has just ended, if all that decides it is known.

        A user's own stage may read other files than those of the model, or do more than make some,
        and features have files of their own.
        """
        from harness.pipeline.observers import StageFinished

        if any(stage.__module__ != _OUR_STAGES for stage in pipe.config.stages.values()):
            return
        if pipe.config.settings.features != Features():
            return
        ends = [event for event in events if isinstance(event, StageFinished)]
        files = {path: sha256 for event in ends for path, sha256 in event.files.items()}
        model, file = pipe.place.folder, pipe.place.file
        texts, absent = _data_sets(pipe.config.settings, (pipe.config.folder, model))
        try:
            build = FinishedBuild.of(
                self.root,
                [*files, *texts, *([] if file is None else [file])],
                [model, (model / CALIBRATION_TEXT).parent],
                [] if out is None else [out],
                {folder for event in ends for folder in event.folders},
                [answer, _made(pipe.manifest_path)],
                absent,
            )
        except InputFileError:
            return
        if all(build.read[str(path)] == sha256 for path, sha256 in files.items()):
            remember_finished(self.root, self.request, build)


def _made(manifest: Path) -> list[Any] | None:
    """Return the recipe and the outputs in a manifest, which another recipe's run replaces."""
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        return [content["recipe"], [[one["name"], one["output"]] for one in content["stages"]]]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _data_sets(
    settings: PipelineSettings, folders: tuple[Path, ...]
) -> tuple[list[Path], list[Path]]:
    """Return the texts of all metrics, and where one would come before them."""
    config = settings.evaluator_config
    texts = [m.find_text(folders) for m in (() if config is None else config.metrics)]
    return [text for text, _ in texts if text], [one for _, before in texts for one in before]
