"""Registry of runtimes: the module of each, by its name.

Runtimes of other packages are found through the entry-point group `qnnfarm.runtimes`: the entry's
name is the runtime's, its object a module as `RuntimeModule` has it.
"""

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, cast

from buildlib.entry_points import entry_names, load_entry
from harness.errors import WrongUseError
from harness.runtimes.base import Model, Runtime

DOOR = "runtimes"
DEFAULT_RUNTIME = "genie"
_MODULES: Mapping[str, str] = MappingProxyType({"genie": "harness.runtimes.genie.runtime"})
_PLUGINS: Mapping[str, str] = MappingProxyType(
    {
        "executorch": "other_runtimes",
        "geniex-bench": "other_runtimes",
        "graph": "diagnosis",
        "llama.cpp": "other_runtimes",
        "mllm": "mllm",
    }
)
"""Where runtimes come from that a checkout may be without."""


class RuntimeModule(Protocol):
    """A module of a runtime.

    Attributes:
        RUNTIME: tells its capabilities before a model is opened.
    """

    RUNTIME: type[Runtime]

    def runs(self, path: Path) -> bool:
        """Return whether it runs models of this kind; `open_model` says whether this is whole."""
        ...

    def open_model(self, path: Path) -> Model:
        """Open a model."""
        ...


@cache
def runtimes() -> tuple[str, ...]:
    """Return the names of all runtimes, the default first."""
    return tuple(dict.fromkeys((*_MODULES, *entry_names(DOOR))))


def check_runtime(name: str) -> str:
    """Return `name`.

    Raises:
        ValueError: no runtime has that name.
    """
    if name not in runtimes():
        raise ValueError(_missing(name))
    return name


def _missing(name: str) -> str:
    if name in _PLUGINS:
        return f"the runtime {name} comes with plugins/{_PLUGINS[name]}, which is not here"
    return f"no runtime is called {name[:40]!r}: there are {', '.join(runtimes())}"


@cache
def find_runtime(name: str) -> RuntimeModule:
    """Import the module of a runtime."""
    if name in _MODULES:
        return cast("RuntimeModule", importlib.import_module(_MODULES[name]))
    if name in entry_names(DOOR):
        return cast("RuntimeModule", load_entry(DOOR, name))
    raise WrongUseError(_missing(name))


def open_model(path: Path, runtime: str = DEFAULT_RUNTIME) -> Model:
    """Open a model that a runtime is to run, before any device is asked for.

    Raises:
        BuildError: it is incomplete.
        WrongUseError: there is no such runtime, or it runs no such models; names those that do; it
            cannot run anywhere.
    """
    module = find_runtime(runtime)
    if path.exists() and not module.runs(path):
        others = [name for name in runtimes() if find_runtime(name).runs(path)]
        if others:
            raise WrongUseError(
                f"the runtime {runtime} does not run {path}: --runtime {' or '.join(others)} does"
            )
    return module.open_model(path)
