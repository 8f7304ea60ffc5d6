"""Every key of a recipe changes what its stages make, is refused, or is said to have no effect."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from buildlib.builder.build import Build
from buildlib.builder.runner import StageRunner
from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry
from buildlib.error_base import QnnfarmError
from buildlib.validation import without_effect
from plugins.pipeline import llm
from plugins.pipeline.llm import LLMPipeline
from plugins.pipeline.manifest import PipelineManifest
from plugins.pipeline.registry import BUILT_IN, StageRegistry
from plugins.pipeline.settings import PipelineSettings
from suites.models import tiny_llama
from suites.models.tiny_llama import lora
from tests.plugins.pipeline.conftest import MakeRecipe

Keys = Mapping[str, object]


@dataclass(frozen=True)
class Case:
    """A key at another value, beside keys that it needs."""

    value: object
    beside: Keys = field(default_factory=dict)


_METRIC = {"name": "perplexity", "dataset": "text/heldout.txt"}
_GPTQ = {"stages.quantization_opt.techniques": ["gptq"]}
_LOADER, _OPT, _QUANTIZATION, _BUILDER = (f"stages.{name}" for name in BUILT_IN)
_OVERRIDES, _LOADING = f"{_LOADER}.model_config_overrides", f"{_LOADER}.hf_pretrained_kwargs"
_ADAPTERS = {"lora_config_path": str(lora.folder() / "lora_config.yaml")}
_TRAINED = str(tiny_llama.folder() / "ssd" / "ssd_tensor.safetensors")
_PACKAGE = {"name": "A", "interface_provider": "B", "targets": {"x86_64": "no/such.so"}}

CASES: dict[str, Case] = {
    "model_id_or_path": Case("no/such"),
    "backend": Case("CPU"),
    "soc_details": Case("SM8650"),
    "enable_observers": Case(False),
    "enable_cache": Case(False),
    "cache_dir": Case("kept"),
    "checkpoint": Case("quantization"),
    "log_level": Case("error"),
    "toolchain": Case("qairt", {"qairt_sdk": "no/such"}),
    "qairt_sdk": Case("no/such", {"toolchain": "qairt"}),
    "runner_s": Case(5.0),
    "generator_config.sequence_length": Case(16),
    "generator_config.context_length": Case(64),
    "evaluator_config.context_length": Case(32),
    "evaluator_config.metrics.name": Case([_METRIC | {"name": "bleu"}]),
    "evaluator_config.metrics.dataset": Case([_METRIC | {"dataset": "no/such"}]),
    "evaluator_config.metrics.display_name": Case([_METRIC | {"display_name": "mine"}]),
    "evaluator_config.metrics.windows": Case([_METRIC | {"windows": 2}]),
    "stages": Case({"no_such": {}}),
    "features.speculative_decoding": Case(
        {"type": "ssd-q1", "ssd_tensor_file": _TRAINED, "branches": [1]}
    ),
    "features.lora": Case(_ADAPTERS, {"stages.genai_builder": {}}),
    "features.op_packages": Case([_PACKAGE]),
    "eaglet": Case({"eaglet_version": 2}),
    f"{_LOADER}.model_reauthoring": Case(False),
    f"{_LOADER}.apply_default_adaptations": Case(False),
    f"{_LOADER}.load_tokenizer": Case(False),
    f"{_LOADER}.execution_environment": Case("gpu"),
    f"{_OVERRIDES}.input_tokens_per_inference": Case(4),
    f"{_OVERRIDES}.transposed_key_cache": Case(False),
    f"{_OVERRIDES}.return_new_key_value_only": Case(False),
    f"{_OVERRIDES}.num_logits_to_keep": Case(1),
    f"{_LOADING}.revision": Case("main"),
    f"{_LOADING}.dtype": Case("float16"),
    f"{_LOADING}.attn_implementation": Case("sdpa"),
    f"{_LOADING}.trust_remote_code": Case(True),
    f"{_LOADER}.hf_tokenizer_kwargs.trust_remote_code": Case(True),
    f"{_OPT}.techniques": Case(["gptq"]),
    f"{_OPT}.technique_kwargs": Case({"gptq": {"damping": 0.5}}, _GPTQ),
    f"{_QUANTIZATION}.recipe_name": Case("w8a8"),
    f"{_QUANTIZATION}.options": Case({"kv_bitwidth": 16}),
    f"{_QUANTIZATION}.technique_kwargs": Case(
        {"gptaq": {"damping": 0.5}}, {f"{_QUANTIZATION}.recipe_name": "w4a16"}
    ),
    f"{_QUANTIZATION}.calibration_text": Case(str(tiny_llama.folder() / "text/heldout.txt")),
    f"{_QUANTIZATION}.max_kl": Case(1e-9),
    f"{_BUILDER}.transformation_options": Case({"split_model.num_splits": 2}),
    f"{_BUILDER}.compilation_options": Case({"graphs.dlbc": True}),
    f"{_BUILDER}.prepare_embedding_lut": Case(False),
    f"{_BUILDER}.max_workers": Case(1),
}


_SECTIONS = (
    "generator_config", "evaluator_config", "metrics", "features", "hf_pretrained_kwargs",
    "hf_tokenizer_kwargs",
)  # fmt: skip


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a model, those of models within it in place of its own."""
    for name, one in model.model_fields.items():
        kinds = list(_models(one.annotation)) if name in _SECTIONS else []
        for kind in kinds:
            yield from keys_of(kind, f"{prefix}{name}.")
        if not kinds:
            yield f"{prefix}{name}"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _models(one)


