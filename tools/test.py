"""Set up a machine for the tests and run them: `python3 -m tools.test [pytest's arguments]`.

Installs the Debian packages of `tools.system_packages` (as root, or by sudo, which it asks about on
a terminal), makes `.venv` with the project and its `test` extra, and runs pytest there; with
`--set-up` it stops before that. Where packages cannot be installed, the tests that need them skip;
where they can, such a test fails instead of skipping. Standard library only.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tools.system_packages import missing_packages

_ROOT = Path(__file__).resolve().parents[1]
_VENV = _ROOT / ".venv"
_OLDEST = (3, 11)
_SET_UP = "--set-up"
_TAKES = "Setting up takes some minutes the first time; the tests about five on two idle cores."
PACKAGES_VARIABLE = "QNNFARM_TEST_PACKAGES"
"""Set to `installed`: a test whose system package is missing fails."""


def main(arguments: Sequence[str]) -> int:
    """Return pytest's exit status, or 2 when there is no environment to run it in."""
    print(f"{_TAKES} `make test` runs them again without this.", flush=True)
    if sys.version_info < _OLDEST:
        wanted = ".".join(map(str, _OLDEST))
        return _refuse(f"this is Python {sys.version.split()[0]}; run it with {wanted} or later")
    lacking = missing_packages()
    is_whole = (_VENV / "bin" / "pip").exists()  # without ensurepip, venv leaves python alone
    if not is_whole and find_spec("ensurepip") is None:
        lacking.append("python3-venv")
    installed = _install(lacking)
    if not installed:
        advice = f"as root: apt-get install {' '.join(lacking)}"
        if "python3-venv" in lacking:
            return _refuse(f"there is no virtual environment without python3-venv; {advice}")
        print(f"Tests that need what is missing skip. To run them, {advice}", flush=True)
    python = str(_VENV / "bin" / "python")
    if not is_whole:
        # A child of its own: Debian's ensurepip may have come just now.
        subprocess.run([sys.executable, "-m", "venv", "--clear", _VENV], check=True)
    if _install_project(python):
        return _refuse("pip could not install the project with its extra `test` into .venv")
    if installed:  # where it cannot be had, its tests skip
        subprocess.run([python, "-m", "tools.llama_cpp"], cwd=_ROOT, check=False)
    if list(arguments) == [_SET_UP]:
        return 0
    environment = dict(os.environ)
    if installed:
        environment[PACKAGES_VARIABLE] = "installed"
    command = [python, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=_ROOT, env=environment, check=False).returncode


def _install_project(python: str) -> int:
    """Return pip's exit status."""
    print("Installing the project and its tests into .venv", flush=True)
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    return subprocess.run([*pip, "--editable", ".[test]"], cwd=_ROOT, check=False).returncode


def _install(packages: Sequence[str]) -> bool:
    """Install Debian packages; whether all of them are there now."""
    if not packages:
        return True
    apt = shutil.which("apt-get")
    as_root = _as_root()
    if apt is None or as_root is None:
        return False
    if as_root and _is_terminal() and not _agrees(packages):
        return False
    print(f"Installing {' '.join(packages)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    steps = (["update", "-qq"], ["install", "-yqq", "--no-install-recommends", *packages])
    return all(
        subprocess.run(
            [*as_root, apt, *step], env=environment, stdout=subprocess.DEVNULL, check=False
        ).returncode
        == 0
        for step in steps
    )


def _as_root() -> list[str] | None:
    """Return the words before a command that root runs; `None` where nobody may be root."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    if sudo is None:
        return None
    if _is_terminal():
        return [sudo]
    asked = subprocess.run([sudo, "-n", "true"], capture_output=True, check=False)
    return [sudo, "-n"] if asked.returncode == 0 else None


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _agrees(packages: Sequence[str]) -> bool:
    """Ask whether to change the user's system."""
    print(f"Some tests need these Debian packages: {' '.join(packages)}")
    try:
        answer = input("Install them with sudo? Without them those tests skip. [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in {"y", "yes"}


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
