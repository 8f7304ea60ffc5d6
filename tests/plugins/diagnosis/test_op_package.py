"""`qnnfarm op-package run`: an operation against a formula, and formulas that are none."""

import json
from pathlib import Path

import pytest

from harness.errors import BAD, GOOD, NO_ANSWER
from tests.buildlib.op_packages import PROVIDER, build_library
from tests.harness.cli.conftest import Run


@pytest.mark.parametrize(
    ("machine", "flags", "shown"),
    [(None, 0, "x86_64"), ("aarch64", 0, "aarch64"), ("hexagon", 0x75, "hexagon v75")],
)
def test_a_package_for_any_processor_is_checked(
    qnnfarm: Run, library: Path, tmp_path: Path, machine: str | None, flags: int, shown: str
) -> None:
    source = f"int {PROVIDER}(void *x) {{ return 0; }}"
    if machine is not None:
        library = build_library(tmp_path / "libX.so", source, machine=machine, flags=flags)
    done = qnnfarm("op-package", "check", library, "--provider", PROVIDER, "--json")
    assert done.returncode == GOOD, done.stderr
    operations = ["qnnfarm.scale::Scale"] if machine is None else None
    assert json.loads(done.stdout) == {"machine": shown, "operations": operations}
    wrong = qnnfarm("op-package", "check", library, "--provider", "Other")
    assert wrong.returncode == NO_ANSWER
    assert f"it exports {PROVIDER}" in wrong.stderr


@pytest.mark.parametrize(("formula", "code"), [("3 * x + 1", GOOD), ("3 * x", BAD)])
def test_the_exit_code_tells_whether_the_formula_holds(
    qnnfarm: Run, library: Path, formula: str, code: int
) -> None:
    command = ["op-package", "run", library, "--provider", PROVIDER, "--formula", formula]
    done = qnnfarm(*command, "--input", "x=1,1,2,32", "--json")
    assert done.returncode == code, done.stderr
    answer = json.loads(done.stdout)
    assert answer["operation"] == "qnnfarm.scale::Scale"
    assert (max(answer["steps"]) <= 1) == answer["passed"] == (code == GOOD)
