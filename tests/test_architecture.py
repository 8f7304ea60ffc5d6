"""The arrows between the packages hold, also for what a bare import loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

pytestmark = pytest.mark.first
ROOT = Path(__file__).parents[1]
PACKAGES = ("buildlib", "device_scripts", "harness", "plugins", "reports", "suites")
Where = Literal["loading", "in a function", "for types"]
GENERATE = (
    "import harness.cli.app, harness.cli.generate, harness.cli.device_lease, "
    "harness.runtimes.genie.runtime"
)
"""The command, what its lease takes, and the runtime that it opens."""
_FEW_LINES = 60
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@cache
def loaded_by(statement: str) -> set[str]:
    """Names of the modules in memory after running `statement` in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    ).stdout
    return set(output.split())


def test_the_import_contracts_hold() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import harness.results.store", {"adbutils", "onnxruntime", "onnx", "typer", "pandas"}),
        (
            "import harness.devices.adb.transport, buildlib.container.container",
            {"onnxruntime", "onnx", "onnx_ir", "numpy", "sqlalchemy"},
        ),
        ("import buildlib.genai", {"adbutils", "sqlalchemy", "onnxruntime_qnn"}),
        ("import buildlib.toolchains.ort_qnn.worker", {"onnx", "onnx_ir", "numpy", "pydantic"}),
        ("import buildlib.numerics.emulator_worker", {"onnx", "onnx_ir", "pydantic"}),
        ("import harness.cli.app", {"onnxruntime", "onnx", "sqlalchemy", "numpy"}),
        ("import harness.cli.generate", {"sqlalchemy", "harness.pool", "numpy"}),
        (
            GENERATE,
            {
                "numpy",
                "onnx",
                "buildlib.toolchains.compile_config",
                "harness.results.store",
                "harness.telemetry.conditions",
                "plugins",
            },
        ),
        ("import harness, buildlib, reports, suites", {"numpy", "pydantic", "onnx", "typer"}),
    ],
)
def test_an_import_loads_only_what_it_needs(statement: str, absent: set[str]) -> None:
    assert loaded_by(statement) & absent == set()


def test_a_prompt_loads_a_part_of_the_core() -> None:
    ours = {name for name in loaded_by(GENERATE) if name.partition(".")[0] in PACKAGES}
    assert len(ours) <= 100


def test_reading_results_needs_only_leaves_of_the_build_library() -> None:
    loaded = loaded_by("import harness.results.store")
    leaves = {"buildlib.closeable", "buildlib.error_base", "buildlib.files", "buildlib.validation"}
    assert {name for name in loaded if name.startswith("buildlib.")} == leaves


def test_every_package_is_typed() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()


@cache
def sources() -> dict[str, ast.Module]:
    """Return the parsed modules of all packages, by name."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {
        name.removesuffix(".__init__"): ast.parse(path.read_text("utf-8"))
        for name, path in names.items()
    }


def imports_of(block: ast.AST, where: Where = "loading") -> Iterator[tuple[str, Where]]:
    """Yield what a module imports, and where: while it loads, in functions, or for types alone."""
    for node in (node for part in _BLOCKS for node in getattr(block, part, ())):
        if isinstance(node, ast.Import):
            yield from ((each.name, where) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            for name in (f"{node.module}.{each.name}" for each in node.names):
                yield name if name in sources() else str(node.module), where
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports_of(node, "in a function")
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imports_of(node, "for types")
        else:
            yield from imports_of(node, where)


def test_no_module_reaches_itself_through_its_imports() -> None:
    imports = {
        name: {one for one, _ in imports_of(module)} & sources().keys()
        for name, module in sources().items()
    }
    # `Devices` opens a device through its type, to which it hands itself.
    imports["harness.devices.spec"].remove("harness.devices.devices")
    while leaves := {name for name, found in imports.items() if not found}:
        imports = {name: found - leaves for name, found in imports.items() if name not in leaves}
    assert imports == {}


def test_an_import_in_a_function_loads_a_library_or_a_room_of_ours() -> None:
    # Every pytest of an environment loads the plugin; devices have the files that a run needs.
    exempt = ("harness.pytest_plugin", "device_scripts")
    imports = {name: set(imports_of(module)) for name, module in sources().items()}

    @cache
    def loaded_with(name: str) -> set[str]:
        """Return what is loaded with a module: modules of ours, and libraries."""
        reached, todo = {name}, [name]
        while todo:
            loaded = {one for one, where in imports[todo.pop()] if where == "loading"}
            todo += (loaded & imports.keys()) - reached
            reached |= loaded
        return {one if one in imports else one.partition(".")[0] for one in reached}

    def spares(name: str, one: str) -> bool:
        """Return whether a module does without much as long as it has not imported the other."""
        more = loaded_with(one) - loaded_with(name) - sys.stdlib_module_names
        lines = sum(sources()[each].body[-1].end_lineno or 0 for each in more & imports.keys())
        return bool(more - imports.keys()) or lines > _FEW_LINES

    light = {
        f"{name} imports {one}"
        for name, found in imports.items()
        for one, where in found
        if where == "in a function" and one in imports and not name.startswith(exempt)
        if not spares(name, one)
    }
    assert light == set()


def test_a_public_class_name_stands_for_one_class() -> None:
    places: dict[str, list[str]] = {}
    for name, module in sources().items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
