"""The code of a stage is part of its key: its module, and everything that it imports."""

import ast
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import buildlib
from buildlib.builder.code_digest import CodeDigest
from buildlib.builder.runner import StageRunner
from buildlib.builder.sources import CheckpointSource
from buildlib.builder.stages.author import AuthorModel
from buildlib.cache.store import StageCache
from buildlib.graph.shape import GraphShape
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

PACKAGE = Path(buildlib.__file__).parent
STAGES = sorted(path.stem for path in (PACKAGE / "builder" / "stages").glob("[a-z]*.py"))


def module_of(path: Path, package: Path = PACKAGE) -> str:
    words = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
SAMPLE = sorted(MODULES)[::4]


@functools.cache
def imports_by_parsing(module: str) -> frozenset[str]:
    """What a module imports from the package when it runs, functions included."""
    tree = ast.parse(MODULES[module].read_text())
    names = set(imported_names(tree))
    parents = {name.rsplit(".", n)[0] for name in names for n in range(name.count(".") + 1)}
    return frozenset(parents & MODULES.keys()) - {module}


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value) in MODULES:
            yield str(node.value)
        yield from imported_names(node)


def reached_by_parsing(module: str) -> set[str]:
    reached: set[str] = set()
    pending = {module}
    while pending:
        name = pending.pop()
        reached.add(name)
        parents = {name.rsplit(".", n)[0] for n in range(name.count(".") + 1)}
        pending |= (imports_by_parsing(name) | parents) - reached
    return reached


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, for edits, which the tests see as changes of what was before."""
    compiled = shutil.ignore_patterns("__pycache__")
    folder = tmp_path_factory.mktemp("copy") / "buildlib"
    return Path(shutil.copytree(PACKAGE, folder, ignore=compiled))


def digests(package: Path) -> dict[str, str]:
    code = CodeDigest(package)
    return {stage: code.of(f"buildlib.builder.stages.{stage}") for stage in STAGES}


def test_imports_are_those_that_python_parses() -> None:
    digest = CodeDigest(PACKAGE)
    assert {name: digest.imports(name) for name in SAMPLE} == {
        name: imports_by_parsing(name) for name in SAMPLE
    }


def test_an_edit_changes_the_digest_of_the_stages_that_import_it_and_of_no_other(
    copy: Path,
) -> None:
    reached = {stage: reached_by_parsing(f"buildlib.builder.stages.{stage}") for stage in STAGES}
    before = digests(copy)
    for name in SAMPLE[::9]:
        with (copy / MODULES[name].relative_to(PACKAGE)).open("a") as file:
            file.write("EDITED = 1\n")
        after = digests(copy)
        changed = {stage for stage in STAGES if after[stage] != before[stage]}
        assert changed == {stage for stage in STAGES if name in reached[stage]}, name
        before = after


@pytest.mark.parametrize(
    ("stage", "toolchain", "file"),
    [
        ("compile_part", OrtQnnToolchain.__module__, "toolchains/ort_qnn/worker.py"),
        ("author", "", "checkpoint/family_keys.json"),
    ],
    ids=["child process", "table beside a module"],
)
def test_files_that_no_import_names_belong_to_the_code(
    stage: str, toolchain: str, file: str, copy: Path
) -> None:
    modules = (f"buildlib.builder.stages.{stage}", toolchain)
    before = CodeDigest(copy).of(*modules)
    (copy / file).write_bytes((copy / file).read_bytes() + b"\n")
    assert CodeDigest(copy).of(*modules) != before


def test_a_module_of_another_package_adds_nothing() -> None:
    digest = CodeDigest(PACKAGE)
    assert digest.of("buildlib.errors", "json.decoder") == digest.of("buildlib.errors")


@pytest.mark.needs("libatomic1")
def test_an_edited_architecture_runs_the_export_again(
    tiny: Path, tiny_text: str, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which architecture a checkpoint has decides the biases of its projections."""
    monkeypatch.setattr("buildlib.builder.runner.own_code", lambda: CodeDigest(copy))
    source = CheckpointSource(tiny, tiny_text)
    stage = AuthorModel(source, {"model": "0"}, GraphShape(16, 96))

    def run() -> bool:
        with StageCache(tmp_path / "cache", "tiny") as cache:
            runner = StageRunner(OrtQnnToolchain(), cache, tmp_path / "cache", None)
            return runner.run(stage).reused

    assert [run(), run()] == [False, True]
    architectures = copy / "checkpoint" / "architectures.py"
    architectures.write_text(architectures.read_text() + "EDITED = 1\n")
    assert run() is False
