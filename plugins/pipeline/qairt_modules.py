"""The vendor's module names for what is here, so that documented code runs as it stands.

    from plugins.pipeline.qairt_modules import qairt_modules

    with qairt_modules():
        from qairt.gen_ai_api.configs.lade_config import LadeBuilderConfig

Names: the pages of the Gen AI Builder and the pipeline, docs.qualcomm.com 80-87189-2. A name that
is not here is an ImportError that says what to use.
"""

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import NoReturn

ROOT = "qairt"

_GENAI = "buildlib.genai"
_CONTAINER = "buildlib.container.container"
_SPECULATION = "buildlib.builder.speculative_config"
_BASES = "qairt.experimental.pipeline.torch.common.bases"
_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "qairt": {
            **dict.fromkeys(
                ("load", "arcl", "transform", "convert", "compile", "CompiledModel"),
                "plugins.pipeline.replay",
            ),
            "Model": "plugins.pipeline.replay:StageModel",
            "M2sStartPoint": "buildlib.builder.options",  # which the documents import from nowhere
        },
        "qairt.api.compiler.config": {"CompileConfig": "buildlib.toolchains.compile_config"},
        "qairt.api.configs.common": {"BackendType": "buildlib.toolchains.compile_config"},
        "qairt.gen_ai_api.gen_ai_builder_factory": {
            "GenAIBuilderFactory": _GENAI,
            "SupportedLLMs": "buildlib.checkpoint.architectures",
        },
        "qairt.gen_ai_api.builders.gen_ai_builder": {"GenAIBuilder": f"{_GENAI}:GenAIBuilderHTP"},
        "qairt.gen_ai_api.builders.gen_ai_builder_htp": {"GenAIBuilderHTP": _GENAI},
        "qairt.gen_ai_api.containers.gen_ai_containerable": {
            "GenAIContainerable": f"{_CONTAINER}:GenAIContainer"
        },
        "qairt.gen_ai_api.containers.gen_ai_container": {"GenAIContainer": _CONTAINER},
        "qairt.gen_ai_api.configs.lade_config": {"LadeBuilderConfig": _SPECULATION},
        "qairt.gen_ai_api.configs.ssd_config": {"SsdBuilderConfig": _SPECULATION},
        "qairt.gen_ai_api.configs.eaglet_config": {"EagletBuilderConfig": _SPECULATION},
        "qairt.modules.lora.lora_config": {
            "LoraBuilderInputConfig": "buildlib.builder.lora_config"
        },
        "qairt.api.configs.device": {"Device": "harness.devices.spec:DeviceSpec"},
        "qairt.experimental.pipeline.torch.llm.pipeline": {
            "LLMPipeline": "plugins.pipeline.llm",
            "LLMPipelineConfig": "plugins.pipeline.recipe",
        },
        "qairt.experimental.pipeline.torch.common.recipe": {"Recipe": "plugins.pipeline.recipe"},
        f"{_BASES}.stage": dict.fromkeys(
            ("Stage", "StageConfig", "StageInput", "StageOutput"), "plugins.pipeline.stage"
        ),
        f"{_BASES}.stage_registry": {
            "StageRegistry": "plugins.pipeline.registry",
            "register_stage": "plugins.pipeline.registry",
        },
        f"{_BASES}.stage_observer": {
            "StageObserver": "plugins.pipeline.observers",
            "StageProfilerObserver": "plugins.pipeline.observers:StageProfiler",
        },
    }
)
"""Documented modules: the names in each, and the module here that has them.

Where it has them under another name, `module:name`.
"""
_LOADER = "LLMPipeline.from_pretrained, which makes canonical ONNX of a checkpoint, without torch"
_TECHNIQUE = "a recipe's `stages.quantization_opt.techniques` and `stages.quantization.recipe_name`"
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("QcAutoModelForCausalLM", "QcAutoConfig", "Adapter"), _LOADER),
        **dict.fromkeys(("AimetQuantizer", "AimetOptimizer", "AimetMixin"), _TECHNIQUE),
        **dict.fromkeys(("SpinQuant", "SeqMSE", "LPBQ", "AdaScale", "GPTAQ"), _TECHNIQUE),
        **dict.fromkeys(("LPBQ_SeqMSE_Recipe", "SpinQuant_AdaScale_Recipe"), _TECHNIQUE),
    }
)
"""Documented names without a counterpart of that name, and what does their work here."""


class qairt_modules:  # noqa: N801  (it is called as a function)
    """Let `import qairt` and its documented modules find the builder here.

    Modules of that name that are loaded, such as the vendor's, come back at the end of the block.
    `qairt_modules().__enter__()` lets the names stay, for a notebook or a session.
    """

    def __init__(self) -> None:
        self._before: dict[str, ModuleType] = {}

    def __enter__(self) -> None:
        self._before = _taken_out()
        sys.modules.update(_modules())
        sys.meta_path.insert(0, _NotHere)

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(_NotHere)
        _taken_out()
        sys.modules.update(self._before)


class _NotHere:
    """Finder of the vendor's modules that are not here: of none."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if _is_ours(name):
            names = ", ".join([*_INSTEAD][:4])
            raise ModuleNotFoundError(
                f"{name} is not here: plugins/pipeline/pipeline.md has what stands for {names} and "
                f"others, and docs/builder.md the modules that are",
                name=name,
            )


class _Module(ModuleType):
    """A module that says what to use in place of a name that it lacks."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        here = ", ".join(each for each in vars(self) if not each.startswith("__"))
        instead = f"use {_INSTEAD[name]}" if name in _INSTEAD else f"there are {here}"
        raise ImportError(f"{self.__name__}.{name} is not here: {instead}", name=self.__name__)


def _taken_out() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours(name)}


def _is_ours(name: str) -> bool:
    return name == ROOT or name.startswith(f"{ROOT}.")


def _modules() -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    for name, contents in _NAMES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in modules:
                modules[package] = _Module(package)
                modules[package].__path__ = []
                if end > 1:
                    setattr(modules[".".join(parts[: end - 1])], parts[end - 1], modules[package])
        for attribute, home in contents.items():
            module, _, own = home.partition(":")
            value = getattr(importlib.import_module(module), own or attribute)
            setattr(modules[name], attribute, value)
    return modules
