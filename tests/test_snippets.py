"""Commands and snippets of README and docs, as printed.

The suite parses every command by the real command line, reads every YAML and JSON block by what
reads such files, resolves every import, and runs the Python blocks whose surroundings are cheap.
`<!-- not run: REASON -->` before a block of Python says why it is only imported.
"""

import ast
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from buildlib.builder_options import apply_options, flatten_options
from buildlib.genai import GenAIBuilderFactory
from harness.cli.app import build_app
from harness.devices.adb.device import AdbDevice
from harness.pipeline.recipe import LLMPipelineConfig
from harness.plans.plan_file import load_plan
from harness.pool.config import load_config
from suites.models import tiny_llama

_ROOT = Path(__file__).parents[1]
_DOCUMENTS = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"(?ms)^(?:<!-- not run: (?P<why>[^\n]+?) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```"
)
_SHELL = {"sh", "console", ""}
EXPORT = _ROOT / "tests" / "fixtures" / "exports" / "torchscript-llama-fixed"


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    path: Path
    line: int
    kind: str
    text: str
    why: str | None

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def blocks(*kinds: str) -> list[Block]:
    found = []
    for path in _DOCUMENTS:
        document = path.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(document):
            line = document.count("\n", 0, match.start("kind")) + 1
            if match["kind"] in kinds:
                found.append(Block(path, line, match["kind"], match["text"], match["why"]))
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each `qnnfarm` command; a block of output has them behind a `$`."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.kind != "sh" and not line.startswith("$ "):
            continue
        for part in re.split(r"&&|\|", line.removeprefix("$ ")):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words and words[0].endswith("qnnfarm"):
                yield words[1:]


SHELL = [pytest.param(b, words, id=f"{b}-{n}") for b in blocks(*_SHELL)
         for n, words in enumerate(commands(b))]  # fmt: skip
APP = typer.main.get_command(build_app())


@pytest.mark.parametrize(("block", "words"), SHELL)
def test_every_command_parses(block: Block, words: list[str]) -> None:
    command: Any = APP
    context = None
    name: str | None = "qnnfarm"
    while isinstance(command, TyperGroup):
        context = command.context_class(command, parent=context, info_name=name)
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command = found
    command.make_context(name, list(words), parent=context)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_every_python_block_has_names_that_are_there(block: Block) -> None:
    tree = ast.parse(block.text)
    imports: list[ast.stmt] = [
        node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    if block.why is None or "installed" not in block.why:
        exec(compile(ast.Module(imports, []), str(block), "exec"), {})  # noqa: S102


def given(
    block: Block, tiny_bundle: Path, virtual_device: Callable[[], AdbDevice]
) -> dict[str, object]:
    """Return what a block presupposes, and put the files that it names into the working folder."""
    match block.path.name:
        case "genie-configurations.md":
            shutil.copy(tiny_bundle / "genie_config.json", "genie_config.json")
        case "quantization.md":
            return {"builder": GenAIBuilderFactory.create(tiny_llama.folder())}
        case "deployment.md":
            Path("out").mkdir()
            Path("out/model.bin").write_bytes(b"as a model")
            return {"device": virtual_device()}
    return {}


RUN = [block for block in blocks("python") if block.why is None]


@pytest.mark.parametrize("block", RUN, ids=str)
def test_python_blocks_run(
    block: Block,
    request: pytest.FixtureRequest,
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    scope = given(block, tiny_bundle, lambda: request.getfixturevalue("virtual_device"))
    exec(compile(block.text, str(block), "exec"), scope)  # noqa: S102


def read_options(text: str) -> None:
    shutil.copytree(tiny_llama.folder() / "eaglet", "eaglet")
    shutil.copytree(EXPORT, "export")
    shutil.copy("export/model.onnx", "decode.onnx")
    builder = GenAIBuilderFactory.create(tiny_llama.folder())
    apply_options(builder, flatten_options(yaml.safe_load(text), Path.cwd()))
    assert builder.speculative_config is not None


def read_recipe(text: str) -> None:
    stages = {"model_loader": {}, **yaml.safe_load(text)}
    LLMPipelineConfig.of({"model_id_or_path": "my-model", "stages": stages})


def read_plan(text: str) -> None:
    if "containers:" not in text:
        text = f"name: some\ncontainers: [{{path: container}}]\n{text}"
    Path("plan.yaml").write_text(text)
    load_plan(Path("plan.yaml"))


def read_pool(text: str) -> None:
    Path("pool.yaml").write_text(text)
    load_config(Path("pool.yaml"))


READERS = {
    "builder.md": read_options,
    "quantization.md": read_recipe,
    "plans.md": read_plan,
    "dialogs.md": read_plan,
    "pool.md": read_pool,
}
ELSEWHERE = {"nightly.md"}  # tests/suites/nightly/test_recipes.py


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_is_read_by_what_reads_such_files(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if block.path.name in ELSEWHERE:
        assert yaml.safe_load(block.text)
        return
    READERS[block.path.name](block.text)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_is_read(block: Block) -> None:
    assert json.loads(block.text)