def test_every_key_has_a_case() -> None:
    keys = {*keys_of(PipelineSettings)}
    for name in BUILT_IN:
        keys |= set(keys_of(StageRegistry().stages()[name].Config, f"stages.{name}."))
    overrides = {key for key in CASES if key.startswith(f"{_OVERRIDES}.")}
    assert set(CASES) == keys - {_OVERRIDES} | overrides


class _StoppedError(Exception):
    """A stage has no output in the cache, so what follows is not known."""


@pytest.fixture(scope="module")
def outcome(
    built: LLMPipeline, make_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Keys], list[object] | str]]:
    """What a recipe of the pipeline that ran would make with some keys; or why it is refused.

    No stage runs: each is looked up in the cache, until one is not there.
    """
    seen: list[object] = []
    made: dict[str, list[object] | str] = {}

    class Looking(StageRunner):
        def run(self, stage: CachedStage, group: str | None = None) -> CacheEntry:
            entry = self.entry(stage, group)
            seen.append(str(entry.folder))
            if not entry.folder.is_dir():
                raise _StoppedError
            return entry

    def look(build: Build, *_: object) -> None:
        seen.extend([build.max_workers, *(str(node.entry.folder) for node in build.stages())])
        raise _StoppedError

    def make(given: Keys) -> list[object] | str:
        if repr(given) not in made:
            made[repr(given)] = construct(given)
        return made[repr(given)]

    def construct(given: Keys) -> list[object] | str:
        recipe = make_recipe(cache_dir=str(built.cache_root))
        recipe["stages"] = {name: recipe["stages"].get(name, {}) for name in BUILT_IN}
        recipe["stages"]["genai_builder"]["prepare_embedding_lut"] = True
        for key, value in given.items():
            place: Any = recipe
            *way, last = key.split(".")
            if way[-1:] == ["metrics"]:
                last = way.pop()
            for step in way:
                place = place.setdefault(step, {})
            place[last] = value
        seen.clear()
        try:
            pipe = LLMPipeline.from_pretrained(recipe=recipe)
            settings = pipe.config.settings
            pipe.check_metrics()
            about = (settings.log_level, settings.runner_s, settings.evaluator_config)
            with contextlib.suppress(_StoppedError):
                pipe.construct()
        except QnnfarmError as error:
            return str(error)
        return [about, pipe.profiler is None, *seen]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("every"))
        patch.setattr(llm, "StageRunner", Looking)
        patch.setattr(PipelineManifest, "save", lambda *_: None)  # that of `built` stays
        patch.setattr(Build, "outputs", look)
        yield make


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize("key", CASES)
def test_a_key_of_a_recipe_acts_is_refused_or_is_said_to_have_no_effect(
    key: str, outcome: Callable[[Keys], list[object] | str]
) -> None:
    case = CASES[key]
    having = outcome({**case.beside, key: case.value})
    if isinstance(having, str):
        assert key.rpartition(".")[2] in having or "no/such" in having or "KL " in having, having
        return
    silent = dict(without_effect(PipelineSettings))
    for name in BUILT_IN:
        config = StageRegistry().stages()[name].Config
        silent |= without_effect(config, f"stages.{name}.")
    assert (having == outcome(case.beside)) == (key in silent)
