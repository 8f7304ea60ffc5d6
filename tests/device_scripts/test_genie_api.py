"""The bindings against the real library; no model is needed for these."""

import ast
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import device_scripts
from harness.runtimes.container_model import qnn_api_files
from tests.device_scripts.conftest import Runner

if TYPE_CHECKING:
    from device_scripts import genie_api
else:
    import genie_api

_FOLDER = Path(device_scripts.__file__).parent
SCRIPTS = sorted([*_FOLDER.glob("*.py"), *_FOLDER.parent.glob("plugins/*/on_device/*.py")])
GOING_ALONG = sorted(qnn_api_files().values())
NEWER = {
    "removeprefix", "removesuffix", "pairwise", "batched", "bit_count", "is_relative_to", "walk",
}  # fmt: skip
"""Functions that Python 3.8 lacks, and that are likely to slip in."""


@pytest.mark.parametrize(
    ("config", "status", "message"),
    [
        ("", "GENIE_STATUS_ERROR_JSON_FORMAT (-7)", "parse error"),
        ("{garbage", "GENIE_STATUS_ERROR_JSON_FORMAT (-7)", "parse error"),
        ("{}", "GENIE_STATUS_ERROR_JSON_SCHEMA (-8)", "Missing dialog field: dialog"),
        (
            json.dumps({"dialog": {"version": 1, "type": "basic", "surprise": 1}}),
            "GENIE_STATUS_ERROR_JSON_SCHEMA (-8)",
            "additional property 'surprise'",
        ),
    ],
)
def test_a_refused_configuration_prints_genies_reason(
    runner: Runner, tmp_path: Path, config: str, status: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    done = runner.run("genie_t2t_run.py", "-c", "config.json", "-p", "x", cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"genie-t2t-run: error: GenieDialogConfig_createFromJson failed: {status}"
    )
    assert done.stdout.startswith("Using libGenie.so version 1.")
    assert "[BEGIN]" not in done.stdout


def test_an_emulator_s_process_keeps_to_one_cpu(runner: Runner) -> None:
    """Threads of the emulator wait busily wherever they find another."""
    program = "import genie_api, os; genie_api.Genie(); print(len(os.sched_getaffinity(0)))"
    command = [sys.executable, "-c", program]
    printed = subprocess.check_output(command, env=runner.environment, cwd=SCRIPTS[0].parent)
    assert int(printed) == 1


@pytest.mark.parametrize("package", ["libX.so:XProvider:CPU", "libX.so:Y", "a:b:c:d"])
def test_an_op_package_that_is_refused_is_named(
    runner: Runner, tmp_path: Path, package: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    more = {genie_api.OP_PACKAGES: package, "PYTHONPATH": str(SCRIPTS[0].parents[1])}
    done = type(runner)({**runner.environment, **more}).run(
        "genie_t2t_run.py", "-c", "config.json", "-p", "x", cwd=tmp_path
    )
    assert done.returncode == 1
    assert f"error: cannot register op package {package}: " in done.stderr.splitlines()[-1]


def test_a_missing_library_is_one_line(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    bare = type(runner)({"PATH": runner.environment["PATH"]})
    done = bare.run("genie_t2t_run.py", "-c", "config.json", "-p", "x", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("genie-t2t-run: error: cannot load libGenie.so: ")
    assert done.stderr.endswith("; set LD_LIBRARY_PATH\n")
    assert done.stderr.count("\n") == 1


def test_a_profile_that_cannot_be_written(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("profile create p\nprofile save p no/such/folder/p.json\n")
    done = runner.run("genie_app.py", "-s", "s", cwd=tmp_path)
    assert done.returncode == 1
    assert "line 2: cannot write the profile no/such/folder/p.json" in done.stderr


def test_results_are_copied_whole_and_bounded() -> None:
    buffers = genie_api.Buffers()
    out = (ctypes.c_void_p * 1)()
    buffers._allocate(5, out)
    pointer = ctypes.c_void_p(out[0])
    ctypes.memmove(pointer, b"12345", 5)
    assert buffers.text(pointer) == b"12345"
    assert buffers.text(ctypes.c_void_p(0)) == b""
    buffers._allocate(1 << 40, out)
    assert out[0] is None


@pytest.mark.parametrize("script", [*SCRIPTS, *GOING_ALONG], ids=lambda path: path.name)
def test_scripts_parse_as_python_3_8_and_need_the_standard_library_only(script: Path) -> None:
    """Syntax by the parser; of the library, what newer versions added and is likely to slip in."""
    tree = ast.parse(script.read_text(), feature_version=(3, 8))
    are_strings = "from __future__ import annotations" in script.read_text()
    beside = {path.stem for path in SCRIPTS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert node.attr not in NEWER
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            ours = beside | {"device_scripts", "plugins"}  # and the API that goes along to devices
            known = top in sys.stdlib_module_names | ours or name.startswith(
                "buildlib.toolchains.qnn"
            )
            assert known, name
        if isinstance(node, ast.Call):
            assert not [k.arg for k in node.keywords if k.arg in {"strict", "process_group"}]
        if isinstance(node, (ast.AnnAssign, ast.arg)) and node.annotation and not are_strings:
            assert not [n for n in ast.walk(node.annotation) if isinstance(n, ast.BinOp)], (
                "X | None"
            )
