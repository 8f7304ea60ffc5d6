"""What tests need of the machine they run on, and what to do where it lacks something.

`@pytest.mark.needs("mksh", "root")` on a test, or `needs("mksh")` in a fixture, skips it where one
of these is missing. Nothing else does: a test that fails for a need it does not declare fails.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import pytest

from tools import llama_cpp
from tools.system_packages import PACKAGES, find_program, is_installed
from tools.test import PACKAGES_VARIABLE

VIRTUAL = "plugins.virtual_android"
NOBODY = 65534
"""User and group without privileges."""
IMPORT_PATH = ":".join(
    [str(Path(__file__).parents[1]), *(path for path in sys.path if path.endswith("site-packages"))]
)
"""`PYTHONPATH` with which another interpreter imports this checkout and what it depends on."""


def is_here(plugin: str) -> bool:
    """Tell whether this checkout has a plugin: `plugins.NAME`."""
    return importlib.util.find_spec(plugin) is not None


def needs(*names: str) -> None:
    """Skip the running test where one of these is missing.

    Where `python3 -m tools.test` has installed the packages, a missing one fails the test.

    Args:
        names: Debian packages of `tools.system_packages`, keys of `CONDITIONS`, or plugins as
            `plugins.NAME`.
    """
    for name in names:
        if name.startswith("plugins."):
            if not is_here(name):
                pytest.skip(f"needs {name}, which this checkout is without")
        elif name in CONDITIONS:
            if hint := CONDITIONS[name]():
                pytest.skip(f"needs {name}: {hint}")
        elif not is_installed(name):
            end = pytest.fail if os.environ.get(PACKAGES_VARIABLE) == "installed" else pytest.skip
            end(f"needs {name}: apt-get install {name}")


def program(name: str) -> Path:
    """Find a program of `tools.system_packages`, or skip the running test."""
    needs(next(package for package, names in PACKAGES.items() if name in names))
    found = find_program(name)
    assert found is not None
    return found


def as_user(uid: int) -> list[str]:
    """Return the words before a command that root runs as a user without privileges."""
    return [str(program("setpriv")), f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]


@cache
def python_for_others() -> str | None:
    """Find an interpreter of this version with which other users can import this checkout."""
    probe = "import harness.devices.devices, sys; print(sys.version_info[:2])"
    for path in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        done = subprocess.run(
            [*as_user(NOBODY), "sh", "-c", 'exec "$@"', "sh", path, "-c", probe],
            env={"PYTHONPATH": IMPORT_PATH, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/", capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.stdout == f"{sys.version_info[:2]}\n":
            return path
    return None


def _root() -> str | None:
    return "run the tests as root" if os.geteuid() else None


def _second_user() -> str | None:
    if hint := _root():
        return hint
    if python_for_others():
        return None
    return "run the tests in a checkout that other users can read, with a Python that they can run"


def _try_namespace(kind: Literal["user", "root"]) -> str | None:
    if not is_here(VIRTUAL):
        return f"this checkout is without {VIRTUAL}"
    from plugins.virtual_android.namespace import NamespaceKind, try_namespace

    refused: str | None = try_namespace(NamespaceKind(kind))
    return refused


@cache
def _user_namespaces() -> str | None:
    refused = _try_namespace("user")
    return refused and f"as root: sysctl -w user.max_user_namespaces=10000 ({refused})"


@cache
def _namespaces() -> str | None:
    if os.geteuid():
        return _user_namespaces()
    refused = _try_namespace("root")
    return refused and f"give root, in a container too, the capability SYS_ADMIN ({refused})"


def _transformers() -> str | None:
    found = all(map(importlib.util.find_spec, ("torch", "transformers")))
    return None if found else "pip install torch transformers"


def _llama_cpp() -> str | None:
    if llama_cpp.is_here():
        return None
    own = f"or set {llama_cpp.FOLDER_VARIABLE} to a build of yours for x86_64"
    return f"python3 -m tools.llama_cpp, {own}"


CONDITIONS: Mapping[str, Callable[[], str | None]] = MappingProxyType(
    {
        "llama.cpp": _llama_cpp,
        "namespaces": _namespaces,
        "root": _root,
        "second-user": _second_user,
        "transformers": _transformers,
        "user-namespaces": _user_namespaces,
    }
)
"""Need that is no package -> what to do where it is missing; `None` where it is there."""
