"""The vendor's module names for the builder here, so that documented code runs as it stands.

    from buildlib.qairt_modules import qairt_modules

    with qairt_modules():
        from qairt.gen_ai_api.configs.lade_config import LadeBuilderConfig

Names: the Gen AI Builder's pages, docs.qualcomm.com 80-87189-2. Packages add modules of theirs
through the entry-point group `qnnfarm.qairt_names`, which has mappings as the one here.
"""

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from buildlib.entry_points import entry_names, load_entry

ROOT = "qairt"
DOOR = "qairt_names"

_GENAI = "buildlib.genai"
_SPECULATION = "buildlib.speculative.config"
_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "qairt": {
            "load": "buildlib.replay",
            "compile": "buildlib.replay",
            "M2sStartPoint": "buildlib.builder.options",  # which the documents import from nowhere
        },
        "qairt.api.compiler.config": {"CompileConfig": "buildlib.toolchains.compile_config"},
        "qairt.api.configs.common": {"BackendType": "buildlib.toolchains.compile_config"},
        "qairt.gen_ai_api.gen_ai_builder_factory": {
            "GenAIBuilderFactory": _GENAI,
            "SupportedLLMs": "buildlib.checkpoint.architectures",
        },
        "qairt.gen_ai_api.configs.lade_config": {"LadeBuilderConfig": _SPECULATION},
        "qairt.gen_ai_api.configs.ssd_config": {"SsdBuilderConfig": _SPECULATION},
        "qairt.gen_ai_api.configs.eaglet_config": {"EagletBuilderConfig": _SPECULATION},
        "qairt.modules.lora.lora_config": {"LoraBuilderInputConfig": "buildlib.lora.config"},
    }
)
"""Documented modules: the names in each, and the module here that has them.

Where it has them under another name, `module:name`.
"""


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

    def __exit__(self, *error: object) -> None:
        _taken_out()
        sys.modules.update(self._before)


def _taken_out() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours(name)}


def _is_ours(name: str) -> bool:
    return name == ROOT or name.startswith(f"{ROOT}.")


def _modules() -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    for name, contents in _all_names().items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in modules:
                modules[package] = ModuleType(package)
                modules[package].__path__ = []
                if end > 1:
                    setattr(modules[".".join(parts[: end - 1])], parts[end - 1], modules[package])
        for attribute, home in contents.items():
            module, _, own = home.partition(":")
            value = getattr(importlib.import_module(module), own or attribute)
            setattr(modules[name], attribute, value)
    return modules


def _all_names() -> dict[str, Mapping[str, str]]:
    names = dict(_NAMES)
    for name in entry_names(DOOR):
        names |= load_entry(DOOR, name)
    return names
