"""Programs and libraries of Debian packages, for the tests that run through them."""

import os
from pathlib import Path
from typing import NoReturn

import pytest

from tools.system_packages import LIBRARIES, PROGRAMS, find_library, find_program
from tools.test import PACKAGES_VARIABLE

_INSTALLED = os.environ.get(PACKAGES_VARIABLE) == "installed"


def program(name: str) -> Path:
    """Find a program of `tools.system_packages`, or skip the test."""
    found = find_program(name)
    if found is None:
        _lack(next(package for package, names in PROGRAMS.items() if name in names))
    return found


def require_library(name: str) -> None:
    """Skip the test where a library of `tools.system_packages` is missing."""
    if find_library(name) is None:
        _lack(next(package for package, library in LIBRARIES.items() if library == name))


def lacking_package(failure: str) -> str | None:
    """Return why a test failed, where that is something missing of `tools.system_packages`."""
    for package, names in PROGRAMS.items():
        for name in names:
            told = (f"the program `{name}`", f"No such file or directory: '{name}'")
            if any(each in failure for each in told) and find_program(name) is None:
                return None if _INSTALLED else _reason(package)
    for package, name in LIBRARIES.items():
        if name in failure and find_library(name) is None and not _INSTALLED:
            return _reason(package)
    return None


def _lack(package: str) -> NoReturn:
    if _INSTALLED:
        pytest.fail(_reason(package))
    pytest.skip(_reason(package))


def _reason(package: str) -> str:
    return f"needs Debian's package {package}, which `python3 -m tools.test` installs"
