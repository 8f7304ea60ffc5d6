"""`LLMPipeline`: reads a recipe, runs its stages in order, evaluates and generates.

    pipe = LLMPipeline.from_pretrained("model_dir", recipe="recipe.yaml")
    pipe.construct()
    pipe.evaluate()
    pipe.generate("Hello", device=Device(type="android", identifier="<serial>@<host>")).print()

The names are the vendor's ("Pipeline Overview", docs.qualcomm.com 80-87189-2).
"""

import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from buildlib.builder.model_place import find_model
from buildlib.builder.runner import StageRecord, StageRunner
from buildlib.cache.store import StageCache
from buildlib.container.container import GenAIContainer
from buildlib.numerics.comparison import VerificationReport
from buildlib.numerics.transformers import ReferenceEngine
from buildlib.paths import absolute_user_path
from harness.devices.spec import DeviceSpec
from harness.errors import ConfigFileError, PipelineError
from harness.workloads.generate import Generate
from plugins.pipeline.answer import (
    GenerationAnswer,
    generate_on_device,
    generate_on_host,
    leased_session,
)
from plugins.pipeline.comparison import (
    compare_stages,
    read_dataset,
    refuse_other_windows,
    score_on_device,
    score_on_host,
    with_errors,
    with_windows_of,
)
from plugins.pipeline.host_model import open_host_model
from plugins.pipeline.manifest import FILE, PipelineManifest, StageEntry, find_manifest
from plugins.pipeline.observers import (
    OnStageEvent,
    StageEvent,
    StageFailed,
    StageFinished,
    StageProfiler,
    StageStarted,
    StageStep,
)
from plugins.pipeline.recipe import LLMPipelineConfig, Recipe, check_config
from plugins.pipeline.settings import DEFAULT_WINDOWS, EvaluatorConfig, MetricConfig
from plugins.pipeline.stage import (
    ModelFolder,
    StageConfigs,
    StageContext,
    StageOutput,
    bind_inputs,
    nearest,
)

MAX_TOKENS = 32


@dataclass(frozen=True)
class _Finished:
    """A finished stage; one that was loaded asks the cache again when it is to be constructed."""

    entry: StageEntry
    output: StageOutput
    is_loaded: bool = False


