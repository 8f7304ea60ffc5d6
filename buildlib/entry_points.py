"""The doors of the project: entry points by which packages, `plugins` among them, attach to it.

A package declares in its `pyproject.toml` what it adds, under the group of the door:

    [project.entry-points."qnnfarm.runtimes"]
    shout = "my_package.runtime"

Nothing registers itself when it is imported, and nothing is imported before it is asked for.
"""

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from buildlib.errors import BuildError

PREFIX = "qnnfarm."
"""How the names of all groups begin; the functions here take what follows."""
_OURS = frozenset({"buildlib", "harness", "reports", "suites"})


@cache
def installed(door: str) -> importlib.metadata.EntryPoints:
    """Return the entry points of a door, as they were when this process first looked."""
    return importlib.metadata.entry_points(group=PREFIX + door)


def entry_names(door: str) -> tuple[str, ...]:
    """Return what installed packages offer at a door, sorted."""
    return tuple(sorted(installed(door).names))


def load_entry(door: str, name: str) -> Any:  # noqa: ANN401 - each door says what it takes
    """Import what a package offers at a door by a name; None if there is none.

    Raises:
        BuildError: it cannot be imported.
    """
    for entry in installed(door).select(name=name):
        try:
            return entry.load()
        except Exception as error:  # an import can raise anything
            reason = f"{name} of {PREFIX}{door} ({entry.value}) cannot be loaded: {error}"
            raise BuildError(reason) from error
    return None


def entry_modules(door: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that offer these names at a door, in that order; none is imported."""
    modules = {one.name: one.module for one in installed(door)}
    return tuple(modules[name] for name in names if name in modules)


def plugin_code() -> tuple[Path, ...]:
    """Return the folders, or single files, of the packages that offer something at any door."""
    groups = {one for one in importlib.metadata.entry_points().groups if one.startswith(PREFIX)}
    entries = [entry for group in groups for entry in installed(group.removeprefix(PREFIX))]
    places = []
    for package in sorted({entry.module.partition(".")[0] for entry in entries} - _OURS):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            places.append(origin.parent if origin.name == "__init__.py" else origin)
    return tuple(places)
