"""Does everything else work without a plugin? `python -m tools.without NAME... [--quick]` tries it.

In a copy of what git tracks, it deletes `plugins/NAME`, its tests and its lines of
`pyproject.toml`, imports every module, prints the help of every command, and runs `make check` and
the tests; with `--quick` the linter, the import contracts, and tests that need neither a device nor
a build. It ends with what skipped for want of the plugin. Several names are deleted together, with
`all` every plugin; `each` takes one after the other.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_IMPORTS = """
import importlib, pkgutil, sys
sys.dont_write_bytecode = True
for top in {packages}:
    for one in pkgutil.walk_packages(importlib.import_module(top).__path__, f"{{top}}."):
        try:
            if not one.name.endswith(("__main__", "_worker", "conftest")):
                importlib.import_module(one.name)
        except ModuleNotFoundError as error:  # of an extra, such as torch
            if (error.name or "").partition(".")[0] in {packages}:
                raise
"""
_QUICK = (
    "tests/test_architecture.py", "tests/test_docs.py", "tests/test_errors.py",
    "tests/test_needs.py", "tests/buildlib/encodings", "tests/buildlib/quantize/test_options.py",
    "tests/harness/deploy/test_eviction.py", "tests/harness/devices/test_spec.py",
    "tests/harness/test_importing.py", "tests/harness/test_words.py",
)  # fmt: skip
_NO_EDITABLE = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "__editable__" not in repr(one)]
"""
"""Run by each interpreter: an editable installation would find the plugin where it still is."""
_PACKAGES = ("buildlib", "harness", "plugins", "reports", "suites")


def main(arguments: Sequence[str]) -> int:
    """Return 0 if all that was tried works, else 1."""
    names = sorted(path.parent.name for path in _ROOT.glob("plugins/*/__init__.py"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"all, each, {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="seconds to minutes, not the suite")
    given = parser.parse_args(arguments)
    match given.names:
        case ["each"]:
            turns = [[name] for name in names]
        case ["all"]:
            turns = [names]
        case chosen:
            if unknown := set(chosen) - set(names):
                parser.error(f"there is no plugin {', '.join(sorted(unknown))}")
            turns = [chosen]
    failed = [turn for turn in turns if not _works_without(turn, quick=given.quick)]
    texts = " and without ".join(", ".join(turn) for turn in failed)
    print(f"failed without {texts}" if failed else "everything else works")
    return 1 if failed else 0


def _works_without(names: Sequence[str], *, quick: bool) -> bool:
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        copy = Path(folder) / "checkout"
        copy.mkdir()
        lines = _copy(copy, names)
        for name in names:
            print(f"without {name}: plugins/{name}, tests/plugins/{name}, and of pyproject.toml")
        print(lines)
        python, pytest = sys.executable, ["-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider"]
        steps = {
            "every import": [python, "-c", _IMPORTS.format(packages=_PACKAGES)],
            "the help": [python, "-m", "harness.cli", "--help"],
            "the help of every command": [python, "-m", "tools.commands"],
        }
        if quick:
            few = [each for each in _QUICK if (copy / each).exists()]
            steps["ruff"] = [python, "-m", "ruff", "check", "-q", "."]
            steps["quick tests"] = [python, *pytest, "-n", "0", *few]
        else:
            steps["make check"] = ["make", f"PYTHON={python}", "check"]
            steps["the tests"] = [python, *pytest]
        return all(_succeeds(step, command, copy, names) for step, command in steps.items())


def _succeeds(step: str, command: Sequence[str], copy: Path, names: Sequence[str]) -> bool:
    path = f"{copy}{os.pathsep}{copy.parent}"
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).rstrip().splitlines()
    print(f"  {'FAILED' if done.returncode else 'ok'}: {step}", flush=True)
    if done.returncode:
        failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        print("\n".join([*failed, *lines[-40:]]))
    elif "pytest" in command:
        skipped = [line for line in lines if re.search(rf"plugins\.({'|'.join(names)})\b", line)]
        print("\n".join(f"    {line}" for line in [*skipped, lines[-1]]))
    return not done.returncode


def _copy(copy: Path, names: Sequence[str]) -> str:
    """Copy what git tracks without these plugins; return their lines of `pyproject.toml`."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"],  # noqa: S607 - of the user's path
        cwd=_ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    gone = tuple(f"{folder}/{name}/" for folder in ("plugins", "tests/plugins") for name in names)
    for file in filter(None, tracked):
        source = _ROOT / file
        if file.startswith(gone) or not source.exists():
            continue
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copy / file, follow_symlinks=False)
    project = copy / "pyproject.toml"
    theirs = re.compile(rf"plugins[./]({'|'.join(names)})\b")
    kept, lost = [], []
    for block in _blocks(project.read_text(encoding="utf-8")):
        of_it = [line for line in block if theirs.search(line)]
        if own := [line for line in of_it if line.startswith("source_modules")]:
            lost += own  # a contract about them alone
            continue
        lost += of_it
        kept += [line for line in block if line not in of_it]
    project.write_text("\n".join(kept), encoding="utf-8")
    _describe(copy)
    return "".join(f"\n    {line.strip()}" for line in lost)


def _blocks(text: str) -> Iterator[list[str]]:
    """Split TOML at its tables."""
    block: list[str] = []
    for line in text.split("\n"):
        if line.startswith("["):
            yield block
            block = []
        block.append(line)
    yield block


def _describe(copy: Path) -> None:
    """Write the metadata by which Python finds the copy's entry points, not the installed ones."""
    project = tomllib.loads((copy / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = copy / "qnnfarm.egg-info"
    info.mkdir()
    version = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "PKG-INFO").write_text(version, encoding="utf-8")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (copy.parent / "sitecustomize.py").write_text(_NO_EDITABLE, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
