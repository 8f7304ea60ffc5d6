"""Mutation score of packages that compute what no device could check: `make mutants`.

mutmut changes one place of a function at a time; a change that no test notices survives. Each
package is tried in a copy of the tracked files under `build/mutants`, on a random sample of its
mutants by the tests that run the changed function. mutmut changes neither decorated functions nor
values of modules.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

_ROOT = Path(__file__).resolve().parents[1]
_SURVIVED, _UNTRIED = 0, 33
"""mutmut's codes of mutants that pass their tests, and of those that no test runs."""


@dataclass(frozen=True)
class Package:
    """Files to change, and the tests to hold against them."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        "statistics": Package(
            ("harness/results/statistics/*.py",),
            tuple(
                f"tests/harness/results/test_{name}.py"
                for name in ("changes", "comparison", "gate", "history", "stability", "summary")
            ),
        ),
        "pool": Package(
            tuple(f"harness/pool/{name}.py" for name in ("failure_policy", "queue", "requirement")),
            tuple(
                f"tests/harness/pool/test_{name}.py"
                for name in (
                    "blame",
                    "ledger",
                    "ledger_stateful",
                    "queue",
                    "requirement",
                    "reservations",
                    "states",
                )
            ),
        ),
        "passes": Package(("buildlib/passes/*.py",), ("tests/buildlib/passes",)),
    }
)


def main(arguments: Sequence[str]) -> int:
    """Print the score and the survivors of each package."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument("--sample", type=int, default=150, help="mutants of a package")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    options = parser.parse_args(arguments)
    if unknown := set(options.packages) - set(PACKAGES):
        parser.error(f"no package {', '.join(sorted(unknown))}; known are {', '.join(PACKAGES)}")
    if find_spec("mutmut") is None:
        parser.error("mutmut is missing: pip install -e '.[mutants]'")
    for name in options.packages or PACKAGES:
        folder = _ROOT / "build" / "mutants" / name
        codes = _try(folder, PACKAGES[name], options.sample, options.seed)
        alive = sorted(mutant for mutant, code in codes.items() if code == _SURVIVED)
        untried = sorted(mutant for mutant, code in codes.items() if code == _UNTRIED)
        caught = len(codes) - len(alive) - len(untried)
        print(f"{name}: {caught} of {len(codes)} mutants caught, {caught / len(codes):.0%}")
        for mutant in alive:
            print(f"\nsurvived: {mutant}\n{_mutmut(folder, 'show', mutant).stdout}")
        functions = Counter(mutant.rpartition("__mutmut_")[0] for mutant in untried)
        for function, count in functions.items():
            print(f"run by no test: {function}, {count} of its mutants")
    return 0


def _try(folder: Path, package: Package, sample: int, seed: int) -> dict[str, int]:
    """Return mutmut's code of each mutant of the sample."""
    shutil.rmtree(folder, ignore_errors=True)
    files = subprocess.run(
        ["git", "ls-files", "-z"],  # noqa: S607 - of the user's path
        cwd=_ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, files):
        if (_ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, folder / name)
    settings = {
        "source_paths": sorted({path.partition("/")[0] for path in package.files}),
        "only_mutate": list(package.files),
        "also_copy": sorted(path.name for path in folder.iterdir() if path.name != ".git"),
        "pytest_add_cli_args": [
            "-n",
            "0",
            "-m",
            "not slow and not variant",
            "-p",
            "no:cacheprovider",
        ],
        "pytest_add_cli_args_test_selection": list(package.tests),
        "timeout_constant": 10.0,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    with (folder / "pyproject.toml").open("a") as file:
        file.write("\n[tool.mutmut]\n" + "\n".join(lines) + "\n")
    # The first call makes the mutants, learns which tests run them, and then finds none to try.
    made = _mutmut(folder, "run", "none")
    names = sorted(_codes(folder))
    if not names:
        raise SystemExit(f"mutmut made no mutant: {(made.stdout + made.stderr)[-2000:]}")
    chosen = random.Random(seed).sample(names, min(sample, len(names)))  # noqa: S311 - no secret
    tried = _mutmut(folder, "run", *chosen)
    codes = {name: code for name, code in _codes(folder).items() if name in chosen}
    if None in codes.values():
        raise SystemExit(f"mutmut did not try all: {(tried.stdout + tried.stderr)[-2000:]}")
    return {name: code for name, code in codes.items() if code is not None}


def _codes(folder: Path) -> dict[str, int | None]:
    """Read what mutmut notes of each mutant: a code once it was tried."""
    codes: dict[str, int | None] = {}
    for path in (folder / "mutants").rglob("*.meta"):
        codes |= json.loads(path.read_text())["exit_code_by_key"]
    return codes


def _mutmut(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    # The tests' own environment, and nothing of a run that this may be part of.
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    return subprocess.run(
        [sys.executable, "-m", "mutmut", *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
