"""A Python for devices that have none, from a folder of the user's.

Android has no Python; Termux's packages and the official builds for Android (PEP 738) are prefixes
with `bin`, `lib` and the standard library. A run folder gets the prefix, and before it a `python3`
on the path of its processes, which sets what an interpreter needs that lies elsewhere than it was
built for.
"""

import os
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path

from harness.deploy.deployment import DeployFile
from harness.errors import WrongUseError

VARIABLE = "QNNFARM_PYTHON"
"""Environment variable: a folder with a prefix in `FOLDER/<ABI>`."""
NAMED = f"{VARIABLE} names a folder with one, as docs/first-phone.md says"
_PREFIX = "python"
_LAUNCHER = "python3"
_PROGRAM = "bin/python3"
_LEFT_OUT = frozenset({"__pycache__", "test", "tests", "include", "share", "site-packages"})
_MOST_FILES = 5000


def find_python(abi: str, environment: Mapping[str, str] = os.environ) -> dict[str, DeployFile]:
    """Return the files of the user's Python for an ABI, by their names in a run folder.

    Returns:
        None of them where `QNNFARM_PYTHON` is not set, or has no folder for the ABI.
    """
    prefixes = environment.get(VARIABLE, "")
    folder = Path(prefixes).expanduser() / abi
    if not prefixes or not folder.is_dir():
        return {}
    if not (folder / _PROGRAM).is_file():
        raise WrongUseError(f"{VARIABLE}: {folder} has no {_PROGRAM}: name a Python's prefix")
    launcher = Path(str(resources.files("device_scripts") / "python3.sh"))
    files = {_LAUNCHER: DeployFile(launcher, executable=True, origin="qnnfarm")}
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        runs = name == _PROGRAM
        files[f"{_PREFIX}/{name}"] = DeployFile(path, executable=runs, origin=str(folder))
        if len(files) > _MOST_FILES:
            reason = f"has more than {_MOST_FILES} files: leave what no runner imports out"
            raise WrongUseError(f"{VARIABLE}: {folder} {reason}")
    return files


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a prefix that running needs: its program, libraries and modules."""
    yield folder / _PROGRAM
    for top, below, names in os.walk(folder / "lib"):
        below[:] = sorted(set(below) - _LEFT_OUT)
        for name in sorted(names):
            if not name.endswith((".a", ".pyc")):
                yield Path(top) / name