class LLMPipeline:
    """Pipeline of one model.

    Attributes:
        config: the checked recipe.
        stages: configurations of the stages.
        place: of the model.
        model_dir: folder of the model, or its ONNX file.
        model_name: names its folder in the cache.
        cache_root: of the stage cache.
        profiler: cost of each stage; None with `enable_observers: false`.
    """

    def __init__(self, config: LLMPipelineConfig, model: str | None = None) -> None:
        """Nothing is run or read yet."""
        self.config = config
        self.stages = StageConfigs(config.configs)
        self.profiler = StageProfiler() if config.settings.enable_observers else None
        self._observers: list[OnStageEvent] = [] if self.profiler is None else [self.profiler]
        settings = config.settings
        place = model or settings.model_id_or_path
        if place is None:
            raise ConfigFileError(
                "recipe", None, "model_id_or_path", "it is missing; name the model"
            )
        loader = config.configs.get("model_loader")
        revision = getattr(getattr(loader, "hf_pretrained_kwargs", None), "revision", None)
        base = Path.cwd() if model else config.folder
        self.cache_root = self._cache_root()
        self.place = find_model(place, base, revision, self.cache_root)
        self.model_dir, self.model_name = self.place.path, self.place.name
        self._done: dict[str, _Finished] = {}

    @classmethod
    def from_pretrained(
        cls,
        model_id_or_path: str | PathLike[str] | None = None,
        recipe: str | PathLike[str] | Mapping[str, Any] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> Self:
        """Make the pipeline of a model.

        Args:
            model_id_or_path: a folder, or an id of the Hugging Face hub; by default the recipe's.
            recipe: a YAML file, or a mapping; by default the stages `model_loader`, `quantization`
                and `genai_builder` with their defaults.
            settings: top-level keys in place of the recipe's, such as `cache_dir`.

        Raises:
            ConfigFileError: names file, line and key of the fault.
            PipelineError: the model is not a folder, and cannot be had from the hub.
        """
        content = recipe or {}
        if isinstance(content, str | PathLike):
            content = Recipe.from_file(content)
        config = LLMPipelineConfig.of(content, settings)
        return cls(config, None if model_id_or_path is None else str(model_id_or_path))

    @classmethod
    def load(cls, cache_dir: str | PathLike[str], model: str | None = None) -> Self:
        """Open a pipeline that has run, with the outputs of its finished stages.

        `evaluate()`, `generate()` and `export()` work at once; `construct()` goes on from there.

        Args:
            cache_dir: of the recipe that ran.
            model: its name, where several pipelines ran with one `cache_dir`.

        Raises:
            PipelineError: there is no such pipeline, or its manifest cannot be read.
        """
        path = find_manifest(absolute_user_path(cache_dir), model)
        manifest = PipelineManifest.load(path)
        recipe = Recipe(manifest.recipe)
        recipe.path = Path(manifest.folder) / FILE
        pipe = cls(LLMPipelineConfig.of(recipe), manifest.model)
        for entry in manifest.stages:
            stage = pipe.config.stages.get(entry.name)
            try:
                output = None if stage is None else entry.read_output(stage)
            except ValidationError:
                output = None
            if output is None or not _is_there(output):
                break
            pipe._done[entry.name] = _Finished(entry, output, is_loaded=True)
        return pipe

    @property
    def manifest_path(self) -> Path:
        """Path of the manifest, which is written after each stage."""
        return self.cache_root / self.model_name / FILE

    @property
    def completed(self) -> tuple[str, ...]:
        """Names of the finished stages, in order."""
        return tuple(self._done)

    def add_observer(self, observer: OnStageEvent) -> None:
        """Call an observer with the events of stages, after those added before it."""
        if observer in self._observers:
            raise ValueError("the observer was added already")
        self._observers.append(observer)

    def _tell(self, event: StageEvent) -> None:
        for observer in self._observers:
            observer(event)

    def construct(self, *, until: str | None = None) -> Self:
        """Run the stages in order; those that nothing has changed for come from the cache.

        Args:
            until: the last stage to run; by default all.

        Raises:
            QnnfarmError: a stage failed; finished stages are kept.
        """
        names = list(self.config.stages)
        if until is not None and until not in names:
            raise PipelineError(f"this pipeline has no stage {until!r}: {nearest(until, names)}")
        if until is not None:
            names = names[: names.index(until) + 1]
        for name in names:
            config = check_config(name, self.stages[name])
            self.config.stages[name]().check(config, self.config.settings, self.config.folder)
        outputs: dict[str, object] = {}
        with StageCache(self.cache_root, self.model_name) as cache:
            for number, name in enumerate(names, start=1):
                config = self.stages[name].model_dump(mode="json")
                stage = self._done.get(name)
                if stage is None or stage.is_loaded or stage.entry.config != config:
                    self._forget_from(name)
                    self._run(name, (number, len(names)), outputs, cache)
                    self._save_manifest()
                outputs |= vars(self._done[name].output)
        return self

    def check_metrics(self) -> None:
        """Read the texts of the recipe's metrics, so that `evaluate()` will find them."""
        config = self.config.settings.evaluator_config
        for metric in () if config is None else config.metrics:
            self._text_of(metric)

    def evaluate(
        self, *, device: DeviceSpec | str | None = None, stage: str | None = None
    ) -> dict[str, float]:
        """Compute the recipe's metrics for the output of a stage, by default of the latest.

        Without a device they run on this host: the float or quantized model on the CPU, a
        container for the emulator on the emulator.

        Args:
            device: runs the container, by Genie.
            stage: a finished one.

        Returns:
            Scores by display name, and the standard errors of those over several windows, such as
            `{"PPL_heldout": 19.4, "PPL_heldout_error": 0.6}`.

        Raises:
            PipelineError: no stage has run, or there is no container for the device.
            ConfigFileError: the recipe has no `evaluator_config`, or a text of it cannot be read.
        """
        outputs = self.outputs(stage, needed_by="evaluate()")
        config = self._metrics("name the metrics that evaluate() is to compute")
        work = {metric.key: (self._text_of(metric), metric.windows) for metric in config.metrics}
        if device is not None:
            with leased_session(
                _container(outputs), device, self.config.settings.runner_s
            ) as session:
                refuse_other_windows(config, session)
                scores = {key: score_on_device(session, *text) for key, text in work.items()}
        else:
            with open_host_model(outputs, self.cache_root / self.model_name) as whole:
                model = with_windows_of(config, whole)
                scores = {key: score_on_host(model, *text) for key, text in work.items()}
        values = with_errors(scores)
        self._keep_scores(stage or self.completed[-1], values)
        return values

    def verify(
        self,
        text: str | None = None,
        windows: int | None = None,
        *,
        max_kl: float | None = None,
        reference_with: ReferenceEngine = "onnx",
    ) -> VerificationReport:
        """Compare the outputs of all finished stages on this host with the model in float.

        Args:
            text: to compare on; by default the data set of the recipe's first metric.
            windows: pieces of it; by default as many as that metric has.
            max_kl: bound of what is quantized, in nats.
            reference_with: `transformers` judges the model in float, too.
        """
        self.outputs(needed_by="verify()")
        return compare_stages(
            [(name, self.outputs(name)) for name in self.completed],
            *self.text_to_compare(text, windows),
            self.cache_root / self.model_name,
            max_kl=max_kl,
            judge=self.place.folder if reference_with == "transformers" else None,
        )

    def outputs(
        self, stage: str | None = None, *, needed_by: str = "outputs()"
    ) -> dict[str, object]:
        """Return the outputs of all finished stages by name, up to `stage`.

        Args:
            stage: a finished one; by default the latest.
            needed_by: the caller, for errors.
        """
        if not self._done:
            raise PipelineError(f"{needed_by} needs a finished stage; call construct() first")
        if stage is not None and stage not in self._done:
            names = ", ".join(self._done)
            raise PipelineError(f"{needed_by}: {stage!r} is no finished stage; there are {names}")
        outputs: dict[str, object] = {}
        for name, stage_output in self._done.items():
            outputs |= vars(stage_output.output)
            if name == stage:
                break
        return outputs

    def text_to_compare(self, text: str | None, windows: int | None) -> tuple[str, int | None]:
        """Return the text of a comparison, by default the recipe's, and its number of windows."""
        if text is not None:
            return text, windows or DEFAULT_WINDOWS
        metric = self._metrics("name the text of a metric in it, or give one, `--text`").metrics[0]
        return self._text_of(metric), windows or metric.windows

    def generate(
        self,
        prompt: str,
        device: DeviceSpec | str | None = None,
        *,
        max_tokens: int = MAX_TOKENS,
        chat: bool = False,
        system: str | None = None,
    ) -> GenerationAnswer:
        """Answer a prompt greedily: on a device by Genie, else on this host's loop.

        Args:
            prompt: taken as it is, unless it is a user's turn of a chat.
            device: runs the container; None runs the output of the latest stage on this host.
            max_tokens: where generation stops if no end-of-sequence token comes first.
            chat: make the prompt by the model's chat template.
            system: the system message of a chat.

        Raises:
            PipelineError: no stage has run, or there is no container for the device.
            HarnessError: the device, the prompt or the chat template cannot be used.
        """
        workload = Generate.of(
            prompt=prompt, max_tokens=max_tokens, chat=chat or None, system=system
        )
        outputs = self.outputs(needed_by="generate()")
        if device is not None:
            with leased_session(
                _container(outputs), device, self.config.settings.runner_s
            ) as session:
                return generate_on_device(session, workload)
        with open_host_model(outputs, self.cache_root / self.model_name) as model:
            return generate_on_host(model, workload, self.place.folder)

    def export(self, export_dir: str | PathLike[str]) -> Path:
        """Copy the output of the latest stage to a folder: a container, or a model with encodings.

        Raises:
            PipelineError: no stage has run.
            WrongUseError: something is at the destination that may not be replaced.
        """
        self.outputs(needed_by="export()")
        name = self.completed[-1]
        return self.config.stages[name]().export(
            self._done[name].output, absolute_user_path(export_dir)
        )

    @property
    def manifest(self) -> PipelineManifest:
        """The finished stages."""
        settings = self.config.settings.model_dump(mode="json", exclude_defaults=True)
        sections = {
            name: self.stages[name].model_dump(mode="json", exclude_defaults=True)
            for name in self.stages
        }
        return PipelineManifest(
            model=str(self.place.file or self.model_dir),
            folder=str(self.config.folder),
            recipe={**settings, "stages": sections},
            stages=tuple(stage.entry for stage in self._done.values()),
        )

    def _run(
        self, name: str, place: tuple[int, int], outputs: Mapping[str, object], cache: StageCache
    ) -> None:
        """Run a stage, the `place[0]`th of `place[1]`, on the outputs of those before it."""
        stage, config = self.config.stages[name], self.stages[name]
        records: list[StageRecord] = []

        def on_record(record: StageRecord) -> None:
            records.append(record)
            self._tell(StageStep(name, record))

        toolchain = self.config.settings.open_toolchain(self.config.folder)
        runner = StageRunner(toolchain, cache, self.cache_root, on_record)
        context = StageContext(
            name, self.config.settings, self.stages, self.model_dir, self.model_name,
            self.cache_root, runner, on_record, self.config.folder,
        )  # fmt: skip
        began = time.monotonic()
        self._tell(StageStarted(name, *place))
        try:
            output: StageOutput = stage().run(bind_inputs(stage, outputs), config, context)
        except BaseException as error:
            self._tell(StageFailed(name, error))
            raise
        seconds = time.monotonic() - began
        reused = bool(records) and all(record.reused for record in records)
        folders = tuple(record.entry for record in records)
        self._tell(StageFinished(name, *place, seconds, reused, folders))
        entry = StageEntry(
            name=name,
            config=config.model_dump(mode="json"),
            output=TypeAdapter(stage.Output).dump_python(output, mode="json"),
            seconds=round(seconds, 3),
            reused=reused,
        )
        self._done[name] = _Finished(entry, output)

    def _forget_from(self, name: str) -> None:
        names = list(self.config.stages)
        for later in names[names.index(name) :]:
            self._done.pop(later, None)

    def _metrics(self, advice: str) -> EvaluatorConfig:
        config = self.config.settings.evaluator_config
        if config is None:
            raise ConfigFileError("recipe", None, "evaluator_config", f"it is missing; {advice}")
        return config

    def _text_of(self, metric: MetricConfig) -> str:
        return read_dataset(metric, (self.config.folder, self.place.folder))

    def _keep_scores(self, name: str, scores: Mapping[str, float]) -> None:
        stage = self._done[name]
        update = {"metrics": {**stage.entry.metrics, **scores}}
        self._done[name] = replace(stage, entry=stage.entry.model_copy(update=update))
        self._save_manifest()

    def _save_manifest(self) -> None:
        try:
            self.manifest.save(self.manifest_path)
        except OSError as error:
            reason = f"cannot be written: {error.strerror or error}"
            raise PipelineError(f"{self.manifest_path}: {reason}") from error

    def _cache_root(self) -> Path:
        settings, folder = self.config.settings, self.config.folder
        if settings.enable_cache:
            return settings.cache_root(folder)
        parent = None
        if settings.cache_dir is not None:
            parent = settings.cache_root(folder)
            parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="qnnfarm-pipeline-", dir=parent)
        weakref.finalize(self, scratch.cleanup)
        return Path(scratch.name).absolute()


def _container(outputs: Mapping[str, object]) -> GenAIContainer:
    path = outputs.get("container")
    if not isinstance(path, Path):
        reason = "a device runs containers; construct() up to the genai_builder first"
        raise PipelineError(reason)
    return GenAIContainer.load(path)


def _is_there(output: StageOutput) -> bool:
    values = vars(output).values()
    paths = [v.path if isinstance(v, ModelFolder) else v for v in values]
    return all(path.exists() for path in paths if isinstance(path, Path))
