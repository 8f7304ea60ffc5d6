"""The vendor's module names for the builder here, so that documented code runs as it stands.

    from buildlib.qairt_modules import qairt_modules

    with qairt_modules():
        from qairt.gen_ai_api.configs.lade_config import LadeBuilderConfig

Names: the Gen AI Builder's pages, docs.qualcomm.com 80-87189-2. Packages add modules of theirs
through the entry-point group `qnnfarm.qairt_names`, whose objects are mappings as the one here.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, ModuleType

ROOT = "qairt"
GROUP = "qnnfarm.qairt_names"

_GENAI = "buildlib.genai"
_SPECULATION = "buildlib.speculative.config"
_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "qairt": {"load": "buildlib.replay", "compile": "buildlib.replay"},
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


@contextmanager
def qairt_modules() -> Iterator[None]:
    """Let `import qairt` and its documented modules find the builder here.

    Modules of that name that are loaded, such as the vendor's, come back at the end.
    """
    before = {name: module for name, module in sys.modules.items() if _is_ours(name)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(_modules())
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_ours(name: str) -> bool:
    return name == ROOT or name.startswith(f"{ROOT}.")


def _modules() -> dict[str, ModuleType]:
    made: dict[str, ModuleType] = {}
    for name, contents in _all_names().items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in made:
                made[package] = ModuleType(package)
                made[package].__path__ = []
                if end > 1:
                    setattr(made[".".join(parts[: end - 1])], parts[end - 1], made[package])
        for attribute, home in contents.items():
            module, _, own = home.partition(":")
            found = getattr(importlib.import_module(module), own or attribute)
            setattr(made[name], attribute, found)
    return made


def _all_names() -> dict[str, Mapping[str, str]]:
    names = dict(_NAMES)
    for entry in importlib.metadata.entry_points(group=GROUP):
        names |= entry.load()
    return names
